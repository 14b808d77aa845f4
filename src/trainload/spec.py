"""Load a job from what a person writes on the command line: `path/to/file.py:name` or `package.module:name`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from trainload.core.errors import JobError, TrainloadError

if TYPE_CHECKING:
    from trainload.capture.job import Job

FORMS = "path/to/file.py:name or package.module:name"


def load_job(spec: str) -> Job:
    """Load the job that `spec` names: a `Job`, or a function without arguments that returns one.

    As when Python runs a script, the file's folder (for a module: the current folder) comes first on `sys.path`, and
    stays there, so that the job's own imports work, late ones too.

    Raises:
        JobError: the spec is not of this form, its file or module is missing or does not import, it has no such name, or
            what the name stands for is not a job. Says which line of the user's file is to blame.
    """
    from trainload.capture.job import Job

    location, _, name = spec.rpartition(":")
    if not location or not name.isidentifier():
        raise JobError("this does not name a job", where=spec, expected=FORMS, got=repr(spec))
    module = load_module(location)
    if not hasattr(module, name):
        candidates = _candidates(module, Job)
        close = difflib.get_close_matches(name, candidates, n=1)
        cure = f"Did you mean {location}:{close[0]}?" if close else f"It has: {', '.join(candidates)}." if candidates else ""
        raise JobError(f"there is no {name!r} in it", where=location, cure=cure)
    found = getattr(module, name)
    if inspect.isroutine(found):
        try:
            found = found()
        except TrainloadError:
            raise
        except (Exception, SystemExit) as error:
            raise JobError(f"{name}() failed: {describe(error)}", where=user_line(error, module)) from error
        where = f"{location}:{name}()"
    else:
        where = f"{location}:{name}"
    if not isinstance(found, Job):
        got = f"the class {found.__name__}" if inspect.isclass(found) else type(found).__name__
        raise JobError(
            "this is not a job", where=where, expected="a trainload.Job, or a function without arguments that returns one", got=got
        )
    return found


def load_module(location: str) -> ModuleType:
    """Import what stands before the colon: a file or a module. The current folder, or the file's, comes first on `sys.path`.

    Raises:
        JobError: it is missing, or does not import.
    """
    return _from_file(location) if location.endswith(".py") else _from_name(location)


def _from_file(location: str) -> ModuleType:
    path = Path(location)
    if not path.is_file():
        problem = "this is a folder" if path.is_dir() else "there is no such file"
        raise JobError(problem, where=location, cure=f"The job is given as {FORMS}.")
    path = path.resolve()
    name = path.stem
    loaded = sys.modules.get(name)
    if loaded is not None:
        if getattr(loaded, "__file__", None) == str(path):
            return loaded
        name = f"_trainload_job_{name}"
    _put_first(path.parent)
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None and module_spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise JobError(f"it does not import: {describe(error)}", where=user_line(error, module)) from error
    return module


def _from_name(location: str) -> ModuleType:
    _put_first(Path.cwd())
    try:
        return importlib.import_module(location)
    except ModuleNotFoundError as error:
        if error.name is not None and (location == error.name or location.startswith(f"{error.name}.")):
            cure = f"The job is given as {FORMS}."
            raise JobError(f"there is no module {error.name!r}", where=location, cure=cure) from error
        raise JobError(f"it does not import: {describe(error)}", where=user_line(error, location)) from error
    except (Exception, SystemExit) as error:
        raise JobError(f"it does not import: {describe(error)}", where=user_line(error, location)) from error


def _put_first(folder: Path) -> None:
    if sys.path[:1] != [str(folder)]:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()


def _candidates(module: ModuleType, job: type) -> list[str]:
    """The names in `module` that could be meant: its jobs and the functions that it defines."""
    own = (
        name
        for name, value in vars(module).items()
        if isinstance(value, job) or (inspect.isfunction(value) and value.__module__ == module.__name__)
    )
    return sorted(name for name in own if not name.startswith("_"))


def describe(error: BaseException) -> str:
    """An error of the user's code in one line."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    first = text.strip().splitlines()
    return f"{type(error).__name__}: {first[0]}" if first else type(error).__name__


def user_line(error: BaseException, module: ModuleType | str) -> str:
    """`file:line` of the innermost frame in the job's own folder, else outside the installed libraries, else the module's name."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    file = getattr(module, "__file__", None)
    home = Path(file).parent if file is not None else Path.cwd()
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    own = [frame for frame in frames if home in Path(frame.filename).parents and "site-packages" not in Path(frame.filename).parts]
    others = [frame for frame in frames if not frame.filename.startswith("<") and not _is_library(Path(frame.filename))]
    chosen = own or others
    return f"{chosen[-1].filename}:{chosen[-1].lineno}" if chosen else str(file or module)


def _is_library(path: Path) -> bool:
    return any(Path(sysconfig.get_path(kind)) in path.parents for kind in ("stdlib", "purelib", "platlib"))
