"""Law 6: nothing in a package can run code.

All digests of these packages are correct, as an attacker would make them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hostile.graphs import call, first_symbol, nodes
from tests.packaging.tampering import UNKNOWN_LIBRARY, edit_graph, edit_manifest, reseal

import trainload
from trainload.core.errors import PackageError, UnsafePackageError
from trainload.packaging.graphs.graph_json import graph_from_json
from trainload.packaging.package import open_package
from trainload.packaging.signatures.verify import verify_package

WRITES = "torch.ops.aten.from_file.default"
"""An operator that creates a file if it does not exist."""


class Trap:
    """Payloads that write a file when they are executed."""

    def __init__(self, folder: Path) -> None:
        self.sprung = folder / "sprung"
        self.code = f"__import__('pathlib').Path({str(self.sprung)!r}).write_text('x')"
        self.module = "trap_that_is_sprung_by_an_import"
        (folder / f"{self.module}.py").write_text(f"{self.code}\nclass Kind:\n    x = 1\n")

    def __reduce__(self) -> tuple[Any, ...]:
        """Execute the payload when the trap is unpickled."""
        return eval, (self.code,)

    def pickle(self) -> bytes:
        return pickle.dumps(self)


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trap]:
    folder = tmp_path / "trap"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    made = Trap(folder)
    yield made
    sys.modules.pop(made.module, None)


def use(path: Path) -> None:
    """Do everything that is done with a package before its graphs run."""
    package = open_package(path)
    package.updates()
    program = package.program()
    dict(program.state)
    trainload.plan(package, trainload.Cluster(), "single")


def symbolic_size(package: Path, trap: Trap) -> None:
    edit_graph(package, lambda graph: first_symbol(graph).update(expr_str=trap.code))


def range_of_a_symbol(package: Path, trap: Trap) -> None:
    edit_graph(
        package,
        lambda graph: graph["range_constraints"].update({trap.code: {"min_val": 0, "max_val": 1}}),
    )


def enum_in_a_treespec(package: Path, trap: Trap) -> None:
    edit_graph(package, lambda graph: call(graph).update(in_spec=treespec_with(trap)))


def treespec_with(trap: Trap) -> str:
    context = json.dumps(
        [{"__enum__": True, "fqn": f"{trap.module}:Kind", "name": "x"}], separators=(",", ":")
    )
    spec = {
        "type": "builtins.dict",
        "context": context,
        "children_spec": [{"type": None, "context": None, "children_spec": []}],
    }
    return json.dumps([1, spec], separators=(",", ":"), sort_keys=True)


def guards(package: Path, trap: Trap) -> None:
    edit_graph(package, lambda graph: graph.update(guards_code=[trap.code]))


def guards_within(package: Path, trap: Trap) -> None:
    edit_graph(package, lambda graph: graph["graph_module"].update(guards_code=[trap.code]))


def sample_inputs_in_a_graph(package: Path, trap: Trap) -> None:
    edit_graph(package, lambda graph: graph.update(example_inputs=trap.pickle().hex()))


def sample_inputs_that_are_not_listed(package: Path, trap: Trap) -> None:
    (package / "sample_inputs.pt").write_bytes(trap.pickle())


def pickled_weights(package: Path, trap: Trap) -> None:
    name = "weights/model-00001-of-00003.safetensors"
    (package / name).write_bytes(trap.pickle())
    chunks = json.loads((package / "weights/chunks.json").read_bytes())
    chunks["files"][name] = [hashlib.sha256(trap.pickle()).hexdigest()]
    (package / "weights/chunks.json").write_text(
        json.dumps(chunks, separators=(",", ":"), sort_keys=True)
    )
    reseal(package)


def pickled_constants(package: Path, trap: Trap) -> None:
    (package / "constants.safetensors").write_bytes(trap.pickle())
    reseal(package)


def operator_that_writes_files(package: Path, trap: Trap) -> None:
    def change(graph: dict[str, Any]) -> None:
        node = nodes(graph)[0]
        values = {
            "filename": {"as_string": str(trap.sprung)},
            "shared": {"as_bool": True},
            "size": {"as_int": 1},
        }
        node.update(
            target=WRITES,
            inputs=[{"name": name, "arg": arg, "kind": 1} for name, arg in values.items()],
        )

    edit_graph(package, change)
    schema = str(torch.ops.aten.from_file.default._schema)
    edit_manifest(package, lambda manifest: manifest["ops"].update({WRITES: schema}))


def function_of_python(package: Path, trap: Trap) -> None:
    edit_graph(
        package,
        lambda graph: nodes(graph)[0].update(target="builtins.eval", inputs=[code_argument(trap)]),
    )


def code_argument(trap: Trap) -> dict[str, Any]:
    return {"name": "", "arg": {"as_string": trap.code}, "kind": 1}


def code_as_a_node_s_name(package: Path, trap: Trap) -> None:
    edit_graph(package, lambda graph: nodes(graph)[0].update(name=f"x; {trap.code}"))


def code_as_a_keyword(package: Path, trap: Trap) -> None:
    edit_graph(
        package, lambda graph: nodes(graph)[0]["inputs"][0].update(name=f"x={trap.code}", kind=2)
    )


def code_as_an_argument_of_forward(package: Path, trap: Trap) -> None:
    edit_graph(package, lambda graph: call(graph).update(forward_arg_names=[f"batch={trap.code}"]))


def module_as_an_operator_library(package: Path, trap: Trap) -> None:
    library = {
        **UNKNOWN_LIBRARY,
        "distribution": trap.module,
        "version": "1",
        "modules": [trap.module],
    }
    edit_manifest(package, lambda manifest: manifest["op_libraries"].update({trap.module: library}))


def wheel_that_brings_operators(package: Path, trap: Trap) -> None:
    (package / "extensions").mkdir()
    name = f"extensions/{trap.module}-1-py3-none-any.whl"
    with zipfile.ZipFile(package / name, "w") as archive:
        archive.writestr(
            f"{trap.module}-1.dist-info/METADATA", f"Name: {trap.module}\nVersion: 1\n"
        )
        archive.writestr(f"{trap.module}.py", trap.code)
    library = {
        **UNKNOWN_LIBRARY,
        "distribution": trap.module,
        "version": "1",
        "modules": [trap.module],
        "wheels": [name],
    }

    def bring(manifest: dict[str, Any]) -> None:
        manifest["op_libraries"][trap.module] = library
        manifest["features"] = sorted([*manifest["features"], "custom-ops", "extensions"])
        manifest["files"][name] = {"media_type": "application/zip", "sha256": "0" * 64, "size": 0}

    edit_manifest(package, bring)
    reseal(package)


ATTACKS: tuple[Callable[[Path, Trap], None], ...] = (
    symbolic_size,
    range_of_a_symbol,
    enum_in_a_treespec,
    guards,
    guards_within,
    sample_inputs_in_a_graph,
    sample_inputs_that_are_not_listed,
    pickled_weights,
    pickled_constants,
    operator_that_writes_files,
    function_of_python,
    code_as_a_node_s_name,
    code_as_a_keyword,
    code_as_an_argument_of_forward,
    module_as_an_operator_library,
    wheel_that_brings_operators,
)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_hostile_package_is_refused_and_nothing_runs(
    copied: Path, trap: Trap, attack: Callable[[Path, Trap], None]
) -> None:
    attack(copied, trap)
    with pytest.raises(PackageError) as refused:
        use(copied)
    if attack not in (sample_inputs_that_are_not_listed, pickled_weights, pickled_constants):
        assert isinstance(refused.value, UnsafePackageError)
    verify_package(copied)
    assert not trap.sprung.exists()
    assert trap.module not in sys.modules


def test_a_pickle_that_the_manifest_lists_is_never_read(copied: Path, trap: Trap) -> None:
    (copied / "sample_inputs.pt").write_bytes(trap.pickle())
    entry = {"media_type": "application/octet-stream", "sha256": "0" * 64, "size": 0}
    edit_manifest(copied, lambda manifest: manifest["files"].update({"sample_inputs.pt": entry}))
    reseal(copied)
    with contextlib.suppress(PackageError):
        use(copied)
    verify_package(copied)
    assert not trap.sprung.exists()


def test_without_an_attack_the_package_is_used(copied: Path) -> None:
    reseal(copied)
    use(copied)
    assert verify_package(copied).ok


def test_the_traps_are_real(copied: Path, trap: Trap) -> None:
    """The traps work with torch's own reader, which is why we have another one."""
    graph = json.loads((copied / "graphs/train.json").read_bytes())

    def springs(act: Callable[[], object]) -> bool:
        with contextlib.suppress(Exception):  # any error is fine: the code has run by then
            act()
        there = trap.sprung.exists()
        trap.sprung.unlink(missing_ok=True)
        return there

    def read(change: Callable[[dict[str, Any]], None]) -> None:
        changed = json.loads(json.dumps(graph))
        change(changed)
        graph_from_json(changed, {}, {})

    assert springs(lambda: read(lambda changed: first_symbol(changed).update(expr_str=trap.code)))
    assert springs(lambda: read(lambda changed: call(changed).update(in_spec=treespec_with(trap))))
    assert springs(lambda: pickle.loads(trap.pickle()))
    assert springs(lambda: torch.ops.aten.from_file.default(str(trap.sprung), True, 1))
    assert not springs(lambda: read(lambda changed: None))
