"""Child process of a test that acquires the lease, prints its ID or "other", and obeys commands.

Commands are lines: "demand", "promote N", "close", "asked". For each it prints a line of JSON: the
result, or the name of the error.
"""

from __future__ import annotations

import json
import sys

from trainload.core.errors import TrainloadError
from trainload.core.storage import lease
from trainload.packaging.stores.store import Store
from trainload.retraining.ticks.line_lease import Held, LineLeases


def say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def obey(store: Store, line: str, held: Held, words: list[str]) -> object:
    match words:
        case ["demand"]:
            held.check()
        case ["promote", release]:
            return store.promote(line, release, after=held.after).id
        case ["asked"]:
            return held.asked_to_stop
        case ["close"]:
            held.close()
    return "done"


def main(url: str, line: str, seconds: str, tick: str, beats: int | None = None) -> None:
    """Run the process. `beats`: heartbeats per lease duration, if a test waits for them."""
    if beats is not None:
        lease._BEATS = beats
    store = Store(url)
    held = LineLeases(store, line, owner=f"child {tick}").take_for(tick, float(seconds))
    if not isinstance(held, Held):
        say("other")
        return
    say(held.id)
    for command in sys.stdin:
        try:
            say(obey(store, line, held, command.split()))
        except TrainloadError as error:
            say(type(error).__name__)
