"""A rank waits until the journal has its events."""

from __future__ import annotations

import threading
from multiprocessing import Pipe

import pytest

from trainload.launching.ranks import rank_process
from trainload.launching.ranks.rank_messages import Flush
from trainload.launching.ranks.rank_process import PipeContact


def test_a_late_answer_does_not_end_the_next_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Pipe()
    contact = PipeContact(ours)
    monkeypatch.setattr(rank_process, "_FLUSH_SECONDS", 0.0)
    contact.flush()  # nobody answers in time
    monkeypatch.setattr(rank_process, "_FLUSH_SECONDS", 60.0)
    waiting = threading.Thread(target=contact.flush)
    waiting.start()
    assert [theirs.recv(), theirs.recv()] == [Flush(1), Flush(2)]
    contact.hear_flushed(1)
    waiting.join(0.1)
    assert waiting.is_alive()
    contact.hear_flushed(2)
    waiting.join(60.0)
    assert not waiting.is_alive()
