"""Values in checkpoints are recomputed in backward, and take no memory until then."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.autograd_trace.checkpoints import (
    MODELS,
    Blocks,
    checkpointed,
    keeping,
    plainly,
    reentrant,
)
from tests.autograd_trace.memory import peak_bytes
from tests.autograd_trace.step_graph_calls import program_of, run
from tests.capture.jobs import job
from tests.optimizers import optimizer_of
from torch import nn
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from trainload.autograd_trace.compiling.inductor import compile_graph, load_compiled
from trainload.autograd_trace.derivation.aot import derive
from trainload.autograd_trace.derivation.step_check import check_step
from trainload.autograd_trace.graphs import TANGENT, StepGraph
from trainload.autograd_trace.recompute.hold import hold_back
from trainload.autograd_trace.recompute.rematerialisation import RECOMPUTES, REPEATED
from trainload.capture.job.definition import Job
from trainload.capture.program import Program
from trainload.core.errors import CaptureError
from trainload.packaging.derived import read_derived, write_derived
from trainload.packaging.write import write_package

CPU = torch.device("cpu")
aten = torch.ops.aten
ROWS, WIDTH, HIDDEN, COUNT = 256, 16, 64, 4
BATCH = {"x": torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))}


SOME = ("nested",)
some_models = pytest.mark.matrix(when=lambda name: name in SOME)


@functools.cache
def small(name: str, around: Any) -> tuple[Program, StepGraph]:
    torch.manual_seed(1)
    program = program_of(job(MODELS[name](around)))
    return program, derive(program, "train", CPU)


@functools.cache
def large(around: Any) -> tuple[Program, StepGraph]:
    """Return blocks whose hidden values take by far the most memory of a step."""
    torch.manual_seed(1)
    program = program_of(job(Blocks(around, COUNT, WIDTH, HIDDEN), batch=BATCH))
    return program, derive(program, "train", CPU)


def copies(step: StepGraph, *targets: object) -> list[Node]:
    """Return the nodes that recompute a value; if `targets` are given, only calls of these."""
    return [
        n
        for n in step.module.graph.nodes
        if RECOMPUTES in n.meta and (not targets or n.target in targets)
    ]


def order(step: StepGraph) -> dict[Node, int]:
    return {node: i for i, node in enumerate(step.module.graph.nodes)}


@pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad", "ignore:2 parameters get no gradient"
)
@some_models
@pytest.mark.parametrize("name", MODELS)
def test_values_are_bit_for_bit_those_without_checkpoints(name: str) -> None:
    batch = {"x": torch.randn(6, 8, generator=torch.Generator().manual_seed(2))}
    plain, kept = (
        run(small(name, plainly)[1], small(name, plainly)[0], batch),
        small(name, checkpointed),
    )
    found = run(kept[1], kept[0], batch)
    assert found.keys() == plain.keys()
    assert [key for key in plain if not torch.equal(found[key], plain[key])] == []


@some_models
@pytest.mark.parametrize("name", [name for name in MODELS if name != "in_no_grad"])
def test_a_step_graph_with_checkpoints_is_what_autograd_says(name: str) -> None:
    program, step = small(name, checkpointed)
    check_step(program, "train", step, {"x": torch.randn(6, 8)})


@some_models
@pytest.mark.parametrize("name", [name for name in MODELS if name != "in_no_grad"])
def test_something_is_computed_again(name: str) -> None:
    assert copies(small(name, checkpointed)[1]) != []


@some_models
@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_computed_again_without_checkpoints(name: str) -> None:
    assert copies(small(name, plainly)[1]) == []


@some_models
@pytest.mark.parametrize("name", MODELS)
def test_copies_stand_in_the_backward_part(name: str) -> None:
    step = small(name, checkpointed)[1]
    place = order(step)
    tangent = next(n for n in place if n.name == TANGENT)
    assert all(place[n] > place[tangent] for n in copies(step))


@pytest.mark.slow
def test_a_reentrant_checkpoint_is_computed_again_too() -> None:
    assert len(copies(small("tied_weights", reentrant)[1], aten.tanh.default)) == 2


def test_a_checkpoint_without_gradient_is_not_computed_again() -> None:
    assert copies(small("in_no_grad", checkpointed)[1]) == []


def test_every_value_of_a_region_that_backward_needs_is_computed_once_more() -> None:
    step = large(checkpointed)[1]
    assert len(copies(step, aten.addmm.default)) == len(copies(step, aten.gelu.default)) == COUNT


def test_what_backward_does_not_need_is_not_computed_again() -> None:
    """Nothing uses the result of a block's second layer."""
    step = large(checkpointed)[1]
    again = {n.meta[RECOMPUTES] for n in copies(step, aten.addmm.default)}
    made = [
        n
        for n in step.module.graph.nodes
        if n.target is aten.addmm.default and RECOMPUTES not in n.meta
    ]
    assert [n.name in again for n in made] == [True, False] * COUNT


def test_one_region_at_a_time_is_computed_again() -> None:
    step = large(checkpointed)[1]
    place = order(step)
    hidden = copies(step, aten.gelu.default, aten.addmm.default)
    lives = [(place[n], max(place[u] for u in n.users), n.meta[RECOMPUTES]) for n in hidden]
    forward = {n.name: i for n, i in place.items()}
    for begin, end, name in lives:
        others = [(b, e) for b, e, other in lives if abs(forward[other] - forward[name]) > 4]
        assert all(e < begin or b > end for b, e in others)


def test_regions_are_computed_again_from_the_last_to_the_first() -> None:
    step = large(checkpointed)[1]
    forward = {n.name: i for n, i in order(step).items()}
    again = [forward[n.meta[RECOMPUTES]] for n in copies(step, aten.gelu.default)]
    assert again == sorted(again, reverse=True)


def test_a_result_that_an_operator_outside_has_saved_is_kept_for_it() -> None:
    """The product outside the checkpoint saved tanh's result; tanh's derivative recomputes it."""
    step = small("result_used_outside", checkpointed)[1]
    place = order(step)
    tangent = next(i for n, i in place.items() if n.name == TANGENT)
    (made,) = (n for n in place if n.target is aten.tanh.default and RECOMPUTES not in n.meta)
    users = {str(u.target) for u in made.users if place[u] > tangent}
    assert users == {"aten.mul.Tensor"}
    assert len(copies(step, aten.tanh.default)) == 1


def test_an_inner_checkpoint_is_computed_again_for_the_outer_one_and_for_itself() -> None:
    """The derivative of exp needs exp, and therefore all values.

    Those of sin and tanh need tanh, which the outer checkpoint's recomputation has not kept.
    """
    step = small("nested", checkpointed)[1]
    counts = {
        target: len(copies(step, target))
        for target in (aten.cos.default, aten.tanh.default, aten.sin.default, aten.exp.default)
    }
    assert counts == {
        aten.cos.default: 1,
        aten.tanh.default: 2,
        aten.sin.default: 1,
        aten.exp.default: 1,
    }


def test_buffers_are_updated_once() -> None:
    program, step = small("batch_norm", checkpointed)
    outputs = run(step, program, {"x": torch.randn(6, 8)})
    assert outputs["buffer/norm.num_batches_tracked"] == 1


def test_a_step_takes_the_memory_of_one_region_in_place_of_all() -> None:
    peaks = {}
    for around in (plainly, checkpointed):
        program, step = large(around)
        peaks[around] = peak_bytes(functools.partial(run, step, program, BATCH))
    hidden = 2 * ROWS * HIDDEN * 4  # results of addmm and GELU in one block
    assert peaks[plainly] > COUNT * hidden
    assert peaks[checkpointed] < peaks[plainly] - (COUNT - 2) * hidden


@pytest.mark.slow
def test_a_compiled_step_takes_the_memory_of_one_region_in_place_of_all(tmp_path: Path) -> None:
    peaks, gradients = {}, {}
    for around in (plainly, checkpointed):
        program, step = large(around)
        compile_graph(derive(program, "train", CPU).module, tmp_path / "step.bin", {})
        compiled = load_compiled(tmp_path / "step.bin")
        loaded = StepGraph(compiled, step.inputs, step.outputs)  # type: ignore[arg-type]  # called in the same way
        run(loaded, program, BATCH)  # excludes allocations of the first call
        peaks[around] = peak_bytes(functools.partial(run, loaded, program, BATCH))
        gradients[around] = run(loaded, program, BATCH)
    hidden = 2 * ROWS * HIDDEN * 4
    assert peaks[checkpointed] < peaks[plainly] - (COUNT - 3) * hidden
    for key, value in gradients[plainly].items():
        torch.testing.assert_close(
            gradients[checkpointed][key], value, rtol=1e-5, atol=1e-7, msg=key
        )


@pytest.mark.slow
def test_holding_back_changes_no_value() -> None:
    program, step = small("dropout", checkpointed)
    batch = {"x": torch.randn(6, 8)}
    before = run(step, program, batch)
    held = derive(program, "train", CPU)
    hold_back(held.module)
    after = run(held, program, batch)
    assert len(held.module.graph.nodes) > len(step.module.graph.nodes)
    assert [key for key in before if not torch.equal(before[key], after[key])] == []


def test_what_is_held_back_depends_on_the_backward_pass() -> None:
    """Every recomputed GELU does, even in the last block, whose backward comes first."""
    step = derive(large(checkpointed)[0], "train", CPU)
    hold_back(step.module)
    assert len(copies(step, aten.gelu.default)) == COUNT
    for copy in copies(step, aten.gelu.default):
        assert any(n.target is aten.isnan.default for n in ancestors(copy))


def ancestors(node: Node) -> set[Node]:
    found: set[Node] = set()
    stack = [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                stack.append(source)
    return found


# Selective checkpoints.


def gelus(state: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return op is aten.gelu.default


def every_other() -> Any:
    calls = [0]

    def policy(state: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is not aten.tanh.default:
            return CheckpointPolicy.PREFER_RECOMPUTE
        calls[0] += 1
        return CheckpointPolicy.MUST_SAVE if calls[0] % 2 else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


@functools.cache
def keeping_gelus() -> tuple[Job, Program, StepGraph]:
    """Return a job of two blocks whose policy is a list."""
    description = job(Blocks(keeping([aten.gelu.default]), count=2))
    program = program_of(description)
    return description, program, derive(program, "train", CPU)


@functools.cache
def twice() -> Program:
    return program_of(job(nn.Sequential(_Twice(keeping(every_other())))))


@pytest.mark.parametrize("policy", [[aten.gelu.default], gelus], ids=["a list", "a function"])
def test_what_a_policy_saves_is_kept(policy: Any) -> None:
    if policy is gelus:
        program = program_of(job(Blocks(keeping(policy), count=1)))
        step, count = derive(program, "train", CPU), 1
    else:
        (_, program, step), count = keeping_gelus(), 2
    assert copies(step, aten.gelu.default) == []
    assert len(copies(step, aten.addmm.default)) == count
    check_step(program, "train", step, {"x": torch.randn(6, 8)})


def test_a_policy_may_keep_some_calls_of_an_operator() -> None:
    step = derive(twice(), "train", CPU)
    kept = [
        n
        for n in step.module.graph.nodes
        if n.target is aten.tanh.default and RECOMPUTES not in n.meta
    ]
    assert [n.meta[RECOMPUTES] for n in copies(step, aten.tanh.default)] == [kept[1].name]


class _Twice(nn.Module):
    def __init__(self, around: Any) -> None:
        super().__init__()
        self.around = around
        self.part = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.around(lambda y: self.part(self.part(y).tanh()).tanh().sin(), x)
        return result


def test_a_policy_that_does_not_fit_the_derived_graph_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = twice().graphs["train"].exported.graph_module
    (call,) = (n for n in graph.graph.nodes if "selective" in str(n.target))
    monkeypatch.setattr(call, "args", (call.args[0], "aten.tanh.default=101", *call.args[2:]))
    with pytest.raises(
        CaptureError, match=r"aten\.tanh\.default differently.*expected 3 calls.*got 2"
    ):
        derive(twice(), "train", CPU)


def test_a_list_of_operators_is_kept_with_those_of_other_devices() -> None:
    flash = aten._scaled_dot_product_flash_attention.default
    program = program_of(job(Blocks(keeping([flash, aten.gelu.default]), count=1)))
    (call,) = (
        n for n in program.graphs["train"].exported.graph.nodes if "selective" in str(n.target)
    )
    assert call.args[1] == "aten._scaled_dot_product_flash_attention.default=1 aten.gelu.default=1"


def test_a_package_keeps_checkpoints_and_what_they_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINLOAD_STATE_DIR", str(tmp_path / "state"))
    description, program, _ = keeping_gelus()
    recipe, updates = optimizer_of(description, program)
    package = write_package(tmp_path / "p", program, updates, recipe)
    step = derive(package.program(), "train", CPU)
    assert len(copies(step, aten.addmm.default)) == 2
    assert copies(step, aten.gelu.default) == []
    write_derived(package, "key", step)
    read = read_derived(package, "key")
    assert read is not None
    tags = [
        [n.meta.get(tag) for n in graph.module.graph.nodes]
        for graph in (step, read)
        for tag in (RECOMPUTES, REPEATED)
    ]
    assert tags[:2] == tags[2:]
