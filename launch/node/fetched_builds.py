"""Builds from the store that a run's package is from, if the policies allow them.

A fetched build stays in the node's cache under a name of its own, with its record and signatures,
so that the policies of each run decide anew whether it is loaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from trainload.core.canonical_json import canonical_json, sha256_bytes
from trainload.core.errors import IntegrityError, PackageError, StorageError
from trainload.core.paths import empty_folder
from trainload.launching.node.build import OfferedBuild, kernel_files
from trainload.packaging.builds.build_folder import read_build
from trainload.packaging.builds.build_record import BuildRecord, Target
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

_MAKER = "maker"
"""Folder, in a fetched build, of its record and signatures."""
_SHOWN = 3
_DIGITS = 16
_LIBRARIES = "LD_LIBRARY_PATH"
_LOADING = """
import ctypes, sys
for path in sys.argv[1:]:
    ctypes.CDLL(path)
"""


class FetchedBuilds:
    """The builds in a package's store that a node may load.

    Builds are native code. One is loaded only if it is for this machine's architecture and
    toolchain, has been compared with the interpreted graphs, and is signed by a maker whom the
    policies trust with builds.

    Args:
        package: name of the package in its store; a local folder or a registry has no builds.
        policies: policies of the run; those of this machine are added.
        warn: called with the reasons if a store has builds of a job, but none that is loaded.
        on_fetched: called when a build was fetched.
    """

    def __init__(
        self,
        package: str,
        policies: Sequence[Policy],
        warn: Callable[[str], None],
        *,
        on_fetched: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_fetched = on_fetched
        self._policies = tuple(dict.fromkeys((*policies, *find_policies())))
        self._warn = warn
        self._url = (
            parts_of(package)[0]
            if is_reference(package) and not is_oci(package) and allows_builds(self._policies)
            else None
        )

    def allows(self, folder: Path) -> bool:
        """Return True if a build that was fetched into the cache may be loaded by this run."""
        if self._url is None:
            return False
        accepted = self._accepted(folder)
        if accepted.exists():
            return True
        try:
            check_maker(folder / _MAKER, *read_build(folder / _MAKER), self._policies)
        except (PackageError, StorageError):
            return False
        with suppress(OSError):  # a read-only cache: the next start checks again
            accepted.touch()
        return True

    def offered(self, target: Target, index: int) -> Iterator[OfferedBuild]:
        """Yield the builds for a target that may be loaded, newest first.

        After the last one, `warn` is called with why there is no other.

        Args:
            target: what the graphs must fit.
            index: index, on the pipeline axis, of the ranks.
        """
        if self._url is None:
            return
        refused: list[str] = []
        try:
            store = Store(self._url)
            for stored in builds_of(store, target.job, refused.append):
                different = stored.target.difference(target)
                if different is None and not stored.verified:
                    different = "it is unverified: no such device has compared it"
                if different is not None:
                    refused.append(_about(stored, different))
                    continue
                with tempfile.TemporaryDirectory() as scratch:
                    record = self._checked_record(store, stored, Path(scratch), refused)
                    if record is not None:
                        fetch = partial(
                            self._fetch, store, stored, record, index, Path(scratch), refused
                        )
                        yield OfferedBuild(stored.digest[:_DIGITS], fetch)
        except (PackageError, StorageError, OSError) as error:
            refused.append(str(error))
        if refused:
            more = f"; and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
            self._warn(f"no build of {self._url} is used: {'; '.join(refused[:_SHOWN])}{more}")

    def _checked_record(
        self, store: Store, stored: StoredBuild, scratch: Path, refused: list[str]
    ) -> BuildRecord | None:
        """Fetch the record and the signatures of a build, and return the record if the policies
        allow the build; otherwise add the reason to `refused`.
        """
        try:
            record, digest = fetch_record(store, stored, scratch)
            check_maker(scratch, record, digest, self._policies)
            if not record.is_verified:
                raise IntegrityError("it is unverified, although the store says otherwise")
        except (PackageError, StorageError, OSError) as error:
            refused.append(_about(stored, str(error)))
            return None
        return record

    def _fetch(
        self,
        store: Store,
        stored: StoredBuild,
        record: BuildRecord,
        index: int,
        scratch: Path,
        refused: list[str],
        folder: Path,
    ) -> bool:
        """Fetch a part of a build into a folder, with its record and signatures."""
        try:
            shutil.copytree(scratch, folder / _MAKER)
            self._accepted(folder).touch()
            fetch_part(store, record, index, folder)
            check_loadable(folder)
        except (PackageError, StorageError, OSError) as error:
            empty_folder(folder)
            refused.append(_about(stored, str(error)))
            return False
        self._on_fetched()
        return True

    def _accepted(self, folder: Path) -> Path:
        """Return the file that says that policies with the present rules about builds have accepted
        a build of the cache, so that each process need not verify its signatures.
        """
        rules = [policy.build_makers for policy in self._policies]
        said = canonical_json([rule for rule in rules if rule is not None])
        return folder / _MAKER / f"accepted-{sha256_bytes(said)[:_DIGITS]}"


def is_from_store(folder: Path) -> bool:
    """Return True if a build of the cache was fetched from a store."""
    return (folder / _MAKER).is_dir()


def check_loadable(folder: Path) -> None:
    """Check that this machine's libraries suffice for the kernels of a build, by loading them in a
    process of its own.

    Raises:
        IntegrityError: one cannot be loaded.
    """
    kernels = kernel_files(folder)
    libraries = [str(Path(torch.__file__).parent / "lib"), os.environ.get(_LIBRARIES, "")]
    tried = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _LOADING, *map(str, kernels)],
        env={**os.environ, _LIBRARIES: ":".join(filter(None, libraries))},
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode != 0:
        lines = tried.stderr.strip().splitlines() or [f"status {tried.returncode}"]
        raise IntegrityError(
            "a kernel cannot be loaded on this machine", where=folder.name, got=lines[-1]
        )


def _about(stored: StoredBuild, reason: str) -> str:
    return f"build {int(stored.id[:8])}: {reason}"
