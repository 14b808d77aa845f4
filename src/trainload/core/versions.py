"""The version of this library, the supported versions of torch, and whether Ray is installed."""

from __future__ import annotations

import re
from importlib.util import find_spec

from trainload.core.errors import ClusterError, VersionError

VERSION = "0.1.0"
"""The version of trainload."""
OLDEST = (2, 11)
"""The oldest supported release of torch."""
BEYOND = (2, 16)
"""The first release of torch that is not supported."""


def check_supported_torch() -> None:
    """Check that the installed torch is supported, without importing it: an unsupported one could
    fail anywhere.

    Raises:
        VersionError: torch is missing, older than `OLDEST`, or `BEYOND` or newer.
    """
    from importlib.metadata import PackageNotFoundError, version

    expected = f"torch >={_format_version(OLDEST)},<{_format_version(BEYOND)}"
    hint = f"pip install '{expected.replace(' ', '')}'"
    try:
        installed = version("torch")
    except PackageNotFoundError as error:
        raise VersionError(
            "torch is not installed", expected=expected, got="none", hint=hint
        ) from error
    release = re.match(r"(\d+)\.(\d+)", installed)
    if release is None or not OLDEST <= (int(release[1]), int(release[2])) < BEYOND:
        raise VersionError(
            "this version of torch is not supported", expected=expected, got=installed, hint=hint
        )


def check_ray_installed() -> None:
    """Check that Ray is installed, without importing it.

    Raises:
        ClusterError: it is not.
    """
    if find_spec("ray") is None:
        raise ClusterError(
            "Ray is not installed",
            where="backend",
            hint="Run `pip install 'trainload[ray]'`, or choose the backend local.",
        )


def _format_version(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
