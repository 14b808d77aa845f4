"""A store of releases: blobs by digest, releases by line and number, and each line's current one.

    store.json                              marks the folder as a store
    blobs/sha256/ab/abcd...                 files, by the sha256 of their bytes
    lines/LINE/releases/00000007.json       published releases: `Release`
    lines/LINE/current/00000003.json        history of the current release: `Pointer`; the last one
                                            is valid
    lines/LINE/marks/00000007.json          later verdicts on releases: `Mark`
    builds/JOB/00000002.json                compiled graphs of a job: `StoredBuild`
    pushes/..., gc/...                      leases of running pushes, and of a garbage collection

Everything except marks is written once. If several writers append concurrently, each tries to
create the file of the next number: exactly one succeeds, and the others read its record and try the
number after it. So nothing is lost, and no lock outlives a writer.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from trainload.core.errors import ConflictError, IntegrityError, StorageError
from trainload.core.records import MAX_RECORD, Sealed, now
from trainload.core.storage.interface import NO_OPTIONS
from trainload.core.storage.open_files import open_files
from trainload.core.suggestions import did_you_mean
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.format.manifest_records import FileEntry
from trainload.packaging.format.package_paths import MANIFEST
from trainload.packaging.stores.releases import (
    Mark,
    Pointer,
    Release,
    ReleaseState,
    StoreInfo,
    Verdict,
    check_files,
    is_id,
    is_line,
    release_id,
    shown,
)

INFO = "store.json"
NOBODY = "none"
"""Value of `only_if` for a line without a current release."""
_PACKAGE_HINT = "It is a package: use it as it is, or push it to a store."
_READERS = 8
_TRIES = 1000

R = TypeVar("R", bound=Sealed)


def blob_path(sha256: str) -> str:
    """Return the path of the blob of a digest in a store."""
    return f"blobs/sha256/{sha256[:2]}/{sha256}"


class Store:
    """A store, in a folder or at an fsspec URL.

    Laws: a release exists with all its files, or not at all; published releases are never lost,
    even with concurrent writers; every record that is read is compared with its checksum.

    Raises:
        StorageError: there is no store, or it cannot be reached.

    Example:
        store = trainload.Store("s3://models/gpt")
        print(store.lines())
    """

    def __init__(
        self, url: str | Path, options: Mapping[str, Any] = NO_OPTIONS, *, create: bool = False
    ) -> None:
        self.files = open_files(url, options)
        if self.read_record(StoreInfo, INFO) is not None:
            return
        existing = self.files.names("")
        # another writer has just created it, store.json first
        if existing and self.read_record(StoreInfo, INFO) is not None:
            return
        if existing:
            raise StorageError(
                "this location contains other files, but no store",
                where=self.url,
                got=", ".join(existing[:5]),
                hint=_PACKAGE_HINT if MANIFEST in existing else "",
            )
        if not create:
            raise StorageError(
                "there is no store here", where=self.url, hint="Create one with `trainload push`."
            )
        self.files.replace(INFO, StoreInfo().to_bytes())

    @property
    def url(self) -> str:
        """URL of the store, for messages."""
        return self.files.url

    def lines(self) -> tuple[str, ...]:
        """Return the names of the store's lines, sorted."""
        return tuple(name for name in self.files.names("lines") if is_line(name))

    def line(self, name: str | None, default: str | None = None) -> str:
        """Return a valid line name: `name`, or if it is None, the store's only line, or `default`
        if the store is empty.

        Raises:
            StorageError: the name is invalid, or it is None and the store has several lines, or
                none and no default is given.
        """
        if name is not None:
            if not is_line(name):
                raise StorageError(
                    "this is not a valid line name",
                    where=name,
                    expected="lowercase letters, digits and _ . -, at most 64",
                )
            return name
        lines = self.lines()
        if len(lines) == 1 or (not lines and default is not None):
            return lines[0] if lines else str(default)
        if not lines:
            raise StorageError("the store has no releases", where=self.url)
        raise StorageError(
            "the store has several lines",
            where=self.url,
            got=", ".join(lines[:10]),
            hint="Specify one with --line.",
        )

    def known_line(self, name: str) -> str:
        """Return `name` if the store has a line of this name.

        Raises:
            StorageError: there is none.
        """
        if name not in self.lines():
            raise StorageError(
                "there is no such line",
                where=f"{self.url}, line {name}",
                expected=f"one of {', '.join(self.lines()[:10]) or 'none'}",
                hint=did_you_mean(name, self.lines()),
            )
        return name

    def release_ids(self, line: str) -> list[str]:
        """Return the ids of a line's releases, in order."""
        return self.record_ids(f"lines/{line}/releases")

    def release(self, line: str, release: str | int | None = None) -> Release:
        """Return a release of a line.

        Args:
            line: name of the line.
            release: number of the release, or "latest". None: the current one.

        Raises:
            StorageError: there is no such release.
            IntegrityError: its record is damaged.
        """
        identifier = self._resolve_id(line, release)
        record = self._read_release(line, identifier)
        if record is None:
            latest = ", ".join(shown(each) for each in self.release_ids(line)[-5:]) or "none"
            raise StorageError(
                "there is no such release",
                where=f"{self.url}, line {line}",
                expected=f"one of {latest}",
                got=shown(identifier),
            )
        return record

    def current(self, line: str) -> Pointer | None:
        """Return the entry of a line's current release, or None if no release is current."""
        ids = self.record_ids(f"lines/{line}/current")
        return self._read_pointer(line, ids[-1]) if ids else None

    def history(self, line: str) -> tuple[Pointer, ...]:
        """Return the history of a line's current releases, oldest first."""
        pointers = self._read_in_parallel(
            lambda each: self._read_pointer(line, each), self.record_ids(f"lines/{line}/current")
        )
        return tuple(pointer for pointer in pointers if pointer is not None)

    def mark_of(self, line: str, release: str) -> Mark | None:
        """Return the mark of a release, or None."""
        path = f"lines/{line}/marks/{release}.json"
        mark = self.read_record(Mark, path)
        if mark is not None and (mark.line, mark.release) != (line, release):
            raise IntegrityError(
                "a record of the store does not match its path", where=f"{self.url}/{path}"
            )
        return mark

    def releases(self, line: str) -> tuple[ReleaseState, ...]:
        """Return a line's releases with their present status, in order.

        Raises:
            IntegrityError: a record is damaged.
        """
        ids = self.release_ids(line)
        releases = self._read_in_parallel(lambda each: self._read_release(line, each), ids)
        marked = {name.removesuffix(".json") for name in self.files.names(f"lines/{line}/marks")}
        marks = dict(
            zip(
                ids,
                self._read_in_parallel(
                    lambda each: self.mark_of(line, each) if each in marked else None, ids
                ),
                strict=True,
            )
        )
        history = self.history(line)
        promoted: dict[str, str] = {}
        current = None
        for pointer in history:
            if pointer.release != current:  # otherwise it only confirms the entry before
                promoted[pointer.release] = pointer.reason
            current = pointer.release
        return tuple(
            _release_state(release, marks[release.id], promoted, current)
            for release in releases
            if release is not None
        )

    def blob_sizes(self, digests: Iterable[str]) -> dict[str, int | None]:
        """Return digest -> size of its blob in bytes, or None if the store does not have it."""
        ordered_digests = list(digests)
        with ThreadPoolExecutor(_READERS) as pool:
            return dict(
                zip(
                    ordered_digests,
                    pool.map(lambda digest: self.files.size(blob_path(digest)), ordered_digests),
                    strict=True,
                )
            )

    def publish(
        self,
        line: str,
        manifest: Manifest,
        digest: str,
        files: Mapping[str, FileEntry],
        *,
        verdict: Verdict = "candidate",
        reason: str = "",
        message: str = "",
        facts: Mapping[str, bool | int | float | str] | None = None,
    ) -> tuple[Release, bool]:
        """Publish a release whose blobs are in the store already.

        A package that the line has already with the same verdict is not published again; nor is one
        with the same facts, whatever its present verdict, unless its files were removed.

        Returns:
            The release, and True if it is new.

        Raises:
            StorageError: a text is too long, or the store cannot be written.
        """
        records = self._read_in_parallel(
            lambda each: self._read_release(line, each), self.release_ids(line)
        )
        published = [release for release in records if release is not None]
        for release in reversed(published):
            if release.package != digest or release.files != dict(files):
                continue
            mark = self.mark_of(line, release.id)
            thought = release.verdict if mark is None else mark.verdict
            if thought == verdict or (facts and release.facts == facts and thought != "removed"):
                return release, False
        parent = next(
            (release.id for release in reversed(published) if release.package == manifest.parent),
            None,
        )
        nonce = secrets.token_hex(16)

        def make(name: str, _last: str | None) -> Release:
            return make_record(
                Release,
                line=line,
                id=name,
                package=digest,
                program=manifest.program_digest,
                weights=manifest.weights_digest,
                parent=parent,
                files=dict(sorted(files.items())),
                verdict=verdict,
                reason=reason,
                message=message,
                facts=dict(facts or {}),
                created=now(),
                nonce=nonce,
            )

        return self.append(f"lines/{line}/releases", make), True

    def promote(
        self,
        line: str,
        release: str | int,
        *,
        only_if: str | int | None = None,
        after: str | None = None,
        reason: str = "",
        rejected: bool = False,
    ) -> Pointer:
        """Make a release current.

        Args:
            line: name of the line.
            release: number of the release.
            only_if: number of the release that must be current now, or "none"; None: no condition.
            after: id of the entry that must be the last one of the history; None: no condition.
            reason: reason that the history shows.
            rejected: if True, promote the release even if it was rejected or rolled back; it
                becomes a candidate again.

        Raises:
            ConflictError: another release than `only_if` is current, or another entry than `after`
                is the last one; nothing was changed.
            StorageError: there is no such release, it was rejected, its files were removed, or the
                store does not support conditions.
        """
        record = self.release(line, release)
        if rejected and _present_verdict(record, self.mark_of(line, record.id))[0] == "rejected":
            self.mark(line, record.id, "candidate", reason or "promoted although it was rejected")
        self._check_usable(record)
        expected = None if only_if is None or str(only_if) == NOBODY else release_id(only_if)
        if (only_if, after) != (None, None) and not self.files.exclusive:
            raise StorageError(
                "this store does not support conditional writes",
                where=self.url,
                hint="Omit only_if; then the last writer wins.",
            )
        nonce = secrets.token_hex(16)

        def make(name: str, last: str | None) -> Pointer:
            before = self._read_pointer(line, last) if last is not None else None
            if after is not None and last != after:
                raise ConflictError(
                    "the line's history has changed",
                    where=f"{self.url}, line {line}",
                    expected=f"entry {shown(after)}",
                    got=f"entry {shown(last)}: {before.reason}" if last and before else "none",
                    hint="Check `trainload releases`, and decide again.",
                )
            if only_if is not None and (before.release if before else None) != expected:
                raise ConflictError(
                    "another release has become current",
                    where=f"{self.url}, line {line}",
                    expected=f"release {shown(expected)}" if expected else "none",
                    got=f"release {shown(before.release)}" if before else "none",
                    hint="Check `trainload releases`, and decide again.",
                )
            return make_record(
                Pointer,
                line=line,
                id=name,
                release=record.id,
                package=record.package,
                reason=reason,
                created=now(),
                nonce=nonce,
            )

        pointer = self.append(f"lines/{line}/current", make)
        self._undo_if_removed(line, record, pointer)
        return pointer

    def confirm(self, line: str, reason: str) -> Pointer | None:
        """Append an entry that repeats the current release, so that a promotion with `after` set to
        the entry before it fails.

        Returns:
            The entry, or None if no release is current.
        """
        nonce = secrets.token_hex(16)
        if self.current(line) is None:
            return None

        def make(name: str, last: str | None) -> Pointer:
            assert last is not None, "entries are never removed"
            before = self._read_pointer(line, last)
            assert before is not None, "entries are never removed"
            return before.model_copy(
                update={"id": name, "reason": reason, "created": now(), "nonce": nonce}
            )

        return self.append(f"lines/{line}/current", make)

    def mark(self, line: str, release: str | int, verdict: str, reason: str) -> Mark:
        """Set the present verdict on a release: "rejected", "candidate" again, or "removed".

        It replaces an earlier one.

        Raises:
            StorageError: there is no such release.
        """
        record = self.release(line, release)
        mark = make_record(
            Mark,
            line=line,
            release=record.id,
            verdict=verdict,
            reason=reason,
            created=now(),
            nonce=secrets.token_hex(16),
        )
        self.files.replace(f"lines/{line}/marks/{record.id}.json", mark.to_bytes())
        return mark

    def _undo_if_removed(self, line: str, release: Release, pointer: Pointer) -> None:
        """Undo a promotion if gc has removed the release's files.

        gc marks a release and then checks which one is current; this checks in the opposite order,
        so that at least one of the two notices the other.
        """
        mark = self.mark_of(line, release.id)
        if mark is None or mark.verdict != "removed":
            return
        before = [
            each
            for each in self.history(line)
            if each.id != pointer.id and each.release != release.id
        ]
        if before:
            self.promote(
                line, before[-1].release, reason=f"the files of release {release.name} were removed"
            )
        raise StorageError(
            "the release's files were removed",
            where=f"{self.url}, line {line}, release {release.name}",
            got=mark.reason,
        )

    def _check_usable(self, release: Release) -> None:
        verdict, reason = _present_verdict(release, self.mark_of(release.line, release.id))
        where = f"{self.url}, line {release.line}, release {release.name}"
        if verdict == "removed":
            raise StorageError("the release's files were removed", where=where, got=reason)
        if verdict == "rejected":
            hint = "To use it anyway, run `trainload promote --rejected`."
            raise StorageError("the release was rejected", where=where, got=reason, hint=hint)

    def _resolve_id(self, line: str, release: str | int | None) -> str:
        where = f"{self.url}, line {line}"
        if release is not None and release != "latest":
            return release_id(release)
        ids = self.release_ids(line)
        if not ids:
            self.known_line(line)
        if release == "latest" and ids:
            return ids[-1]
        pointer = self.current(line)
        if pointer is None:
            raise StorageError(
                "the line has no current release",
                where=where,
                hint="Specify one, or make one current with `trainload promote`.",
            )
        return pointer.release

    def append(self, folder: str, make: Callable[[str, str | None], R]) -> R:
        """Write the record with the next number into a folder of the store.

        `make` receives its id, and the id of the last record.
        """
        for attempt in range(_TRIES):
            ids = self.record_ids(folder)
            number = int(ids[-1][:8]) + 1 if ids else 1
            name = (
                f"{number:08d}" if self.files.exclusive else f"{number:08d}-{secrets.token_hex(8)}"
            )
            record = make(name, ids[-1] if ids else None)
            # two writers may use the same number: their ids differ, and both records stay
            if not self.files.exclusive:
                self.files.replace(f"{folder}/{name}.json", record.to_bytes())
                return record
            if self.files.create(f"{folder}/{name}.json", record.to_bytes()):
                return record
            time.sleep(random.uniform(0, min(1.0, 0.005 * (attempt + 1))))
        raise StorageError(
            f"too many concurrent writers: gave up after {_TRIES} attempts",
            where=f"{self.url}/{folder}",
            hint="Try again later.",
        )

    def record_ids(self, folder: str) -> list[str]:
        """Return the ids of the records of a folder, in order."""
        names = (
            name.removesuffix(".json")
            for name in self.files.names(folder)
            if name.endswith(".json")
        )
        return sorted(name for name in names if is_id(name))

    def _read_in_parallel(self, read: Callable[[str], R | None], ids: list[str]) -> list[R | None]:
        with ThreadPoolExecutor(_READERS) as pool:
            return list(pool.map(read, ids))

    def read_record(self, kind: type[R], path: str) -> R | None:
        """Return a record, or None if it does not exist."""
        data = self.files.read(path, MAX_RECORD)
        return None if data is None else kind.from_bytes(data, f"{self.url}/{path}")

    def _read_release(self, line: str, release: str) -> Release | None:
        path = f"lines/{line}/releases/{release}.json"
        record = self.read_record(Release, path)
        if record is not None:
            if (record.line, record.id) != (line, release):
                raise IntegrityError(
                    "a record of the store does not match its path", where=f"{self.url}/{path}"
                )
            check_files(record.files, f"{self.url}/{path}")
        return record

    def _read_pointer(self, line: str, pointer: str) -> Pointer | None:
        path = f"lines/{line}/current/{pointer}.json"
        record = self.read_record(Pointer, path)
        if record is not None and (record.line, record.id) != (line, pointer):
            raise IntegrityError(
                "a record of the store does not match its path", where=f"{self.url}/{path}"
            )
        return record


def make_record(kind: type[R], **fields: object) -> R:
    """Return a record of fields that the caller passed.

    Raises:
        StorageError: a field is not allowed.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise StorageError(
            f"{first['loc'][0]} cannot be recorded: {first['msg']}", where=kind.__name__.lower()
        ) from error


def _present_verdict(release: Release, mark: Mark | None) -> tuple[str, str]:
    """Return a release's present verdict and its reason: those of the mark, if there is one."""
    return (release.verdict, release.reason) if mark is None else (mark.verdict, mark.reason)


def _release_state(
    release: Release, mark: Mark | None, promoted: Mapping[str, str], current: str | None
) -> ReleaseState:
    verdict, reason = _present_verdict(release, mark)
    if verdict == "removed":
        return ReleaseState(release, "removed", reason)
    if release.id == current:
        return ReleaseState(release, "current", promoted[release.id])
    if verdict == "rejected":
        return ReleaseState(release, "rejected", reason)
    if release.id in promoted:
        return ReleaseState(release, "promoted", promoted[release.id])
    return ReleaseState(release, "candidate", reason)
