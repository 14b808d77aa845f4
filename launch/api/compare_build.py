"""Compare the graphs of a build with the interpreted ones, on made rows, without a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

from torch import Tensor

from trainload.autograd_trace.derivation.named_groups import (
    alone_of,
    bind_groups,
    unbind_groups,
)
from trainload.autograd_trace.graphs import Recipe
from trainload.autograd_trace.optimizer.rounds import calls_of, draws_of
from trainload.capture.job.synthesise import rows_of, synthesise
from trainload.capture.program import Mode, variant_of
from trainload.launching.node.build import load_build
from trainload.launching.node.build_key import device_of
from trainload.launching.node.cache import default_cache_dir
from trainload.launching.node.determinism import deterministic
from trainload.launching.node.graph_comparison import Comparison
from trainload.launching.node.write_build import Stages
from trainload.launching.verification.verify_build import Verifier
from trainload.launching.worker.calls import Microbatch
from trainload.launching.worker.engine import Draw, Engine
from trainload.packaging.package import Package
from trainload.sharding.plans.plan import Plan

_TURNS = 2
_MOST_ROUNDS = 1000
"""Rounds of the loop in which a graph must have its turns in order to be compared."""


def compare_parts(
    package: Package,
    plan: Plan,
    parts: Mapping[int, Path],
    stages: Stages,
    *,
    is_deterministic: bool,
) -> list[Comparison]:
    """Compare all graphs of a build (`compare_alone`).

    Args:
        package: package that is trained.
        plan: plan of the build.
        parts: index on the pipeline axis -> folder with its graphs.
        stages: durations, to which the part "compare" is added.
        is_deterministic: True if every call of the graphs must give the same bits.

    Returns:
        Comparisons of the graphs that will run interpreted.

    Raises:
        DataError: the package does not record the range of values of an input.
    """
    interpreted: list[Comparison] = []
    for folder in parts.values():
        with stages.timed("compare"):
            compare_alone(
                package,
                plan,
                folder,
                default_cache_dir(),
                interpreted.append,
                is_deterministic=is_deterministic,
            )
    return interpreted


def compare_alone(
    package: Package,
    plan: Plan,
    folder: Path,
    cache_dir: Path,
    tell: Callable[[Comparison], None] = lambda _: None,
    *,
    is_deterministic: bool = True,
) -> None:
    """Call every graph of a build, as rank 0 whose other ranks have the same data, on rows
    made from the package's quantiles. The comparisons are stored in the build's folder.

    Graphs that are compared already are not compared again. Those of a pipeline are not compared,
    since their ranks wait for each other's messages.

    Args:
        package: package that is trained.
        plan: plan of the build.
        folder: folder of the build in the node's cache.
        cache_dir: the node's cache.
        tell: called with the comparison of every graph that will run interpreted.
        is_deterministic: True if every call of the graphs must give the same bits.

    Raises:
        DataError: the package does not record the range of values of an input.
    """
    if plan.pipeline is not None:
        return
    device, groups = device_of(plan), plan.groups()
    has_peers = plan.world_size > 1
    alone = alone_of(0, plan.world_size) if has_peers else nullcontext()
    with deterministic(is_deterministic), alone:
        built = load_build(folder, package, plan, cache_dir)
        verifier = Verifier(package, plan, 0, device, folder, None, tell=tell)
        built = verifier.verified(built)
        if verifier.decided.keys() >= built.names():
            return
        if has_peers:
            bind_groups(groups)
        try:
            engine = Engine(package, plan, 0, device, built)
            engine.held.load_package()
            evaluates = any(
                mode is Mode.EVAL
                for name, mode in package.manifest.modes().items()
                if name in built.forward
            )
            for variant in ("", *package.manifest.variants):
                batch = _made_rows(package, variant, plan.rows_per_call)
                microbatch = Microbatch(batch, 0)
                if evaluates:
                    engine.evaluate(microbatch, variant)
                draw = Draw([microbatch] * plan.accumulate, variant)
                for number in _early_rounds(package.recipe):
                    engine.step(number, [draw] * draws_of(package.recipe, number))
        finally:
            if has_peers:
                unbind_groups(groups)


def _early_rounds(recipe: Recipe) -> list[int]:
    """Return the rounds in which a graph has one of its first turns: the first update creates the
    optimizer's state, and only the next ones are compiled.
    """
    waiting = {turn.graph: _TURNS for turn in recipe.turns}
    found: list[int] = []
    for number in range(_MOST_ROUNDS):
        called = waiting.keys() & {call.graph for call in calls_of(recipe, number)}
        if called:
            found.append(number)
        for graph in called:
            waiting[graph] -= 1
            if not waiting[graph]:
                del waiting[graph]
        if not waiting:
            break
    return found


def _made_rows(package: Package, variant: str, rows: int) -> Mapping[str, Tensor]:
    """Return a batch for the graphs of a variant, with values between the example's quantiles."""
    wanted = package.manifest.data_inputs(variant)
    batch: dict[str, Tensor] = {}
    for name, mode in package.manifest.modes().items():
        if mode is Mode.PREDICT or variant_of(name) != variant:
            continue
        capture = package.captured(name)
        made = synthesise(capture, 0, rows - rows_of(capture))
        batch = {key: value for key, value in made.items() if key in wanted} | batch
    return batch
