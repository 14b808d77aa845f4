"""The verbs of stores: push, pull, releases, promote, gc. A store is a folder or an fsspec URL; packages go to OCI registries too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainload.core.errors import StorageError
from trainload.core.storage.interface import NO_OPTIONS
from trainload.launching.node.fetching import is_reference, parts_of
from trainload.packaging.format.package_files import check_outside_packages
from trainload.packaging.stores.collect import gc
from trainload.packaging.stores.oci import OciPushReport, is_oci, pull_oci, push_oci
from trainload.packaging.stores.pull import PullReport
from trainload.packaging.stores.pull import pull as pull_from_store
from trainload.packaging.stores.push import OnProgress, PushReport, unwatched
from trainload.packaging.stores.push import push as push_to_store
from trainload.packaging.stores.releases import Pointer, ReleaseState
from trainload.packaging.stores.store import Store

__all__ = ["Store", "gc", "promote", "pull", "push", "releases"]


def push(
    package: str | Path,
    store: str | Path,
    *,
    line: str | None = None,
    promote: bool = True,
    only_if: str | int | None = None,
    rejected: str | None = None,
    message: str = "",
    facts: Mapping[str, bool | int | float | str] | None = None,
    debug: bool = True,
    options: Mapping[str, Any] = NO_OPTIONS,
    on_progress: OnProgress = unwatched,
    on_wait: Callable[[str], None] = lambda _text: None,
) -> PushReport | OciPushReport:
    """Publish a package. Only files that the place lacks are sent; a push that was broken off goes on there.

    Args:
        package: its folder.
        store: a folder or fsspec URL, which becomes a store if there is nothing yet, or STORE#LINE of one; or oci://HOST/NAME:TAG.
        line: which line. None: the store's only one, or "main" in an empty store.
        promote: whether the release becomes the line's current one.
        only_if: promote only if this release is current now ("none": if none is); otherwise the release is published and not promoted.
        rejected: why the release must not be used; it is published as rejected, and not promoted.
        message: one for who reads the list of releases.
        facts: names and values that are kept with it: metrics, the data's snapshot.
        debug: whether debug/ travels.
        options: for fsspec's file system; for a registry `insecure` and `tls_verify`.
        on_progress: told how many bytes of how many are there.
        on_wait: told what is waited for.

    Raises:
        StorageError: there is no package, or the place cannot be reached or written; or it is a registry, which has no lines.
        PackageError: the package is damaged; nothing was published.
        ConflictError: another release is current than `only_if` says; the release was published.
    """
    if is_oci(store):
        if line is not None or not promote or only_if is not None or rejected is not None or facts:
            raise StorageError("a registry has tags, no lines and releases", where=str(store), hint="Give a message alone, or use a store.")
        return push_oci(Path(package), str(store), message=message, debug=debug, options=options, on_progress=on_progress)
    store, line = _line_named(store, line)
    if "://" not in str(store):
        check_outside_packages(Path(store))
    return push_to_store(
        package,
        store,
        line=line,
        promote=promote,
        only_if=only_if,
        rejected=rejected,
        message=message,
        facts=facts,
        debug=debug,
        options=options,
        on_progress=on_progress,
        on_wait=on_wait,
    )


def pull(
    store: str | Path,
    path: str | Path,
    *,
    line: str | None = None,
    release: str | int | None = None,
    debug: bool = True,
    reuse: Sequence[str | Path] = (),
    options: Mapping[str, Any] = NO_OPTIONS,
    on_progress: OnProgress = unwatched,
) -> PullReport:
    """Get a package. Every byte is compared with its digest before it is visible; what packages beside `path` have is not fetched.

    Args:
        store: a folder or fsspec URL, STORE#LINE or STORE#LINE/RELEASE of one, or oci://HOST/NAME:TAG.
        path: the package to write; a folder that does not exist.
        line: which line. None: the store's only one.
        release: its number, or "latest". None: the current one.
        debug: whether debug/ is wanted.
        reuse: further packages whose files may be used.
        options: as `push`.
        on_progress: told how many bytes of how many are there.

    Raises:
        StorageError: there is no such store, line, release or artifact; `path` is taken; or the disk has no room.
        IntegrityError: something there is damaged; nothing is left at `path`.
        UnsafePackageError: something there is not what the format allows.
    """
    if is_oci(store):
        if line is not None or release is not None:
            raise StorageError("a registry has tags, no lines and releases", where=str(store), hint="Name the tag, or a digest.")
        return pull_oci(str(store), Path(path), debug=debug, reuse=reuse, options=options, on_progress=on_progress)
    store, line, release = _release_named(store, line, release)
    return pull_from_store(store, path, line=line, release=release, debug=debug, reuse=reuse, options=options, on_progress=on_progress)


def releases(store: str | Path, *, line: str | None = None, options: Mapping[str, Any] = NO_OPTIONS) -> dict[str, tuple[ReleaseState, ...]]:
    """The releases of a store by line, in the order of their numbers, with what is known of each.

    Args:
        store: a folder or fsspec URL, or STORE#LINE of one.
        line: only this line. None: all.
        options: for fsspec.

    Raises:
        StorageError: there is no store or no such line.
        IntegrityError: a record is damaged.
    """
    store, line = _line_named(store, line)
    place = Store(store, options)
    lines = place.lines() if line is None else (place.known_line(line),)
    return {name: place.releases(name) for name in lines}


def promote(
    store: str | Path,
    release: str | int,
    *,
    line: str | None = None,
    only_if: str | int | None = None,
    reason: str = "",
    rejected: bool = False,
    options: Mapping[str, Any] = NO_OPTIONS,
) -> Pointer:
    """Make a release its line's current one: a candidate that has passed, or an older one again.

    Args:
        store: a folder or fsspec URL, or STORE#LINE of one.
        release: its number, or "latest".
        line: which line. None: the store's only one.
        only_if: the release that must be current now, or "none"; None: whatever is.
        reason: why.
        rejected: promote it even if it was rejected, or rolled back.
        options: for fsspec.

    Raises:
        ConflictError: another release is current than `only_if` says; nothing was changed.
        StorageError: there is no such release, it was rejected, or its files were removed.
    """
    store, line = _line_named(store, line)
    place = Store(store, options)
    return place.promote(place.line(line), release, only_if=only_if, reason=reason, rejected=rejected)


def _line_named(store: str | Path, line: str | None) -> tuple[str | Path, str | None]:
    """Return the store and the line that STORE or STORE#LINE and its companion name.

    Raises:
        StorageError: they name different lines, or the reference names a release.
    """
    url, line, release = _release_named(store, line, None)
    if release is not None:
        raise StorageError("this names a release", where=str(store), expected="STORE or STORE#LINE", hint="Leave out the release's number.")
    return url, line


def _release_named(store: str | Path, line: str | None, release: str | int | None) -> tuple[str | Path, str | None, str | int | None]:
    """Return the store, the line and the release that a reference STORE#LINE/RELEASE and its companions name.

    Raises:
        StorageError: they name different ones.
    """
    if not is_reference(store) or is_oci(store):
        return store, line, release
    url, own_line, own_release = parts_of(str(store))
    for what, own, other in (("line", own_line, line), ("release", own_release, release)):
        if own is not None and other is not None and own != str(other):
            raise StorageError(f"two {what}s are named", where=str(store), expected=f"one {what}", got=f"{own} and {other}")
    return url, own_line if line is None else line, own_release if release is None else release
