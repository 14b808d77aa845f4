"""Fetch builds from the store that a run's package is from, if the policies allow that."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from trainload.core.errors import PackageError, StorageError
from trainload.launching.node.build import Source
from trainload.packaging.builds.build_record import Target
from trainload.packaging.signatures.build_makers import allows_builds, check_maker
from trainload.packaging.signatures.policy import Policy, find_policies
from trainload.packaging.stores.references import is_oci, is_reference, parts_of
from trainload.packaging.stores.store import Store
from trainload.packaging.stores.stored_builds import (
    StoredBuild,
    builds_of,
    fetch_part,
    fetch_record,
)

_SHOWN = 3


def fetched_builds(package: str, policies: Sequence[Policy], warn: Callable[[str], None]) -> Source:
    """Return a source of the builds in a package's store.

    Builds are native code. One is fetched only if it is for this machine's architecture and
    toolchain, has been compared with the interpreted graphs, and is signed by a maker whom the
    policies trust with builds. If a store has builds of a job, but none that is fetched, `warn` is
    called with the reasons.

    Args:
        package: name of the package in its store; a local folder or a registry has no builds.
        policies: policies of the run; those of this machine are added.
        warn: called with a message.
    """
    checked = tuple(dict.fromkeys((*policies, *find_policies())))

    def fetch(target: Target, index: int, folder: Path) -> bool:
        if not is_reference(package) or is_oci(package):
            return False
        if not allows_builds(checked):
            return False
        url = parts_of(package)[0]
        refused: list[str] = []
        try:
            store = Store(url)
            for stored in builds_of(store, target.job):
                reason = _refusal(store, stored, target, index, folder, checked)
                if reason is None:
                    return True
                refused.append(f"build {int(stored.id[:8])}: {reason}")
        except (PackageError, StorageError) as error:
            refused.append(str(error))
        if refused:
            more = f"; and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
            warn(f"no build of {url} is used: {'; '.join(refused[:_SHOWN])}{more}")
        return False

    return fetch


def _refusal(
    store: Store,
    stored: StoredBuild,
    target: Target,
    index: int,
    folder: Path,
    policies: Sequence[Policy],
) -> str | None:
    """Fetch a part of a build into a folder, or return the reason why it must not be loaded."""
    different = stored.target.difference(target)
    if different is not None:
        return different
    if not stored.verified:
        return "it is unverified: no such device has compared it with the interpreted graphs"
    try:
        with tempfile.TemporaryDirectory() as scratch:
            record, digest = fetch_record(store, stored, Path(scratch))
            check_maker(Path(scratch), record, digest, policies)
        if not record.is_verified:
            return "it is unverified, although the store says otherwise"
        fetch_part(store, record, index, folder)
    except (PackageError, StorageError) as error:
        _empty(folder)
        return str(error)
    return None


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
