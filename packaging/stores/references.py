"""Names of packages in stores and registries.

This module imports neither torch nor a client of a store, so that a command knows at once what it
was given.
"""

from __future__ import annotations

from pathlib import Path

from trainload.core.errors import StorageError

OCI_SCHEME = "oci://"


def is_reference(name: str | Path) -> bool:
    """Return True if this names a package in a store or registry, not a folder on this machine."""
    text = str(name)
    return is_oci(text) or (
        isinstance(name, str) and ("://" in text or ("#" in text and not Path(text).exists()))
    )


def is_oci(store: str | Path) -> bool:
    """Return True if `store` is a reference to an OCI registry."""
    return str(store).startswith(OCI_SCHEME)


def parts_of(reference: str) -> tuple[str, str | None, str | None]:
    """Split STORE, STORE#LINE or STORE#LINE/RELEASE; parts that are omitted are None.

    Raises StorageError if it is malformed.
    """
    url, _, rest = reference.partition("#")
    line, slash, number = rest.partition("/")
    if not url or (slash and not (line and number)):
        raise StorageError(
            "this does not name a release",
            where=reference,
            expected="STORE#LINE/RELEASE, STORE#LINE or STORE",
        )
    return url, line or None, number or None


def run_name(package: str) -> str:
    """Return the default name of a run of a package: that of the package, its line, or its
    artifact.
    """
    if not is_reference(package):
        return Path(package).stem
    url, _, rest = package.partition("#")
    return rest.partition("/")[0] or url.partition("@")[0].rpartition("/")[2].partition(":")[0]
