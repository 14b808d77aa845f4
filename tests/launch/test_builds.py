"""What a run has derived and compiled: its own graphs, and those of evaluation where it has held-out data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.launch.tiny import write_rows

import trainload
from trainload.launch.build import is_compiled, uncompiled_build
from trainload.packaging.read import Package
from trainload.sharding.plan import Plan

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def plan(tiny: Package) -> Plan:
    return trainload.plan(tiny, trainload.Cluster(), "single")


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "held-out.npz", 12)


@pytest.mark.parametrize(("evaluates", "expected"), [(False, []), (True, ["eval"])])
def test_graphs_of_evaluation_are_made_for_a_run_with_held_out_data_alone(
    tiny: Package, plan: Plan, evaluates: bool, expected: list[str]
) -> None:
    built = uncompiled_build(tiny, plan, CPU, evaluates=evaluates)
    assert list(built.train) == ["train"]
    assert list(built.forward) == expected


@pytest.mark.slow
def test_a_build_with_evaluation_serves_a_run_without(
    tiny: Package, plan: Plan, tiny_data: Path, held_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("TRAINLOAD_CACHE_DIR", str(cache))

    def builds(name: str, eval_data: Path | None = None) -> int:
        trainload.launch(tiny, plan, tiny_data, run_dir=tmp_path / name, steps=1, eval_data=eval_data, backend="local")
        return sum(path.is_dir() for path in (cache / "compiled").iterdir())

    assert builds("without") == 1
    assert is_compiled(tiny, plan, cache, evaluates=False)
    assert not is_compiled(tiny, plan, cache, evaluates=True)
    assert builds("with", eval_data=held_out) == 2
    (smaller,) = (path for path in (cache / "compiled").iterdir() if path.is_dir() and not list(path.glob("eval*")))
    for path in smaller.iterdir():
        path.unlink()
    smaller.rmdir()
    assert is_compiled(tiny, plan, cache, evaluates=False)
    assert builds("without again") == 1
