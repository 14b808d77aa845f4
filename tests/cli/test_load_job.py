"""Loading a job from `file.py:name` or `module:name`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainload.core.errors import JobError
from trainload.freezing.load_job import load_job

GOOD = """
import torch
import trainload

def job():
    model = torch.nn.Linear(2, 1)
    sgd = lambda m: torch.optim.SGD(m.parameters(), lr=0.1)
    return trainload.Job(model=model, batch={"x": torch.zeros(2, 2)}, optimizer=sgd)

ready = job()
number = 3

def needs(argument):
    return argument

def breaks():
    first = 1
    return first / 0
"""

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """A function that writes a file to the working directory, which is empty.

    Modules that were imported from there are forgotten afterwards.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def write(text: str, name: str = "the_users_job.py") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    yield write
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_a_function_that_returns_a_job_is_called(write: Write) -> None:
    assert load_job(f"{write(GOOD)}:job").steps == 1000


def test_a_job_is_taken_as_it_is(write: Write) -> None:
    assert load_job(f"{write(GOOD)}:ready") is sys.modules["the_users_job"].ready


def test_a_module_in_the_current_folder_is_found_by_name(write: Write) -> None:
    write(GOOD)
    assert load_job("the_users_job:job").steps == 1000


def test_a_file_imports_its_neighbours(write: Write) -> None:
    write(GOOD, "the_users_model.py")
    assert load_job(f"{write('from the_users_model import job')}:job").steps == 1000


def test_a_file_with_the_name_of_a_loaded_module_is_loaded(write: Write) -> None:
    assert load_job(f"{write(GOOD, 'json.py')}:job").steps == 1000


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("jobs", "there is no 'jobs' in it. Did you mean"),
        ("number", "this is not a job .*got int"),
        (
            "needs",
            "needs.. failed: TypeError: .*missing 1 required positional argument: 'argument'",
        ),
        ("breaks", r"the_users_job.py:18: breaks\(\) failed: ZeroDivisionError: division by zero"),
    ],
)
def test_a_name_that_is_no_job_is_refused(name: str, problem: str, write: Write) -> None:
    with pytest.raises(JobError, match=problem):
        load_job(f"{write(GOOD)}:{name}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "import os\nimport no_such_library\n",
            (
                "the_users_job.py:2: the import failed: ModuleNotFoundError: No module named"
                " 'no_such_library'"
            ),
        ),
        (
            "x = 1\n\ny = x +\n",
            "the_users_job.py:3: the import failed: SyntaxError: invalid syntax",
        ),
        (
            "import json\njson.loads('{')\n",
            "the_users_job.py:2: the import failed: JSONDecodeError",
        ),
        ("import sys\nsys.exit(4)\n", "the_users_job.py:2: the import failed: SystemExit: 4"),
    ],
    ids=["missing library", "syntax", "in a library", "exit"],
)
@pytest.mark.parametrize("by_file", [True, False], ids=["file", "module"])
def test_what_does_not_import_is_refused_with_its_line(
    text: str, problem: str, by_file: bool, write: Write
) -> None:
    path = write(text)
    with pytest.raises(JobError, match=problem):
        load_job(f"{path if by_file else path.stem}:job")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(JobError, match="this is a folder"):
        load_job(f"{tmp_path / 'folder.py'}:job")


@pytest.mark.parametrize("spec", ["", "job.py", ":job", "job.py:", "job.py:a.b", "job.py:1"])
def test_what_names_no_job_is_refused(spec: str) -> None:
    with pytest.raises(JobError, match="this does not name a job"):
        load_job(spec)
