"""Files of HTML pages: their libraries, and where they may be written."""

from __future__ import annotations

from pathlib import Path

from trainload.core.errors import StorageError
from trainload.packaging.format.package_paths import MANIFEST


def check_libraries() -> None:
    """Check that the libraries that render pages are installed.

    Raises:
        StorageError: one is not.
    """
    try:
        import trainload.report.frame.page_frame  # noqa: F401  # imports them
    except ImportError as error:
        name = str(error.name or error).partition(".")[0]
        raise StorageError(
            f"{name} is not installed",
            where="report",
            got=str(error),
            hint="Run `pip install 'trainload[report]'`.",
        ) from error


def check_page_path(path: Path) -> None:
    """Check that a page can be written to a path.

    Raises:
        StorageError: something that is no page would be replaced, or the path is in a package.
    """
    from trainload.report.frame.page_frame import MARK

    if any((folder / MANIFEST).is_file() for folder in path.absolute().parents):
        raise StorageError(
            "the path is in a package, which may have no other files",
            where=str(path),
            hint="Choose another path.",
        )
    if not path.exists():
        return
    try:
        with path.open("rb") as file:
            is_page = MARK.encode() in file.read(400)
    except OSError as error:
        raise StorageError(f"it cannot be written: {error.strerror}", where=str(path)) from error
    if not is_page:
        raise StorageError(
            "it exists already and is not a report",
            where=str(path),
            hint="Choose another path, or remove it.",
        )


def write_page(path: Path, data: bytes) -> None:
    """Write a page, in place of an older one.

    Raises:
        StorageError: the path cannot be written.
    """
    from trainload.core.atomic import replace_file

    try:
        replace_file(path, data, durable=False)
    except OSError as error:
        raise StorageError(
            f"it cannot be written: {error.strerror}",
            where=str(path),
            hint="Choose another path.",
        ) from error
