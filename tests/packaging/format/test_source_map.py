"""Origins of nodes: debug/source-map.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.capture.jobs import job as small_job

import trainload
from trainload.core.canonical_json import canonical_json, sha256_bytes
from trainload.core.errors import PackageError
from trainload.core.user_code import load_module
from trainload.packaging.format.source_map import SourceMap, make_source_map, users_path
from trainload.packaging.package import Package, open_package
from trainload.packaging.signatures.verify import verify_package
from trainload.transforms.apply import transform
from trainload.transforms.listing import Line, module_lines

SOURCE = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x).relu()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def loss(model, batch):
    out = model(batch["x"])
    return out.square().mean()
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "users_net.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def net(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Package:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        module: ModuleType = load_module(str(source))
        job = small_job(module.Net(), loss=module.loss)
        del sys.modules["users_net"]
    return trainload.freeze(job, tmp_path_factory.mktemp("net") / "net.tl")


def only(lines: tuple[Line, ...], text: str) -> Line:
    (found,) = (line for line in lines if text in line.text)
    return found


def test_a_node_knows_its_module_file_and_line(net: Package, source: Path) -> None:
    line = only(module_lines(net, "train", "layers.1"), "aten.linear.default")
    assert (line.module, line.file, line.line) == (
        "layers.1.inner",
        str(source),
        SOURCE.splitlines().index("        return self.inner(x).relu()") + 1,
    )
    assert line.source == "return self.inner(x).relu()"


def test_a_node_of_the_loss_knows_its_line_there(net: Package) -> None:
    line = only(module_lines(net, "train", ""), "aten.mean.default")
    assert (line.module, line.source) == ("", "return out.square().mean()")


def test_a_module_has_the_nodes_of_the_modules_in_it_and_no_others(net: Package) -> None:
    inner, outer = (module_lines(net, "train", name) for name in ("layers.1.inner", "layers.1"))
    assert [line.module for line in inner] == ["layers.1.inner"]
    assert [line.module for line in outer] == ["layers.1.inner", "layers.1"]


def test_an_unknown_module_is_refused_with_what_is_near(net: Package) -> None:
    with pytest.raises(PackageError, match=r"layers\.3: the graph has no node.*layers\.[01]"):
        module_lines(net, "train", "layers.3")


def test_an_unknown_graph_is_refused(net: Package) -> None:
    with pytest.raises(PackageError, match="expected eval, train"):
        module_lines(net, "backward", "")


def test_a_source_that_changed_is_quoted_without_its_place(net: Package, source: Path) -> None:
    before = source.read_text()
    try:
        source.write_text("\n" + before)
        line = only(module_lines(net, "train", "layers.0"), "aten.relu.default")
    finally:
        source.write_text(before)
    assert (line.file, line.line, line.source) == (None, None, "return self.inner(x).relu()")


def test_nodes_that_a_pass_makes_come_from_the_line_of_those_they_replace(
    net: Package, source: Path, tmp_path: Path
) -> None:
    from trainload.passes import decompose

    before = source.read_text()
    try:
        source.write_text("\n" + before)  # the file's content at the freeze is what matters
        made = transform(
            net, [(decompose, {"operators": "aten.linear.default"})], tmp_path / "new.tl"
        )
    finally:
        source.write_text(before)
    line = only(module_lines(made, "train", "layers.1"), "aten.addmm.default")
    assert (line.file, line.source) == (str(source), "return self.inner(x).relu()")


def test_the_source_map_is_listed_and_verified(net: Package) -> None:
    assert (net.path / "debug/source-map.json").is_file()
    assert verify_package(net.path).ok


def test_a_package_without_debug_still_shows_its_graph(copied: Path) -> None:
    for file in (copied / "debug").iterdir():
        file.unlink()
    lines = module_lines(open_package(copied), "train", "emb")
    assert {(line.file, line.source) for line in lines} == {(None, "")}


@pytest.mark.parametrize(
    "document",
    [
        [],
        {"files": 3},
        {"files": [], "graphs": {"train": {"embedding": ["emb", 5, 1, "x"]}}},
        {"files": [["a"]], "graphs": {}},
        {"files": [], "graphs": 7},
    ],
)
def test_a_source_map_that_is_none_tells_nothing(copied: Path, document: object) -> None:
    put(copied, document)
    assert SourceMap(copied).place("train", "embedding") is None


def test_what_a_terminal_would_obey_is_not_handed_on(copied: Path) -> None:
    put(
        copied,
        {
            "files": [["/nowhere.py", None]],
            "graphs": {"train": {"embedding": ["emb", 0, 1, "a\x1b[31mb"]}},
        },
    )
    place = SourceMap(copied).place("train", "embedding")
    assert place is not None
    assert place.text == "a?[31mb"


def put(package: Path, document: object) -> None:
    """Write the source map of another writer, with correct digests."""
    data = canonical_json(document)
    (package / "debug/source-map.json").write_bytes(data)
    files = json.loads((package / "debug/index.json").read_bytes())["files"]
    files["debug/source-map.json"] |= {"sha256": sha256_bytes(data), "size": len(data)}
    body = {"files": files}
    (package / "debug/index.json").write_bytes(
        canonical_json({**body, "checksum": sha256_bytes(canonical_json(body))})
    )


def test_frames_of_torch_are_passed_over(tmp_path: Path) -> None:
    import torch

    library = f"{Path(torch.__file__).parent}/nn/functional.py"
    trace = (
        f'File "/users/net.py", line 3, in forward\n    y = f(x)\n  File "{library}", line 9, in'
        " forward\n    return g(x)"
    )
    made = make_source_map({"train": {"add": {"stack_trace": trace}}}, {"/users/net.py": "0" * 64})
    assert made == {
        "files": [["/users/net.py", "0" * 64]],
        "graphs": {"train": {"add": ["", 0, 3, "y = f(x)"]}},
    }


@pytest.mark.parametrize(
    ("path", "users"),
    [("model", ""), ("model.layers.3", "layers.3"), ("modeling", "modeling"), ("", "")],
)
def test_the_users_model_stands_at_the_root(path: str, users: str) -> None:
    assert users_path(path) == users
