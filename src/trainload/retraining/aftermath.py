"""What follows a tick: a promoted release is handed over, old runs are removed, a command is told. None of it undoes the tick."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from trainload.capture.errors import StorageError, TrainloadError
from trainload.packaging.read import Package
from trainload.packaging.stores.collect import gc
from trainload.packaging.stores.releases import shown
from trainload.packaging.stores.store import Store
from trainload.retraining.config import Config, Handover
from trainload.retraining.records import Ended

_SUFFIXES = {"pt2": ".pt2", "aoti": ".pt2", "huggingface": ""}
_TAIL = 400
CURRENT = "current"


def hand_over(handover: Handover, package: Package, name: str, ended: Ended) -> None:
    """Exports a release, points the link `current` at it, and runs the command. What was exported before is not exported again.

    Args:
        handover: where and how.
        package: the release's.
        name: what it is called there, without a suffix.
        ended: the tick's record.

    Raises:
        TrainloadError: it cannot be exported, the place cannot be written, or the command failed.
    """
    from trainload.exporting import export

    place = Path(handover.place)
    target = place / f"{name}{_SUFFIXES[handover.form]}"
    try:
        place.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            export(package, target, to=handover.form, graph=handover.graph)
        link = place / f".{CURRENT}.{secrets.token_hex(8)}"
        link.symlink_to(target.name)
        link.replace(place / CURRENT)
    except OSError as error:
        raise StorageError(f"a release cannot be handed over: {error.strerror or error}", where=str(place)) from error
    if handover.command:
        tell((*handover.command, str(target)), ended, handover.timeout)


def tell(command: Sequence[str], ended: Ended, timeout: timedelta) -> None:
    """Runs a command with a tick's record as JSON on its standard input.

    Raises:
        StorageError: it cannot be started, failed, or took too long.
    """
    where = " ".join(command)
    record = {**ended.model_dump(mode="json"), "release": None if ended.release is None else shown(ended.release)}
    try:
        done = subprocess.run(
            list(command), input=json.dumps(record), capture_output=True, text=True, timeout=timeout.total_seconds(), check=False
        )
    except subprocess.TimeoutExpired as error:
        raise StorageError(f"a command took more than {timeout.total_seconds():g} s", where=where) from error
    except OSError as error:
        raise StorageError(f"a command cannot be started: {error.strerror or error}", where=where) from error
    if done.returncode != 0:
        raise StorageError(
            f"a command failed with status {done.returncode}", where=where, got=(done.stderr or done.stdout)[-_TAIL:].strip()
        )


def clean_up(config: Config, ticks: Sequence[str], kept: str | None, needed: Collection[str]) -> None:
    """Removes the folders of old runs, and the files of old releases.

    Args:
        config: what is kept.
        ticks: all ticks of the line, in order.
        kept: the tick whose run's folder stays, since the optimizer's state of the current release is there.
        needed: releases whose files stay, whatever was current since.

    Raises:
        TrainloadError: the store's gc failed.
    """
    root = Path(config.runs) / config.line
    there = [name for name in ticks if (root / name).is_dir()]
    for name in there[: -config.retention.runs]:
        if name != kept:
            away = root / f".{name}.{os.getpid()}"
            with suppress(FileNotFoundError):  # another process removes it
                (root / name).rename(away)
                shutil.rmtree(away)
    if config.retention.releases is not None:
        was_current = dict.fromkeys(entry.release for entry in reversed(Store(config.store).history(config.line)))
        kept_releases = {*list(was_current)[: config.retention.releases], *needed}
        gc(config.store, keep=1, lines=(config.line,), spared={(config.line, each) for each in kept_releases})


def in_words(error: TrainloadError) -> str:
    """An error in one line, for a record."""
    return " ".join(str(error).split())[:8192]
