"""The command line signs, verifies and shows signatures, and prompts for the password of a key."""

from __future__ import annotations

import json
import os
import pty
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.packaging.signatures.sign_and_verify import verified
from tests.packaging.signers import PASSWORD, Signers
from tests.ranks import SECONDS, end, start

from trainload.cli import main as cli
from trainload.core.canonical_json import sha256_file


def test_the_command_signs_and_verifies(
    copied: Path, signers: Signers, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.run(["sign", str(copied), "--key", str(signers.alice.key), "--name", "alice", "--json"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["signer"] == sha256_file(signers.alice.public)
    assert cli.run(["verify", str(copied), "--identity", str(signers.alice.public)]) == 0
    assert f"verified: {signers.alice.public}" in capsys.readouterr().out


def test_verify_says_that_a_signature_was_not_asked_for(
    signed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["verify", str(signed)]) == 0
    assert "(not verified: pass --identity)" in capsys.readouterr().out


def test_verify_ends_with_1_and_one_line_where_a_signature_is_missing(
    copied: Path, signers: Signers, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["verify", str(copied), "--identity", str(signers.alice.public)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{copied}/signatures: there is no signature")


def test_the_password_is_in_the_environment(
    copied: Path, signers: Signers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINLOAD_KEY_PASSWORD", PASSWORD.decode())
    assert cli.run(["sign", str(copied), "--key", str(signers.alice.encrypted)]) == 0
    assert verified(copied, signers.alice.public).problems == ()


def on_terminal(terminal: str, words: Sequence[str]) -> None:
    """Run a command line in its own session, with a terminal as standard input and error."""
    os.setsid()
    opened = os.open(terminal, os.O_RDWR | os.O_NOCTTY)
    for stream in (0, 2):
        os.dup2(opened, stream)
    os.close(opened)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # multiprocessing replaces it with os.devnull
    sys.argv = ["trainload", *words]
    cli.main()


def test_the_password_is_asked_for_on_a_terminal(
    copied: Path, signers: Signers, tmp_path: Path
) -> None:
    words = ["sign", str(copied), "--key", str(signers.alice.encrypted)]
    mine, theirs = pty.openpty()
    child = start(
        on_terminal,
        os.ttyname(theirs),
        words,
        cwd=tmp_path,
        log=tmp_path / "log",
        variables=os.environ,
    )
    try:
        said = os.read(mine, 1024)
        os.close(theirs)  # so that reading ends when the child, which has its own copy, closes it
        while b"password of" not in said:
            said += os.read(mine, 1024)
        os.write(mine, PASSWORD + b"\n")
        child.join(SECONDS)
        assert child.exitcode == 0
    finally:
        end([child])
        os.close(mine)
    assert PASSWORD not in said
    assert verified(copied, signers.alice.public).problems == ()


def test_an_encrypted_key_without_a_terminal_is_a_clear_error(
    copied: Path,
    signers: Signers,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert cli.run(["sign", str(copied), "--key", str(signers.alice.encrypted)]) == 2
    assert "TRAINLOAD_KEY_PASSWORD" in capsys.readouterr().err


def test_inspect_shows_signatures(
    signed: Path, signers: Signers, capsys: pytest.CaptureFixture[str]
) -> None:
    (signed / "signatures/broken.sig").write_text("{}")
    assert cli.run(["inspect", str(signed), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["signatures"]
    assert first == {
        "file": "signatures/alice.sig",
        "kind": "key",
        "signer": sha256_file(signers.alice.public),
    }
    assert "malformed" in second["problem"]
