"""Evaluation graphs are only derived and compiled for runs with held-out data.

Builds share compiled graphs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.launch.tiny import write_rows

import trainload
from trainload.launching.node.build import compile_build, is_compiled, uncompiled_build
from trainload.launching.node.build_key import build_target
from trainload.launching.node.cache import SIZE_VARIABLE, in_use, leave, make_room
from trainload.packaging.package import Package
from trainload.sharding.plans.plan import Plan

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


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for one test."""
    monkeypatch.setenv("TRAINLOAD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.slow
def test_a_run_with_held_out_data_takes_over_what_one_without_has_compiled(
    tiny: Package,
    plan: Plan,
    tiny_data: Path,
    held_out: Path,
    tmp_path: Path,
    cache: Path,
    compiled: list[str],
) -> None:
    trainload.launch(tiny, plan, tiny_data, run_dir=tmp_path / "without", steps=1, backend="local")
    assert compiled == ["train.only", "train.update"]
    assert (
        is_compiled(tiny, plan, cache, evaluates=False),
        is_compiled(tiny, plan, cache, evaluates=True),
    ) == (True, False)
    trainload.launch(
        tiny,
        plan,
        tiny_data,
        run_dir=tmp_path / "with",
        eval_data=held_out,
        steps=1,
        backend="local",
    )
    assert compiled == ["train.only", "train.update", "eval"]
    assert is_compiled(tiny, plan, cache, evaluates=True)


@pytest.mark.slow
def test_a_build_does_not_make_room_of_the_one_that_it_takes_over(
    tiny: Package, plan: Plan, cache: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = in_use()
    compile_build(tiny, plan, CPU, cache, lambda *_: None, evaluates=False)
    leave(before)
    monkeypatch.setenv(SIZE_VARIABLE, "0")
    compile_build(tiny, plan, CPU, cache, lambda *_: None, evaluates=True)
    assert compiled == ["train.only", "train.update", "eval"]
    assert is_compiled(tiny, plan, cache, evaluates=False)


@pytest.mark.slow
def test_a_run_without_held_out_data_takes_the_build_of_one_with_some(
    tiny: Package,
    plan: Plan,
    tiny_data: Path,
    held_out: Path,
    tmp_path: Path,
    cache: Path,
    compiled: list[str],
) -> None:
    trainload.launch(
        tiny,
        plan,
        tiny_data,
        run_dir=tmp_path / "with",
        eval_data=held_out,
        steps=1,
        backend="local",
    )
    compiled.clear()
    assert is_compiled(tiny, plan, cache, evaluates=False)
    trainload.launch(tiny, plan, tiny_data, run_dir=tmp_path / "without", steps=1, backend="local")
    assert compiled == []


@pytest.mark.slow
def test_what_nobody_uses_makes_room_and_is_compiled_again(
    tiny: Package,
    plan: Plan,
    tiny_data: Path,
    tmp_path: Path,
    cache: Path,
    compiled: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = in_use()
    trainload.launch(tiny, plan, tiny_data, run_dir=tmp_path / "first", steps=1, backend="local")
    monkeypatch.setenv(SIZE_VARIABLE, "0")
    make_room(cache)
    assert is_compiled(tiny, plan, cache, evaluates=False), "this process uses it"
    leave(but=before)
    make_room(cache)
    assert [
        path
        for kind in ("compiled", "kernels")
        for path in (cache / kind).iterdir()
        if path.is_dir()
    ] == []
    trainload.launch(tiny, plan, tiny_data, run_dir=tmp_path / "second", steps=1, backend="local")
    assert compiled == 2 * ["train.only", "train.update"]


def test_graphs_that_need_not_be_deterministic_are_others(tiny: Package, plan: Plan) -> None:
    targets = [
        build_target(tiny, plan, CPU, is_deterministic=wanted).job for wanted in (True, False)
    ]
    assert len(set(targets)) == 2


@pytest.mark.slow
def test_a_run_that_need_not_be_deterministic_has_graphs_of_its_own(
    tiny: Package, plan: Plan, tiny_data: Path, tmp_path: Path, cache: Path
) -> None:
    trainload.launch(
        tiny,
        plan,
        tiny_data,
        run_dir=tmp_path / "run",
        steps=1,
        backend="local",
        deterministic=False,
    )
    found = {
        wanted: is_compiled(tiny, plan, cache, evaluates=False, is_deterministic=wanted)
        for wanted in (False, True)
    }
    assert found == {False: True, True: False}
