"""Stage folders at the root, the links to them, and which imports are allowed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import networkx as nx
import pytest
from tests.house import import_graph as rules
from tests.house.import_graph import (
    cycles,
    import_graph,
    large_folders,
    long_modules,
    upward_arrows,
)
from tests.house.source import (
    IMPORTED_AS,
    PRIVATE_TORCH,
    ROOT,
    STAGES,
    face_files,
    imports,
    private_names,
    stage_files,
)


def python_at_root(code: str) -> str:
    """Run `code` in a child process at the root, with the root as PYTHONPATH. Return its output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout.strip()


def test_packaging_is_the_library_of_pypi_even_at_the_root() -> None:
    where = Path(python_at_root("import packaging.version; print(packaging.version.__file__)"))
    assert ROOT / "packaging" not in where.parents
    assert where.parent.name == "packaging"


def test_ray_imports_at_the_root() -> None:
    assert python_at_root("import ray; print(ray.__name__)") == "ray"


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_is_reached_through_a_relative_link(stage: str) -> None:
    link = ROOT / "src" / "trainload" / IMPORTED_AS[stage]
    assert os.readlink(link) == f"../../{stage}"


def test_no_stage_folder_is_a_regular_package() -> None:
    assert [
        str(path.relative_to(ROOT))
        for stage in STAGES
        for path in (ROOT / stage).rglob("__init__.py")
    ] == []


def test_no_test_folder_is_a_regular_package() -> None:
    assert [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("__init__.py")] == []


def test_no_two_test_files_have_one_name() -> None:
    """Outside packages pytest imports test files by name, and ignores the second of a name."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert [name for name, times in Counter(names).items() if times > 1] == []


def test_every_stage_holds_modules() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in stage_files()} == set(STAGES)


def test_the_wheel_holds_every_module(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("trainload/")}
    paths = (
        (IMPORTED_AS[stage], path.relative_to(ROOT / stage))
        for stage in STAGES
        for path in (ROOT / stage).rglob("*.py")
    )
    stages = {f"trainload/{stage}/{path.as_posix()}" for stage, path in paths}
    face = {path.relative_to(ROOT / "src").as_posix() for path in face_files()}
    data = {
        f"trainload/{path.relative_to(ROOT).as_posix()}"
        for path in (ROOT / "sharding" / "planner" / "devices").glob("*.json")
    }
    page = {
        f"trainload/report/{name}"
        for name in (
            "frame/page.css",
            "frame/base.html",
            "frame/parts.html",
            "runs/page.html",
            "stores/line.html",
            "packages/graph.html",
            "packages/graph.js",
            "plans/plan.html",
        )
    }
    templates = {
        f"trainload/cli/templates/{name}.txt"
        for name in (
            *("module", "transformers", "trainer"),
            *("completion.bash", "completion.zsh", "completion.fish"),
        )
    }
    others = {"py.typed", "__init__.pyi", "launching/described/gpu.c"}
    named = {f"trainload/{name}" for name in others}
    assert held == {*stages, *face, *data, *page, *templates, *named}


def test_a_folder_imports_only_folders_below_it() -> None:
    assert upward_arrows(import_graph()) == []


def test_an_import_of_a_folder_above_is_seen() -> None:
    graph = import_graph()
    graph.add_edge("trainload.core.errors", "trainload.cli.main")
    assert upward_arrows(graph) == ["trainload.core.errors imports trainload.cli.main"]


def test_a_module_that_no_layer_has_is_seen() -> None:
    graph = import_graph()
    graph.add_node("trainload.utils")
    assert upward_arrows(graph) == ["trainload.utils is in no layer"]


def test_a_folder_has_few_modules() -> None:
    assert large_folders() == {}


def test_no_two_modules_have_one_name() -> None:
    names = Counter(
        path.name for path in (*stage_files(), *face_files()) if path.name != "__init__.py"
    )
    assert {name: count for name, count in names.items() if count > 1} == {}


def test_a_function_that_raises_where_something_is_wrong_is_named_check() -> None:
    other = re.compile(r"def (_?(?:demand|refuse|ensure)_\w+)")
    found = {
        str(path.relative_to(ROOT)): names
        for path in (*stage_files(), *face_files())
        if (names := other.findall(path.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize("prefix", ["is", "has"])
def test_a_function_named_as_a_question_returns_a_bool(prefix: str) -> None:
    named = re.compile(rf"def (_?{prefix}_\w+)\([^)]*\) -> (?!bool\b|TypeGuard\[|TypeIs\[)(\S+):")
    found = {
        str(path.relative_to(ROOT)): other
        for path in (*stage_files(), *face_files())
        if (other := named.findall(path.read_text()))
    }
    assert found == {}


TEMPORARY = re.compile(
    r'with_name\(f?"\.|os\.(?:link|rename|replace)\(|mkdtemp\(|NamedTemporaryFile\('
)
"""Names of temporary files, and operations that replace a file."""
TEMPORARY_ELSEWHERE = {
    "capture/job/hollow.py": "a file that nothing replaces",
    "launch/node/kernel_cache.py": "kernels that two folders share",
    "src/trainload/core/writable_folder.py": "whether a folder can be written",
    "src/trainload/core/paths.py": "files that two packages share",
    "src/trainload/core/storage/folder_files.py": "whether the file system has hard links",
}


def test_files_are_written_atomically_in_one_module() -> None:
    files = {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for path in (*stage_files(), *face_files())
    }
    users = {name for name, text in files.items() if TEMPORARY.search(text)}
    assert users == {"src/trainload/core/atomic.py", *TEMPORARY_ELSEWHERE}


def test_ray_is_imported_by_launch_alone() -> None:
    below = [path for path in stage_files() if path.relative_to(ROOT).parts[0] != "launch"]
    users = [
        str(path.relative_to(ROOT))
        for path in below
        if any(name.split(".")[0] == "ray" for _, name in imports(path.read_text()))
    ]
    assert users == []


def test_no_modules_import_each_other() -> None:
    assert cycles(import_graph()) == []


def test_a_cycle_of_imports_is_seen() -> None:
    graph = import_graph()
    module = "trainload.core.errors"
    assert nx.ancestors(graph, module)
    graph.add_edge(module, "trainload.cli.main")
    assert any({module, "trainload.cli.main"} <= set(group) for group in cycles(graph))


@pytest.mark.parametrize("name", ["click", "trainload.cli.commands"])
def test_only_the_command_line_imports(name: str) -> None:
    files = (*stage_files(), *face_files())
    users = [
        path.relative_to(ROOT)
        for path in files
        if any(f"{n}.".startswith(f"{name}.") for _, n in imports(path.read_text()))
    ]
    assert {str(path) for path in users if "commands" not in path.parts} == {
        "src/trainload/cli/main.py"
    }


def test_no_module_is_too_long() -> None:
    assert long_modules() == {}


def test_a_long_module_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "LINES", 100)
    assert "launch/worker/loop.py" in long_modules()


def test_private_names_of_torch_stay_in_their_modules() -> None:
    files = [*stage_files(), *face_files()]
    names = {
        path.relative_to(ROOT).as_posix(): private_names(path.read_text(), "torch")
        for path in files
    }
    assert {name: used for name, used in names.items() if used and name not in PRIVATE_TORCH} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import torch._inductor",
        "from torch._C import Graph",
        "from torch import _C",
        "from torch.utils import _pytree",
        "torch._dynamo.reset()",
        "import_module('torch._export.serde')",
    ],
)
def test_a_private_name_of_torch_is_seen(line: str) -> None:
    assert len(private_names(line, "torch")) >= 1


@pytest.mark.parametrize(
    "line",
    [
        "torch.ops._c10d_functional.wait_tensor(x)",
        "import torch.distributed",
        "self._private.name",
        "torch.__version__",
    ],
)
def test_other_names_are_not_taken_for_private_ones(line: str) -> None:
    assert private_names(line, "torch") == []


def test_private_names_of_ray_are_not_used() -> None:
    files = [*stage_files(), *face_files(), *(ROOT / "tests").rglob("*.py")]
    files += (ROOT / "benchmarks").rglob("*.py")
    names = {
        path.relative_to(ROOT).as_posix(): private_names(path.read_text(), "ray") for path in files
    }
    assert {name: used for name, used in names.items() if used} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import ray._private.state",
        "from ray._raylet import GcsClient",
        "ray._private.worker.global_worker",
    ],
)
def test_a_private_name_of_ray_is_seen(line: str) -> None:
    assert len(private_names(line, "ray")) >= 1


def test_the_first_line_of_an_error_is_taken_in_one_place() -> None:
    """`first_line` does it, since an error may have no text and therefore no first line."""
    taken = re.compile(
        r"str\((?:error|exc\w*|\w+\.error)\)[\w.()]*\.(?:split\w*|partition)\([^)]*\)\["
    )
    files = [*stage_files(), *face_files()]
    assert [str(path.relative_to(ROOT)) for path in files if taken.search(path.read_text())] == []


def test_what_starts_a_ray_cluster_is_marked() -> None:
    """`make test` runs these one at a time, and all others two at a time.

    Tests that use the fixture `ray_cluster` are marked automatically.
    """
    starts = r"\bfaults\.py\b|\burl_run\.py\b|\bstart_head\b|\bray\.init\("
    files = {path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)}
    assert [
        path.name
        for path in files
        if re.search(starts, text := path.read_text()) and "mark.ray" not in text
    ] == []
