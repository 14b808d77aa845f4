"""Replays batches through eager mode and through a captured graph, and compares the results."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind

from trainload.capture.diagnostics.blame import replay_error
from trainload.capture.diagnostics.python_state import Holder, drawn_from, generators, take_snapshot
from trainload.capture.job.ambient import default_dtype_hint, outside_dtype
from trainload.capture.job.flat_function import Traced
from trainload.capture.job.shared_memory import check_sharing
from trainload.capture.job.stored_tensors import StoredTensors
from trainload.capture.operators import is_overload, nodes_in
from trainload.capture.parity.backward_passes import (
    ComparedGradients,
    compare_gradients,
    store_gradients,
)
from trainload.capture.parity.distance import (
    digits_floor,
    nudged,
    relative_distance,
    tolerance_for,
)
from trainload.capture.parity.float64 import Key, Reference, doubled, reference_of
from trainload.capture.parity.locate import first_divergent_module
from trainload.capture.program import GraphCapture, OutputRole
from trainload.capture.source.quiet import ignore_torchs_warnings
from trainload.capture.source.source_place import place_of_node
from trainload.capture.watching.higher_order import has_branches, has_checkpoints
from trainload.capture.watching.leaked import check_no_leaks
from trainload.capture.watching.saved_tensors import saved_tensors_checked
from trainload.core.errors import CaptureError, JobError, RequestError

FULL_PRECISION_TOLERANCE = 1e-5
"""Maximum L2 distance of a captured from an eager tensor, relative to the eager norm."""
LOW_PRECISION_TOLERANCE = 1e-3
"""Like FULL_PRECISION_TOLERANCE, for graphs that compute in float16 or bfloat16 somewhere."""
_SEED = 20_240_229


def check_parity(
    captured: GraphCapture,
    function: Traced,
    batches: Sequence[dict[str, Tensor]],
    constants: Mapping[str, Tensor],
) -> set[str]:
    """Compare outputs, gradients and buffers on batches, each with its own seed.

    Args:
        captured: the graph.
        function: the captured function, in the same mode; its model's buffers are changed.
        batches: result of `replays.replay_batches`.
        constants: tensor constants by "graph/name".

    Returns:
        Names of the parameters that require a gradient and receive none.

    Raises:
        CaptureError: if something differs; the message names the first module that differs.
    """
    missing: set[str] | None = None
    moving: set[Holder] | None = None
    finite = False
    for seed, batch in enumerate(batches, _SEED):
        without_gradient, changed_numbers, loss = _compare(
            captured, function, batch, constants, seed
        )
        finite = finite or bool(loss.isfinite().all())
        missing = without_gradient if missing is None else missing & without_gradient
        moving = changed_numbers if moving is None else moving & changed_numbers
    if moving:
        first = min(moving)
        raise CaptureError(
            f"forward changes the Python number {first.name}, which a graph would freeze",
            where=first.where,
            expected="state in buffers",
            got=f"a value that changes with every {captured.name} call",
            hint=(
                "Keep it in a buffer (register_buffer) and change it with tensor operators, or"
                " count outside of forward."
            ),
        )
    if captured.training and not finite:
        nan = [
            f"the parameter {name}"
            for name, value in function.model.named_parameters()
            if bool(value.isnan().any())
        ]
        nan += [
            f"the input {name}" for name, value in batches[0].items() if bool(value.isnan().any())
        ]
        warnings.warn(
            f"The loss of Job.batch is {float(loss):g} in the {captured.name} graph: its gradients"
            " could not be compared with those of eager mode. Use an example with a finite"
            f" loss.{' There are NaNs in ' + ', '.join(nan[:4]) + '.' if nan else ''}",
            stacklevel=2,
        )
    return missing or set()


def _compare(
    captured: GraphCapture,
    function: Traced,
    batch: dict[str, Tensor],
    constants: Mapping[str, Tensor],
    seed: int,
) -> tuple[set[str], set[Holder], Tensor]:
    """Return the parameters without a gradient, the changed Python numbers, and the eager loss."""
    model = function.get_submodule("model")
    training = captured.training
    rows = next(iter(batch.values())).shape[0]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    before = _copy_buffers(function)

    updated: dict[str, Tensor] = {}
    numbers, states = take_snapshot(function), generators()
    versions = {name: value._version for name, value in parameters.items()}
    with replaying(training, seed), saved_tensors_checked():
        try:
            with outside_dtype():
                expected = function(batch)
            _check_no_python_draws(drawn_from(states))
            check_no_leaks(expected, function, batch)
            # eager mode runs them again in backward, and updates buffers twice
            if has_checkpoints(captured.exported.graph_module):
                updated = {
                    n: value.detach().clone()
                    for n, value in model.named_buffers(remove_duplicate=False)
                }
            eager_gradients = _gradients(expected, captured, parameters)
        except RequestError:
            raise
        except Exception as error:
            # a model's own code may raise anything; each becomes a report that names the place
            raise replay_error(captured, rows, "the model", error) from error
    _check_no_writes(
        captured, {n for n, v in parameters.items() if v._version != versions[n]}, "a parameter"
    )
    after = take_snapshot(function)
    changed_numbers = {
        holder for holder in numbers.changed_in(after) if after.values[holder] != rows
    }
    # a checkpoint policy may count calls without changing the result
    if has_checkpoints(captured.exported.graph_module):
        changed_numbers &= after.attributes
    eager_outputs = [v.detach().clone() for v in expected]
    for spec, value in zip(captured.outputs, eager_outputs, strict=True):
        if spec.role is OutputRole.WEIGHT and not 0 <= value.item() < math.inf:
            raise JobError(
                "the weight of the batch cannot be used for a weighted mean",
                where=f"the {captured.name} graph on {rows} rows of the example batch",
                expected="a finite number, 0 or more",
                got=f"{value.item():g}",
                hint=(
                    "The weight is the number of items that the loss averages over, such as tokens"
                    " that are not padding."
                ),
            )
    eager_buffers = dict(model.named_buffers(remove_duplicate=False))
    differentiable = sorted(name for name, value in eager_buffers.items() if value.requires_grad)
    if differentiable:
        raise CaptureError(
            "forward writes a value that requires a gradient into a buffer",
            where=f"buffer {differentiable[0]}",
            hint="Write it under torch.no_grad(), or write value.detach().",
        )
    eager_buffers = {
        name: updated.get(name, value).clone() for name, value in eager_buffers.items()
    }
    check_sharing(
        model,
        captured.exported,
        {
            n
            for n, value in before.items()
            if n in eager_buffers and not _is_equal(value, eager_buffers[n])
        },
    )

    replayed = {
        name: value.clone(memory_format=torch.contiguous_format) for name, value in before.items()
    }
    weights = _leaf_copies(parameters)
    arguments = _arguments(captured, batch, {**weights, **replayed}, constants)
    constant_versions = {name: value._version for name, value in constants.items()}
    tolerance = tolerance_of(captured)
    with replaying(training, seed):
        try:
            outputs = captured.exported.graph_module(*arguments)
            compared = (
                compare_gradients(
                    _loss_of(outputs, captured), _trained(weights), eager_gradients, tolerance
                )
                if training
                else None
            )
        except Exception as error:  # torch's kernels may raise anything
            raise replay_error(captured, rows, "the captured graph", error) from error
        got = [value.detach() for value in outputs]
        del outputs
    _check_constants_unwritten(
        {n for n, v in constants.items() if v._version != constant_versions[n]}, captured
    )

    def where() -> str:
        if changed_numbers:
            return min(changed_numbers).where
        fresh = {name: value.clone() for name, value in before.items()}
        with torch.no_grad():
            for name, value in model.named_buffers(remove_duplicate=False):
                if name in before and value.shape == before[name].shape:
                    value.copy_(before[name])
        again = _arguments(captured, batch, {**weights, **fresh}, constants)
        with replaying(training, seed):
            return first_divergent_module(
                captured.exported.graph_module,
                function,
                batch,
                again,
                lambda a, b: relative_distance(a.detach(), b.detach()),
                tolerance,
            )

    def moved() -> Mapping[str, Tensor | None]:
        """Return the graph's gradients at weights that differ in their last bit."""
        nudged_weights = nudged(weights)
        fresh = {name: value.clone() for name, value in before.items()}
        with replaying(training, seed):
            outputs = captured.exported.graph_module(
                *_arguments(captured, batch, {**nudged_weights, **fresh}, constants)
            )
            return _gradients(outputs, captured, nudged_weights)

    @functools.cache
    def exact() -> Reference | None:
        def call(twin: GraphCapture) -> dict[Key, Tensor | None]:
            state = doubled({**weights, **{name: value.clone() for name, value in before.items()}})
            with replaying(training, seed):
                outputs = twin.exported.graph_module(
                    *_arguments(twin, doubled(batch), state, doubled(constants))
                )
                gradients = _gradients(outputs, twin, state)
            values: dict[Key, Tensor | None] = {
                (s.role, s.name): v.detach() for s, v in zip(captured.outputs, outputs, strict=True)
            }
            return (
                values
                | {("buffer", n): state[n] for n in before}
                | {("gradient", n): g for n, g in gradients.items()}
            )

        return reference_of(
            captured,
            call,
            {("gradient", name): gradient for name, gradient in eager_gradients.items()},
        )

    def allows(
        kind: str, name: str, expected: Tensor | None, actual: Tensor | None, floor: float = 0.0
    ) -> bool:
        reference = exact()
        return reference is not None and reference.allows((kind, name), expected, actual, floor)

    for spec, a, b in zip(captured.outputs, eager_outputs, got, strict=True):
        allowed = partial(allows, spec.role, spec.name, a, b)
        _check(f"{spec.role} {spec.name!r}", a, b, tolerance, captured, rows, where, allowed)
    for name, value in eager_buffers.items():
        if name not in replayed:
            raise CaptureError(
                "forward registers a buffer",
                where=f"buffer {name}",
                hint="Register it in the constructor.",
            )
        allowed, place = (
            partial(allows, "buffer", name, value, replayed[name]),
            partial("buffer {}".format, name),
        )
        _check(
            f"buffer {name!r} after the step",
            value,
            replayed[name],
            tolerance,
            captured,
            rows,
            place,
            allowed,
        )
    missing = eager_gradients.missing()
    if compared is not None:
        _check_gradients(
            eager_gradients,
            compared,
            tolerance,
            captured,
            rows,
            list(parameters),
            where,
            moved,
            partial(allows, "gradient"),
        )
        # a parameter of the other branch alone has gradient zero in the graph, None in eager
        if has_branches(captured.exported.graph_module):
            missing -= compared.reached
    return missing, changed_numbers, eager_outputs[0]


def _copy_buffers(function: nn.Module) -> dict[str, Tensor]:
    """Return copies of the model's buffers by name."""
    return {
        name: value.detach().clone()
        for name, value in function.get_submodule("model").named_buffers(remove_duplicate=False)
    }


def _is_equal(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first, second)


def _leaf_copies(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return copies as leaf tensors.

    A parameter's hook is part of the graph, and must not run a second time.
    """
    # contiguous, as in a package
    copies = {
        id(p): p.detach().contiguous().requires_grad_(p.requires_grad) for p in parameters.values()
    }
    return {name: copies[id(p)] for name, p in parameters.items()}


def _check_no_python_draws(modules: Sequence[str]) -> None:
    if modules:
        raise CaptureError(
            f"forward draws from {' and '.join(modules)}, and the graph would always use the number"
            " that was drawn during capture",
            where="Job.model",
            hint=(
                "Draw with torch and select with torch.where or torch.cond, or pass the number in"
                " the batch."
            ),
        )


def _arguments(
    captured: GraphCapture,
    batch: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    constants: Mapping[str, Tensor],
) -> list[Tensor]:
    entries = iter(batch.values())
    return [
        (
            next(entries)
            if s.kind is InputKind.USER_INPUT
            else (
                constants[f"{captured.name}/{s.target}"].to(next(iter(batch.values())).device)
                if s.kind is InputKind.CONSTANT_TENSOR
                else state[str(s.target)]
            )
        )
        for s in captured.exported.graph_signature.input_specs
    ]


def _check_no_writes(captured: GraphCapture, names: set[str], what: str) -> None:
    if names:
        raise CaptureError(
            f"the {captured.name} graph writes to {what}",
            where=min(names).removeprefix(f"{captured.name}/"),
            expected="a step that changes buffers only",
            got=f"a write in place to {', '.join(sorted(names)[:4])}",
            hint=(
                "Keep what changes in a buffer (register_buffer); constrain a parameter with"
                " torch.nn.utils.parametrize."
            ),
        )


def _check_constants_unwritten(names: set[str], captured: GraphCapture) -> None:
    """Raise if the graph writes to constants, with the lines that use them."""
    if not names:
        return
    graph, targets = (
        captured.exported.graph,
        {name.removeprefix(f"{captured.name}/") for name in names},
    )
    inputs = {
        spec.arg.name
        for spec in captured.exported.graph_signature.input_specs
        if spec.target in targets
    }
    users = [
        user
        for node in graph.find_nodes(op="placeholder")
        if node.name in inputs
        for user in node.users
    ]
    writers = [
        user for user in users if is_overload(user.target) and user.target._schema.is_mutable
    ] or users
    raise CaptureError(
        f"the {captured.name} graph writes to a tensor that is not a buffer: an attribute, a tensor"
        " of a closure, or an input that all rows share",
        where=place_of_node(writers[0]) if writers else f"graph {captured.name}",
        expected="a step that changes buffers only",
        got=f"a write in place to {', '.join(sorted(targets)[:4])}",
        hint="Keep what changes in a buffer (register_buffer), or write to a clone of it.",
    )


@contextmanager
def replaying(training: bool, seed: int) -> Iterator[None]:
    """Set the seed and the grad mode, and disable autocast's cache of casts, inside the block.

    Captured graphs have no such cache, and the cache alone changes bf16 gradients by 1e-3.
    """
    cache = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.random.fork_rng(), torch.set_grad_enabled(training), warnings.catch_warnings():
            ignore_torchs_warnings()
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_autocast_cache_enabled(cache)


def _trained(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters that require a gradient, each under its first name."""
    first = {id(p): name for name, p in reversed(list(parameters.items())) if p.requires_grad}
    return {name: parameters[name] for name in first.values()}


def _gradients(
    outputs: Sequence[Tensor], captured: GraphCapture, parameters: Mapping[str, Tensor]
) -> StoredTensors:
    """Return the gradients of a training graph's loss; none for another graph."""
    if not captured.training:
        return StoredTensors()
    return store_gradients(_loss_of(outputs, captured), _trained(parameters))


def _loss_of(outputs: Sequence[Tensor], captured: GraphCapture) -> Tensor:
    return next(
        v for s, v in zip(captured.outputs, outputs, strict=True) if s.role is OutputRole.LOSS
    )


def tolerance_of(captured: GraphCapture) -> float:
    """Return the tolerance for a graph's values, by the precisions that it computes in."""
    values = (node.meta.get("val") for node in nodes_in(captured.exported.graph_module))
    low = any(
        isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
        for value in values
    )
    return LOW_PRECISION_TOLERANCE if low else FULL_PRECISION_TOLERANCE


def _check(
    what: str,
    expected: Tensor,
    got: Tensor,
    tolerance: float,
    captured: GraphCapture,
    rows: int,
    where: Callable[[], str],
    allowed: Callable[[], bool],
) -> None:
    distance = relative_distance(expected, got)
    if not distance <= tolerance and not allowed():
        raise CaptureError(
            f"the captured {captured.name} graph differs from eager mode in its {what} on {rows}"
            " rows",
            where=where() or f"graph {captured.name}",
            expected=f"a relative difference of at most {tolerance:g}",
            got=f"{distance:.2g}",
            hint=(
                "The model does something that capture does not see: counters or attributes changed"
                " in forward, buffers that are reassigned instead of written with copy_, hooks,"
                " branches on the batch size, or as_strided of a tensor that is not contiguous."
            )
            + default_dtype_hint(),
        )


def _check_gradients(
    expected: Mapping[str, Tensor | None],
    compared: ComparedGradients,
    tolerance: float,
    captured: GraphCapture,
    rows: int,
    order: list[str],
    where: Callable[[], str],
    moved: Callable[[], Mapping[str, Tensor | None]],
    allowed: Callable[[str, Tensor | None, Tensor | None, float], bool],
) -> None:
    got = compared.different
    wrong = {
        name: relative_distance(expected[name], got[name], compared.floor)
        for name in expected
        if name in got
    }
    if wrong:
        total, nudged_gradients = compared.total, moved()
        # a sum in another order has no more digits than the weights' last bit determines
        for name in list(wrong):
            first, other = got[name], nudged_gradients[name]
            if first is not None and other is not None:
                wrong[name] = relative_distance(
                    expected[name], first, digits_floor(first, other, tolerance, total)
                )
        wrong = {
            name: distance
            for name, distance in wrong.items()
            if not distance <= tolerance_for(expected[name], tolerance)
        }
        wrong = {
            name: distance
            for name, distance in wrong.items()
            if not allowed(name, expected[name], got[name], compared.floor)
        }
    if wrong:
        last = max(wrong, key=order.index)
        module = last.rpartition(".")[0] or "the model itself"
        names = ", ".join(sorted(wrong)[:4]) + (
            f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        )
        raise CaptureError(
            f"the captured graph's gradients differ from those of eager mode for {len(wrong)} of"
            f" {len(expected)} parameters ({names}) on {rows} rows",
            where=where() or f"module {module}",
            expected=f"a relative difference of at most {tolerance:g}",
            got=f"{wrong[last]:.2g} for {last}",
            hint=(
                "The model uses something there that torch.export silently drops: a"
                " torch.autograd.Function, a tensor or module hook, torch.utils.checkpoint, or"
                " no_grad around a control-flow operator. Express it with plain operators or a"
                " custom op."
            ),
        )
