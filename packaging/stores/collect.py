"""Garbage collection of a store: removal of files that no release needs."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainload.core.errors import StorageError
from trainload.core.records import now
from trainload.core.storage.interface import NO_OPTIONS, StoredFile
from trainload.core.storage.lease import HeldLease, LeaseRecord
from trainload.core.suggestions import did_you_mean
from trainload.packaging.stores.leases import GRACE, gc_lease, push_leases
from trainload.packaging.stores.store import Store
from trainload.packaging.stores.stored_builds import (
    StoredBuild,
    build_blobs,
    builds_of,
    jobs_with_builds,
    remove_build,
)

_BLOB = re.compile(r"blobs/sha256/([0-9a-f]{2})/(\1[0-9a-f]{62})")


@dataclass(frozen=True, slots=True)
class GcReport:
    """Result of `gc`, or of its dry run.

    `removed_releases` lists "LINE NUMBER" of releases whose files were removed; `drafts` counts
    files that killed writers left.
    """

    store: str
    dry_run: bool
    removed_releases: tuple[str, ...]
    removed_blobs: int
    removed_bytes: int
    kept_blobs: int
    kept_bytes: int
    live_pushes: int
    dead_pushes: int
    drafts: int


def gc(
    store: str | Path,
    *,
    keep: int | None = None,
    lines: Collection[str] | None = None,
    spared: Collection[tuple[str, str]] = (),
    grace: float = GRACE,
    dry_run: bool = False,
    options: Mapping[str, Any] = NO_OPTIONS,
) -> GcReport:
    """Remove blobs that no release or build of a store needs: those of aborted pushes and, with
    `keep`, of old releases and builds.

    Records of releases stay, so a line's history remains readable.

    Args:
        store: a folder or fsspec URL.
        keep: keep the files of the last `keep` releases of each line and of its current one, and of
            the last `keep` builds of each job for each architecture, toolchain, verdict and maker;
            None: of all releases and builds.
        lines: lines to which `keep` applies; None: all. The others keep the files of all releases,
            and all builds are kept.
        spared: line and id of releases whose files are kept regardless of age.
        grace: seconds after which a push that has not renewed its lease counts as dead.
        dry_run: if True, only report what would be removed.
        options: options for fsspec.

    Raises:
        StorageError: another gc is running, or the store cannot be written. IntegrityError: a
            record is damaged. Nothing is removed then, since the blobs that it needs are unknown.

    Example:
        report = trainload.gc("s3://models/gpt", keep=10, dry_run=True)
        print(report.removed_releases, report.removed_bytes)
    """
    if keep is not None and keep < 1:
        raise StorageError(
            "gc must keep at least one release of each line", where="keep", got=str(keep)
        )
    if grace < 0:
        raise StorageError("the grace period must not be negative", where="grace", got=str(grace))
    place = Store(store, options)
    unknown = sorted(set(lines or ()) - set(place.lines()))
    if unknown:
        raise StorageError(
            "the store has no such line",
            where=place.url,
            expected=", ".join(place.lines()) or "none",
            got=unknown[0],
            hint=did_you_mean(unknown[0], place.lines()),
        )
    rule = (
        None
        if keep is None
        else _Rule(
            keep, tuple(place.lines() if lines is None else lines), frozenset(spared), lines is None
        )
    )
    if dry_run:
        return _collect(place, None, rule, grace)
    guard = gc_lease(place)
    try:
        return _collect(place, guard, rule, grace)
    finally:
        guard.close()


@dataclass(frozen=True, slots=True)
class _Rule:
    """Rule for the releases that keep their files: the last `keep` of each of `lines`, all of other
    lines, and `spared` ones. If `builds`, the last `keep` builds of each kind are kept, else all.
    """

    keep: int
    lines: tuple[str, ...]
    spared: frozenset[tuple[str, str]]
    builds: bool


def _collect(
    store: Store, guard: HeldLease[LeaseRecord] | None, rule: _Rule | None, grace: float
) -> GcReport:
    # The order matters: list pushes before releases, since a push releases its lease after
    # publishing its release.
    pushes = push_leases(store)
    began = time.time()
    live = {path for path, lease in pushes.items() if began - lease.renewed < grace}
    removed = _retire(store, guard, rule) if rule is not None else ()
    needed = {digest for path in live for digest in pushes[path].blobs}
    needed |= build_blobs(_kept_builds(store, guard, rule))
    for line in store.lines():
        for state in store.releases(line):
            if state.status != "removed" and f"{line} {state.release.name}" not in removed:
                needed |= {entry.sha256 for entry in state.release.files.values()}
    unneeded: list[StoredFile] = []
    needed_blobs: list[StoredFile] = []
    drafts: list[StoredFile] = []
    for file in store.files.walk(""):
        blob = _BLOB.fullmatch(file.path)
        if blob is not None:
            (needed_blobs if blob[2] in needed else unneeded).append(file)
        elif _is_draft(file.path) and file.modified is not None and began - file.modified >= grace:
            drafts.append(file)
    dead = [path for path in pushes if path not in live]
    if guard is not None:
        # leases first: a push that is still alive must notice that its lease is gone
        for path in dead:
            guard.check()
            store.files.delete(path)
        for file in (*unneeded, *drafts):
            guard.check()
            store.files.delete(file.path)
    return GcReport(
        store=store.url,
        dry_run=guard is None,
        removed_releases=removed,
        removed_blobs=len(unneeded),
        removed_bytes=sum(file.size for file in unneeded),
        kept_blobs=len(needed_blobs),
        kept_bytes=sum(file.size for file in needed_blobs),
        live_pushes=len(live),
        dead_pushes=len(dead),
        drafts=len(drafts),
    )


def _retire(store: Store, guard: HeldLease[LeaseRecord] | None, rule: _Rule) -> tuple[str, ...]:
    """Mark the releases whose files are to be removed. Return "LINE NUMBER" of each."""
    retired: list[str] = []
    for line in rule.lines:
        for state in store.releases(line)[: -rule.keep]:
            if state.status in ("removed", "current") or (line, state.release.id) in rule.spared:
                continue
            release = state.release
            if guard is not None:
                guard.check()
                before = store.mark_of(line, release.id)
                store.mark(
                    line, release.name, "removed", f"gc kept the last {rule.keep} releases, {now()}"
                )
                pointer = store.current(line)
                # promoted meanwhile: keep it
                if pointer is not None and pointer.release == release.id:
                    verdict, reason = (
                        (before.verdict, before.reason)
                        if before is not None
                        else (release.verdict, release.reason)
                    )
                    store.mark(line, release.name, verdict, reason)
                    continue
            retired.append(f"{line} {release.name}")
    return tuple(retired)


def _kept_builds(
    store: Store, guard: HeldLease[LeaseRecord] | None, rule: _Rule | None
) -> list[StoredBuild]:
    """Return the builds whose files are kept, after removing the records of the others."""
    kept: list[StoredBuild] = []
    for job in jobs_with_builds(store):
        of_kind: Counter[object] = Counter()
        for stored in builds_of(store, job):
            of_kind[stored.kind] += 1
            if rule is None or not rule.builds or of_kind[stored.kind] <= rule.keep:
                kept.append(stored)
            elif guard is not None:
                guard.check()
                remove_build(store, stored)
    return kept


def _is_draft(path: str) -> bool:
    """Return True if a file of this name is temporary: it remains only if its writer is killed."""
    return path.rpartition("/")[2].startswith(".") or path.startswith("probes/")
