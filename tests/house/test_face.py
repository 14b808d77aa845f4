"""Import of `trainload`."""

from __future__ import annotations

import inspect
import subprocess
import sys
import types

import trainload


def child(code: str) -> str:
    """Run `code` in a new interpreter. Return its output."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_all_is_exactly_what_can_be_seen() -> None:
    for name in trainload.__all__:
        getattr(trainload, name)
    seen = {name for name in dir(trainload) if not name.startswith("_")}
    modules = {
        name
        for name in seen
        if isinstance(getattr(trainload, name), types.ModuleType)
        and not callable(getattr(trainload, name))
    }
    assert seen - modules | {"__version__"} == set(trainload.__all__)


def test_all_is_sorted() -> None:
    assert sorted(trainload.__all__) == trainload.__all__


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(trainload, "train")


def test_importing_it_imports_neither_torch_nor_ray() -> None:
    assert (
        child(
            "import sys, trainload; print(sorted({'torch', 'ray', 'numpy', 'pyarrow'} &"
            " set(sys.modules)))"
        )
        == "[]"
    )


def test_actors_and_tasks_start_without_torch() -> None:
    """Ray starts them in separate processes, for which a launch waits."""
    modules = ", ".join(
        f"trainload.launching.cluster.{name}" for name in ("mailbox", "node_actor", "tasks")
    )
    assert child(f"import sys, {modules}; print('torch' in sys.modules)") == "False"


def test_launch_is_a_verb_before_its_stage_is_imported() -> None:
    assert child("import trainload; print(callable(trainload.launch))") == "True"


def test_launch_is_a_verb_after_its_stage_was_imported() -> None:
    assert (
        child(
            "import trainload.launching.data.sampler; import trainload;"
            " print(callable(trainload.launch))"
        )
        == "True"
    )


def test_the_stage_of_the_same_name_as_a_verb_can_be_imported() -> None:
    assert (
        child(
            "import trainload.launching.data.sampler as s, trainload;"
            " print(trainload.launching.data.sampler is s)"
        )
        == "True"
    )


def test_the_verb_launch_has_the_signature_of_its_function() -> None:
    from trainload.launching.api import launch

    assert inspect.signature(trainload.launch) == inspect.signature(launch.launch)
