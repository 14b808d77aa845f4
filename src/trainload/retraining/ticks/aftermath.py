"""Actions after a tick: hand over a promoted release, remove old runs, notify a command.

Their failures do not undo the tick.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from trainload.core.atomic import replace_link, temporary_beside
from trainload.core.errors import StorageError, TrainloadError
from trainload.core.storage.interface import send_file
from trainload.core.storage.open_files import open_bounded
from trainload.core.storage.places import is_url
from trainload.launching.node.cache import default_cache_dir
from trainload.packaging.package import Package
from trainload.packaging.stores.collect import gc
from trainload.packaging.stores.releases import shown
from trainload.packaging.stores.store import Store
from trainload.retraining.config.config import Config, Handover
from trainload.retraining.ticks.tick_records import Ended

_SUFFIXES = {"pt2": ".pt2", "aoti": ".pt2", "huggingface": ""}
_TAIL = 400
_REMOVED_RUN = re.compile(r"\.[0-9]{8}T[0-9]{6}Z\.([0-9a-f]+\.part|[0-9]+)")
CURRENT = "current"
_MOST_NAME_BYTES = 4096


def handed_over(handover: Handover) -> str | None:
    """Return the name of the release that was handed over last; None if there is none.

    Raises:
        StorageError: the place is a URL that cannot be reached.
    """
    if is_url(handover.place):
        content = open_bounded(handover.place).read(CURRENT, _MOST_NAME_BYTES)
        return None if content is None else content.decode(errors="replace").strip()
    link = Path(handover.place) / CURRENT
    return os.readlink(link) if link.is_symlink() else None


def name_at(handover: Handover, line: str, release: str) -> str:
    """Return the name under which a release is exported."""
    return f"{line}-{shown(release)}{_SUFFIXES[handover.form]}"


def hand_over(handover: Handover, package: Package, name: str, record: Mapping[str, Any]) -> None:
    """Export a release unless that was done, make `current` name it, and run the command.

    Args:
        handover: its configuration.
        package: package of the release.
        name: result of `name_at`.
        record: record that the command receives.

    Raises:
        TrainloadError: the export failed, the place cannot be written, or the command failed.
    """
    if is_url(handover.place):
        target = _export_to_url(handover, package, name)
    else:
        target = _export_to_folder(handover, package, name)
    if handover.command:
        tell((*handover.command, target), record, handover.timeout)


def _export_to_folder(handover: Handover, package: Package, name: str) -> str:
    """Export a release into a folder, with a link `current`; return the path."""
    from trainload.exporting.export_graphs import export

    place = Path(handover.place)
    target = place / name
    try:
        place.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            export(package, target, to=handover.form, graph=handover.graph)
        replace_link(place / CURRENT, target.name)
    except OSError as error:
        raise StorageError(
            f"a release cannot be handed over: {error.strerror or error}", where=str(place)
        ) from error
    return str(target)


def _export_to_url(handover: Handover, package: Package, name: str) -> str:
    """Export a release to a URL, with a file `current` that names it; return its URL."""
    from trainload.exporting.export_graphs import export

    files = open_bounded(handover.place)
    if handed_over(handover) != name:
        folder = default_cache_dir() / "retraining"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".handover-", dir=folder) as made:
            export(package, Path(made) / name, to=handover.form, graph=handover.graph)
            for path in sorted(Path(made).rglob("*")):
                if path.is_file():
                    send_file(files, path.relative_to(made).as_posix(), path)
        # those who serve see the release when it is complete
        files.replace(CURRENT, f"{name}\n".encode())
    return f"{files.url}/{name}"


def record_of(ended: Ended) -> dict[str, Any]:
    """Return a tick's record in the form that commands receive."""
    return {
        **ended.model_dump(mode="json"),
        "release": None if ended.release is None else shown(ended.release),
    }


def tell(command: Sequence[str], record: Mapping[str, Any], timeout: timedelta) -> None:
    """Run a command with a record as JSON on its standard input.

    Raises:
        StorageError: the command cannot be started, failed, or timed out.
    """
    where = " ".join(command)
    try:
        process = subprocess.run(
            list(command),
            input=json.dumps(record),
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout.total_seconds(),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise StorageError(
            f"a command took more than {timeout.total_seconds():g} s", where=where
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a word contains NUL
        raise StorageError(
            f"a command cannot be started: {getattr(error, 'strerror', None) or error}", where=where
        ) from error
    if process.returncode != 0:
        raise StorageError(
            f"a command failed with status {process.returncode}",
            where=where,
            got=(process.stderr or process.stdout)[-_TAIL:].strip(),
        )


def clean_up(
    config: Config, ticks: Sequence[str], kept_tick: str | None, needed: Collection[str]
) -> None:
    """Remove the folders of old runs, and the files of old releases.

    Args:
        config: configuration with the retention.
        ticks: all ticks of the line, in order.
        kept_tick: tick whose run's folder is kept, since it has the current release's optimizer
            state.
        needed: releases whose files are kept in any case.

    Raises:
        TrainloadError: a folder cannot be removed, or the store's gc failed.
    """
    if is_url(config.runs):
        _remove_runs_at(f"{config.runs.rstrip('/')}/{config.line}", config, ticks, kept_tick)
    else:
        _remove_runs(Path(config.runs) / config.line, config, ticks, kept_tick)
    if config.retention.releases is not None:
        was_current = dict.fromkeys(
            entry.release for entry in reversed(Store(config.store).history(config.line))
        )
        kept_releases = {*list(was_current)[: config.retention.releases], *needed}
        gc(
            config.store,
            keep=1,
            lines=(config.line,),
            spared={(config.line, each) for each in kept_releases},
        )


def _old_runs(
    there: Collection[str], config: Config, ticks: Sequence[str], kept_tick: str | None
) -> list[str]:
    """Return the ticks whose runs are removed, of those whose runs are there."""
    run_names = [name for name in ticks if name in there]
    return [name for name in run_names[: -config.retention.runs] if name != kept_tick]


def _remove_runs(root: Path, config: Config, ticks: Sequence[str], kept_tick: str | None) -> None:
    there = [name for name in ticks if (root / name).is_dir()]
    try:
        for name in _old_runs(there, config, ticks, kept_tick):
            with suppress(FileNotFoundError):  # another process has removed it
                (root / name).rename(temporary_beside(root / name))
        for folder in root.glob(".*") if root.is_dir() else ():
            # including leftovers of a process that was killed
            if _REMOVED_RUN.fullmatch(folder.name):
                with suppress(FileNotFoundError):
                    shutil.rmtree(folder)
    except OSError as error:
        raise StorageError(
            f"the folder of an old run cannot be removed: {error.strerror or error}",
            where=str(root),
        ) from error


def _remove_runs_at(url: str, config: Config, ticks: Sequence[str], kept_tick: str | None) -> None:
    """Remove old runs at a URL. One that is not removed to its end is removed the next time."""
    files = open_bounded(url)
    for name in _old_runs(set(files.names("")), config, ticks, kept_tick):
        for file in files.walk(name):
            files.delete(file.path)


def in_words(error: TrainloadError) -> str:
    """Return an error as one line, for a record."""
    return " ".join(str(error).split())[:8192]
