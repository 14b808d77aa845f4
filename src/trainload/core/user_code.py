"""User code: import from a file or a module, and the line in it that raised an error."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType

from trainload.core.errors import JobError

FORMS = "path/to/file.py:name or package.module:name"
_TRAINLOAD_FOLDER = str(Path(__file__).parents[1]) + os.sep
"""Files of trainload, which are not to blame."""


def load_module(location: str) -> ModuleType:
    """Import the file or module of a `location:name` spec.

    The file's folder, or for a module the current folder, is put first on `sys.path`.

    Raises:
        JobError: the file or module is missing, or does not import.
    """
    return _from_file(location) if location.endswith(".py") else _from_name(location)


def _from_file(location: str) -> ModuleType:
    path = Path(location)
    if not path.is_file():
        problem = "this is a folder, not a file" if path.is_dir() else "there is no such file"
        raise JobError(problem, where=location, hint=f"Specify the job as {FORMS}.")
    path = path.resolve()
    name = path.stem
    loaded = sys.modules.get(name)
    if loaded is not None:
        if getattr(loaded, "__file__", None) == str(path):
            return loaded
        name = f"_trainload_job_{name}"
    _put_first(path.parent)
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None and module_spec.loader is not None, (
        "a .py file always has a loader"
    )
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise JobError(
            f"the import failed: {describe(error)}", where=user_line(error, module)
        ) from error
    return module


def _from_name(location: str) -> ModuleType:
    _put_first(Path.cwd())
    try:
        return importlib.import_module(location)
    except ModuleNotFoundError as error:
        if error.name is not None and (
            location == error.name or location.startswith(f"{error.name}.")
        ):
            hint = f"Specify the job as {FORMS}."
            raise JobError(
                f"there is no module {error.name!r}", where=location, hint=hint
            ) from error
        raise JobError(
            f"the import failed: {describe(error)}", where=user_line(error, location)
        ) from error
    except (Exception, SystemExit) as error:
        raise JobError(
            f"the import failed: {describe(error)}", where=user_line(error, location)
        ) from error


def _put_first(folder: Path) -> None:
    if sys.path[:1] != [str(folder)]:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()


def describe(error: BaseException) -> str:
    """Describe an error of the user's code in one line."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    first = text.strip().splitlines()
    return f"{type(error).__name__}: {first[0]}" if first else type(error).__name__


def user_line(error: BaseException, module: ModuleType | str) -> str:
    """Return `file:line` of the innermost frame in the job's folder, or else outside installed
    libraries, or else the module.
    """
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    file = getattr(module, "__file__", None)
    job_folder = Path(file).parent if file is not None else Path.cwd()
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_TRAINLOAD_FOLDER)
    ]
    own_frames = [
        frame
        for frame in frames
        if job_folder in Path(frame.filename).parents
        and "site-packages" not in Path(frame.filename).parts
    ]
    others = [
        frame
        for frame in frames
        if not frame.filename.startswith("<") and not _is_library(Path(frame.filename))
    ]
    relevant = own_frames or others
    return f"{relevant[-1].filename}:{relevant[-1].lineno}" if relevant else str(file or module)


def _is_library(path: Path) -> bool:
    return any(
        Path(sysconfig.get_path(kind)) in path.parents for kind in ("stdlib", "purelib", "platlib")
    )


def functions_of(module: ModuleType) -> list[str]:
    """Return the names of the functions that a module defines itself."""
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
