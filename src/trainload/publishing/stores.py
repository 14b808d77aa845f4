"""Operations on stores: push, pull, releases, promote, gc.

A store is a folder or fsspec URL; push and pull support OCI registries too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainload.core.errors import StorageError
from trainload.core.storage.interface import NO_OPTIONS
from trainload.core.storage.places import is_url, path_here
from trainload.packaging.format.package_files import check_outside_packages
from trainload.packaging.stores.collect import gc
from trainload.packaging.stores.oci import OciPushReport, pull_oci, push_oci
from trainload.packaging.stores.package_at_url import digest_at, fetch_package
from trainload.packaging.stores.pull import PullReport
from trainload.packaging.stores.pull import pull as pull_from_store
from trainload.packaging.stores.push import OnProgress, PushReport, unwatched
from trainload.packaging.stores.push import push as push_to_store
from trainload.packaging.stores.references import is_oci, is_reference, parts_of
from trainload.packaging.stores.releases import Pointer, ReleaseState
from trainload.packaging.stores.store import Store
from trainload.packaging.stores.stored_builds import BuildPushReport
from trainload.packaging.stores.stored_builds import push_build as push_build_to_store
from trainload.publishing.hub import HubPullReport, HubPushReport, is_hub, pull_hub, push_hub

__all__ = ["Store", "gc", "promote", "pull", "push", "push_build", "releases"]


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
) -> PushReport | OciPushReport | HubPushReport:
    """Publish a package in a store, a registry, or a repository of the Hugging Face Hub.

    Only missing files are sent, so a repeated push resumes.

    Args:
        package: the package's folder.
        store: a folder or fsspec URL (a store is created if it is empty), STORE#LINE, or
            oci://HOST/NAME:TAG, or hf://OWNER/NAME for a commit to the Hub (docs/guides/hub.md).
        line: name of the line. None: the store's only line, or "main" in an empty store.
        promote: if True, the release becomes the line's current one.
        only_if: promote only if this release is current now ("none": if none is); otherwise the
            release is published but not promoted.
        rejected: reason why the release must not be used; it is published as rejected, and not
            promoted.
        message: message that the list of releases shows.
        facts: names and values that are stored with the release: metrics, the snapshot of the data.
        debug: if True, include debug/.
        options: options for the fsspec file system; for a registry `insecure` and `tls_verify`.
        on_progress: called with the numbers of finished and total bytes.
        on_wait: called with a text that says what the push waits for.

    Raises:
        StorageError: there is no package, the storage cannot be reached or written, or options for
            lines were given for a registry, which has none.
        PackageError: the package is damaged; nothing was published.
        ConflictError: another release than `only_if` is current; the release was published.

    Example:
        report = trainload.push("gpt.tl", "s3://models/gpt", message="first version")
        print(report.sent_bytes)
        trainload.push("gpt.tl", "s3://models/gpt", line="nightly", promote=False)
    """
    if is_hub(store):
        if line is not None or not promote or only_if is not None or rejected is not None or facts:
            raise StorageError(
                "a repository of the Hub has commits, but no lines or releases",
                where=str(store),
                hint="Pass only a message, or use a store.",
            )
        return push_hub(path_here(package), str(store), message=message, debug=debug)
    if is_oci(store):
        if line is not None or not promote or only_if is not None or rejected is not None or facts:
            raise StorageError(
                "an OCI registry has tags, but no lines or releases",
                where=str(store),
                hint="Pass only a message, or use a store.",
            )
        return push_oci(
            path_here(package),
            str(store),
            message=message,
            debug=debug,
            options=options,
            on_progress=on_progress,
        )
    store, line = _resolve_line(store, line)
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


def push_build(
    build: str | Path,
    store: str | Path,
    *,
    options: Mapping[str, Any] = NO_OPTIONS,
    on_progress: OnProgress = unwatched,
    on_wait: Callable[[str], None] = lambda _text: None,
) -> BuildPushReport:
    """Publish a signed build in a store, beside the releases of its package.

    Args:
        build: the folder that `build` wrote and `sign` signed.
        store: a folder or fsspec URL; a store is created if it is empty.
        options: options for fsspec.
        on_progress: called with the numbers of finished and total bytes.
        on_wait: called with a text that says what the push waits for.

    Raises:
        StorageError: there is no build, the store cannot be reached or written, or is a registry.
        PackageError: the build is damaged, or not signed; nothing was published.

    Example:
        plan = trainload.plan(package, trainload.Cluster(), "single")
        trainload.build(package, plan, "gpt.build")
        trainload.sign("gpt.build", "release-key.pem")
        trainload.push_build("gpt.build", "s3://models/gpt")
    """
    if is_oci(store):
        raise StorageError(
            "an OCI registry has no builds", where=str(store), hint="Push the build to a store."
        )
    if "://" not in str(store):
        check_outside_packages(Path(store))
    return push_build_to_store(
        path_here(build), store, options=options, on_progress=on_progress, on_wait=on_wait
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
) -> PullReport | HubPullReport:
    """Pull a package from a store, a registry, a repository of the Hugging Face Hub, or a URL.

    Every byte is compared with its digest before the package appears. Files that sibling packages
    of `path` have already are not fetched.

    Args:
        store: a folder or fsspec URL, STORE#LINE, STORE#LINE/RELEASE, oci://HOST/NAME:TAG,
            hf://OWNER/NAME@REVISION, or the URL of a package's own folder, such as
            https://example.org/gpt.tl.
        path: the package to write; a folder that does not exist.
        line: name of the line. None: the store's only line.
        release: number of the release, or "latest". None: the current release.
        debug: if True, include debug/, which only stores and registries have.
        reuse: further local packages whose files may be reused.
        options: as for `push`.
        on_progress: called with the numbers of finished and total bytes.

    Raises:
        StorageError: there is no such store, line, release or artifact; `path` is taken; or the
            disk is too full.
        IntegrityError: stored data is damaged; nothing is left at `path`.
        UnsafePackageError: the store contains something that the format does not allow.

    Example:
        report = trainload.pull("s3://models/gpt", "gpt.tl", release="latest")
        print(report.release, report.fetched_bytes)
    """
    if is_hub(store):
        if line is not None or release is not None:
            raise StorageError(
                "a repository of the Hub has commits, but no lines or releases",
                where=str(store),
                hint="Specify a revision: hf://OWNER/NAME@REVISION.",
            )
        return pull_hub(str(store), path_here(path), on_progress=on_progress)
    if is_oci(store):
        if line is not None or release is not None:
            raise StorageError(
                "an OCI registry has tags, but no lines or releases",
                where=str(store),
                hint="Specify a tag or a digest.",
            )
        return pull_oci(
            str(store),
            path_here(path),
            debug=debug,
            reuse=reuse,
            options=options,
            on_progress=on_progress,
        )
    is_named = line is not None or release is not None or "#" in str(store)
    if is_url(store) and not is_named and not options and digest_at(str(store)) is not None:
        return fetch_package(str(store), path_here(path), reuse=reuse, on_progress=on_progress)
    store, line, release = _resolve_release(store, line, release)
    return pull_from_store(
        store,
        path,
        line=line,
        release=release,
        debug=debug,
        reuse=reuse,
        options=options,
        on_progress=on_progress,
    )


def releases(
    store: str | Path, *, line: str | None = None, options: Mapping[str, Any] = NO_OPTIONS
) -> dict[str, tuple[ReleaseState, ...]]:
    """Return line -> releases with their present status, in order of their numbers.

    Args:
        store: a folder or fsspec URL, or STORE#LINE.
        line: name of the only line to return. None: all lines.
        options: options for fsspec.

    Raises:
        StorageError: there is no store or no such line.
        IntegrityError: a record is damaged.

    Example:
        for state in trainload.releases("s3://models/gpt")["main"]:
            print(state.release.name, state.status, state.reason)
    """
    store, line = _resolve_line(store, line)
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
    """Make a release its line's current one: promote a candidate, or roll back to an older release.

    Args:
        store: a folder or fsspec URL, or STORE#LINE.
        release: number of the release, or "latest".
        line: name of the line. None: the store's only line.
        only_if: number of the release that must be current now, or "none"; None: no condition.
        reason: reason that the history shows.
        rejected: if True, promote the release even if it was rejected or rolled back.
        options: options for fsspec.

    Raises:
        ConflictError: another release than `only_if` is current; nothing was changed.
        StorageError: there is no such release, it was rejected, or its files were removed.

    Example:
        trainload.promote("s3://models/gpt", 2, only_if=1, reason="passed evaluation")
        trainload.promote("s3://models/gpt", 1, reason="rollback of 2")
    """
    store, line = _resolve_line(store, line)
    place = Store(store, options)
    return place.promote(
        place.line(line), release, only_if=only_if, reason=reason, rejected=rejected
    )


def _resolve_line(store: str | Path, line: str | None) -> tuple[str | Path, str | None]:
    """Return the store and the line of a reference STORE or STORE#LINE and the argument `line`.

    Raises:
        StorageError: they name different lines, or the reference names a release.
    """
    url, line, release = _resolve_release(store, line, None)
    if release is not None:
        raise StorageError(
            "the reference names a release",
            where=str(store),
            expected="STORE or STORE#LINE",
            hint="Omit the release number.",
        )
    return url, line


def _resolve_release(
    store: str | Path, line: str | None, release: str | int | None
) -> tuple[str | Path, str | None, str | int | None]:
    """Return the store, the line and the release of a reference and the other arguments.

    Raises:
        StorageError: they name different ones.
    """
    if not is_reference(store) or is_oci(store):
        return store, line, release
    url, own_line, own_release = parts_of(str(store))
    for kind, own, other in (("line", own_line, line), ("release", own_release, release)):
        if own is not None and other is not None and own != str(other):
            raise StorageError(
                f"two {kind}s are named",
                where=str(store),
                expected=f"one {kind}",
                got=f"{own} and {other}",
            )
    return url, own_line if line is None else line, own_release if release is None else release
