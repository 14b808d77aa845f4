"""Captures an optimizer: its update as graphs, its hyperparameters and schedule as data.

An update that works element by element is captured once for each parameter group, over a flat tensor of any length, and runs on whatever
slice a rank holds. One that needs a whole parameter (a norm, a factored moment, a matrix product) is captured once for each shape in the
group, which for this becomes a group of its own in the recipe.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
import traceback
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from trainload.autograd_trace.bound_optimizer import StateNames, bound, state_names
from trainload.autograd_trace.graphs import GroupRecipe, Recipe, StateSpec, UpdateGraph
from trainload.autograd_trace.optimizer_groups import check_trained, group_parameters
from trainload.autograd_trace.python_numbers import as_number, numbers_stay_tensors
from trainload.autograd_trace.recipe import make_recipe
from trainload.autograd_trace.schedule import learning_rates
from trainload.autograd_trace.trainers import make_loop, trainers_of
from trainload.autograd_trace.update_check import check_separate, check_update
from trainload.autograd_trace.ways import Decide, Results, Ways
from trainload.capture.errors import CaptureError, JobError
from trainload.capture.job import Job
from trainload.capture.operators import Overload, calls_in, is_overload
from trainload.capture.program import Program
from trainload.capture.quiet import quiet_torch

_EXAMPLE = 64
_FLAT_SHAPES = ((_EXAMPLE + 1,), (), (5, 13), (2, 3, 3, 4))
"""Of parameters on which an update over flat tensors must be the optimizer's own."""
_CHECKED_ELEMENTS = 2**18
"""An update of a larger parameter is compared with the optimizer's own on one of the same proportions and about this many elements."""
_STEPS, _STEPS_OF_BRANCHES = 3, 12
"""After which an update is compared: one that branches may do so on the number of the step."""
_HOP = torch.ops.higher_order
_ATEN = torch.ops.aten
_COPIES: set[Any] = {
    _ATEN.clone.default,
    _ATEN.detach.default,
    _ATEN.detach_.default,
    _ATEN.lift_fresh_copy.default,
    _ATEN.alias.default,
    _ATEN.copy_.default,
    _ATEN.to.dtype,
    _ATEN._to_copy.default,
    _ATEN.scalar_tensor.default,
    _ATEN.zeros.default,
    _ATEN.ones.default,
    _ATEN.full.default,
    _ATEN.empty_like.default,
    _ATEN.zeros_like.default,
    _ATEN.ones_like.default,
    _ATEN.full_like.default,
    _ATEN.fill_.Scalar,
    _ATEN.zero_.default,
    _ATEN.type_as.default,
    _ATEN.to.device,
    _ATEN.where.ScalarOther,
    _ATEN.where.ScalarSelf,
    _ATEN.where.Scalar,
    _ATEN._assert_tensor_metadata.default,
}
"""Operators that do not mix elements and that torch does not tag as pointwise."""
_OF_0_DIM: set[Any] = {_ATEN.reshape.default, _ATEN.view.default, _ATEN.expand.default, _ATEN.squeeze.default}
"""Operators that do not mix elements where they are given a 0-dim tensor."""


def capture_optimizer(job: Job, program: Program) -> tuple[Recipe, tuple[UpdateGraph, ...]]:
    """Captures the job's optimizer and schedule.

    Raises:
        JobError: the optimizer does not fit the model or the schedule fails.
        CaptureError: the update is not a function of (param, grad, state, lr) that can be captured.
    """
    loop = make_loop(job)
    trainers = trainers_of(job, program, loop)
    specs = {p.name: p for p in program.parameters}
    schedules: dict[tuple[float, ...], None] = {}
    recipes: list[GroupRecipe] = []
    updates: list[UpdateGraph] = []
    groups_of: dict[str, list[str]] = {}
    for trainer in trainers:
        for optimizer in trainer.optimizers:
            _check_kind(optimizer, trainer.where)
        of_group = [optimizer for optimizer in trainer.optimizers for _ in optimizer.param_groups]
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        rates = [found for optimizer in trainer.optimizers for found in learning_rates(trainer.schedule, trainer.updates, optimizer)]
        for number, names in enumerate(group_parameters(job.model, trainer.reached(), groups, trainer.where)):
            if not names:
                continue
            kinds = {specs[n].dtype for n in names}
            if len(kinds) > 1:
                raise JobError(
                    "a parameter group mixes dtypes",
                    where=f"{trainer.where}: group {number}",
                    expected="one dtype",
                    got=str(sorted(kinds)),
                    cure="Make one parameter group for each dtype.",
                )
            shapes = {n: tuple(specs[n].shape) for n in names}
            table = rates[number].factors
            if table is not None:
                schedules.setdefault(table)
            found = _capture_group(f"{trainer.prefix}group{number}", of_group[number], groups[number], getattr(torch, kinds.pop()), shapes)
            for update in found:
                fitting = [n for n in names if update.shape is None or shapes[n] == update.shape]
                for name, members, graphs in trainer.parts(update.group, fitting):
                    recipes.append(
                        GroupRecipe(
                            name=name,
                            parameters=members,
                            learning_rates=(rates[number].base,),
                            schedule=None if table is None else list(schedules).index(table),
                            clock=trainer.clock,
                        )
                    )
                    updates.append(dataclasses.replace(update, group=name))
                    for graph in graphs:
                        groups_of.setdefault(graph, []).append(name)
    check_trained(program, recipes)
    return make_recipe(job, program, trainers, recipes, tuple(schedules), groups_of, loop), tuple(updates)


def _check_kind(optimizer: torch.optim.Optimizer, where: str) -> None:
    """Refuses kinds of which no graph can be."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise CaptureError(
            "the optimizer calls a closure, which runs the model as often as it likes, so it has no fixed update",
            where=f"{where}: {type(optimizer).__name__}",
            expected="an update of (parameter, gradient, state)",
            cure="Use AdamW or SGD.",
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise CaptureError(
            "the optimizer wants sparse gradients, and a step graph's gradients are dense",
            where=f"{where}: SparseAdam",
            cure="Use Adam; it updates the rows of an embedding that were not looked up as well, by their moments.",
        )


def _capture_group(
    name: str, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]]
) -> list[UpdateGraph]:
    """One update over flat tensors, or one for each shape where it needs whole parameters."""
    try:
        update, steps = _capture(name, optimizer, group, dtype, None)
        elementwise = _is_elementwise(update) and all(_is_elementwise(u) for u in _with_dims(name, optimizer, group, dtype))
        if elementwise:
            for shape in _FLAT_SHAPES:
                check_update(update, optimizer, group, dtype, shape, steps)
            check_separate(optimizer, group, dtype, (5, 13))
    except CaptureError:  # perhaps it can do with whole parameters; if not, that attempt says why
        elementwise = False
    return [update] if elementwise else [_capture_whole(name, optimizer, group, dtype, s) for s in sorted(set(shapes.values()))]


def _capture_whole(
    name: str, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dtype: torch.dtype, shape: tuple[int, ...]
) -> UpdateGraph:
    update, steps = _capture(f"{name}-{'x'.join(map(str, shape)) or 'scalar'}", optimizer, group, dtype, shape)
    smaller = _checked_shape(shape)
    checked = update if smaller == shape else _capture(name, optimizer, group, dtype, smaller)[0]
    check_update(checked, optimizer, group, dtype, smaller, steps)
    check_separate(optimizer, group, dtype, smaller)
    return update


def _checked_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    elements = torch.Size(shape).numel()
    factor = (elements / _CHECKED_ELEMENTS) ** (1 / len(shape)) if elements > _CHECKED_ELEMENTS else 1
    return shape if factor == 1 else tuple(max(1, int(size / factor)) for size in shape)


class _Update(nn.Module):
    """One call of an optimizer's step on one tensor. `names`: of its state; None before the first step."""

    def __init__(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], names: StateNames, *, first: bool) -> None:
        super().__init__()
        self._parts = (optimizer, group)
        self._names = names
        self._first = first
        self.ways = Ways()

    def forward(self, param: Tensor, grad: Tensor, lr: Tensor, state: tuple[Tensor, ...]) -> Results:
        return self.ways.results(lambda decide: self._step(decide, param, grad, lr, state))

    def _step(self, decide: Decide, param: Tensor, grad: Tensor, lr: Tensor, state: tuple[Tensor, ...]) -> Results:
        param = param.clone()
        optimizer = bound(*self._parts, [param], lr)
        if not self._first:
            given = [s.clone() for s in state]
            count = len(self._names.changing)
            optimizer.state[param] = {**self._names.fixed, **dict(zip(self._names.changing, given[:count], strict=True))}
            optimizer.param_groups[0] |= {**self._names.fixed_options, **dict(zip(self._names.options, given[count:], strict=True))}
        param.grad = grad.clone()
        with numbers_stay_tensors(decide):
            optimizer.step()
        found = [optimizer.state[param][n] for n in self._names.changing]
        found += [optimizer.param_groups[0][n] for n in self._names.options]
        return (param, *(v if isinstance(v, Tensor) else as_number(v) for v in found))


def _capture(
    name: str, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dtype: torch.dtype, shape: tuple[int, ...] | None
) -> tuple[UpdateGraph, int]:
    """The update as graphs over flat tensors of any length (`shape` None), or over whole parameters of one shape; and the number of steps
    after which it is to be compared with the optimizer's own.
    """
    names = state_names(optimizer, group, dtype, (_EXAMPLE,) if shape is None else _checked_shape(shape))
    param, grad = (torch.zeros((_EXAMPLE,) if shape is None else shape, dtype=dtype) for _ in range(2))
    rate = torch.tensor(float(group["lr"]))
    first = _export(name, _Update(optimizer, group, names, first=True), (param, grad, rate, ()), flat=shape is None)
    output = next(n for n in first.graph.nodes if n.op == "output")
    _, *made = (n.meta["val"] for n in output.args[0])
    state: list[Tensor] = []
    specs: list[StateSpec] = []
    for entry, value in zip(names.entries, made, strict=True):
        like_parameter = value.ndim > 0 and value.shape == output.args[0][0].meta["val"].shape
        if shape is None and value.ndim > 0 and not like_parameter:
            raise CaptureError(
                "an optimizer state has another shape than its parameter, so the update does not run on slices",
                where=f"{type(optimizer).__name__} state {entry!r}",
                expected="the parameter's shape or 0 dims",
                got=str(tuple(value.shape)),
            )
        state.append(torch.zeros(param.shape if like_parameter else tuple(value.shape), dtype=value.dtype))
        others = () if like_parameter else tuple(value.shape)
        specs.append(StateSpec(entry, str(value.dtype).removeprefix("torch."), like_parameter, others))
    later = _Update(optimizer, group, names, first=False)
    following = _export(name, later, (param, grad, rate, tuple(state)), flat=shape is None)
    for graph in (first, following):
        _check_constants(graph, optimizer, name)
    return UpdateGraph(name, first, following, tuple(specs), shape), _STEPS if later.ways.count == 1 else _STEPS_OF_BRANCHES


def _export(name: str, update: _Update, args: tuple[Any, ...], *, flat: bool) -> ExportedProgram:
    length = Dim("length", min=1)
    shapes = ({0: length}, {0: length}, None, tuple({0: length} if s.ndim else None for s in args[3])) if flat else None
    try:
        with quiet_torch(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return torch.export.export(update, args, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # an optimizer's own code may raise anything; all of it becomes one line
        raise CaptureError(
            f"the update of {type(update._parts[0]).__name__} cannot be captured: {str(error).strip().splitlines()[0]}",
            where=_line(error, update._parts[0]) or f"Job.optimizer: {name}",
            cure="Its step must be tensor operators on the parameter, the gradient and the state; .item() of them may be reckoned with.",
        ) from error


def _line(error: BaseException | None, optimizer: torch.optim.Optimizer) -> str:
    """The line of the optimizer's own file at which an error was raised, "" where it was raised elsewhere."""
    file = inspect.getfile(type(optimizer))
    while error is not None:
        lines = [number for frame, number in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
        if lines:
            return f"{file}:{lines[-1]}"
        error = error.__cause__ or error.__context__
    return ""


def _check_constants(exported: ExportedProgram, optimizer: torch.optim.Optimizer, name: str) -> None:
    for value in exported.constants.values():
        if not isinstance(value, Tensor) or value.ndim > 0:
            raise CaptureError(
                "the update reads a tensor that is neither an option nor part of its state",
                where=f"{type(optimizer).__name__}, {name}",
                expected="0-dim constants at most",
                got=str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__,
                cure="Keep it in self.state[param].",
            )


def _with_dims(name: str, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> Iterator[UpdateGraph]:
    """The update of parameters with several dims, which a class out there may treat otherwise than a vector, and on some values only."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        yield from (_capture(name, optimizer, group, dtype, shape)[0] for shape in _FLAT_SHAPES if len(shape) > 1)


def _is_elementwise(update: UpdateGraph) -> bool:
    """Whether every operator of its graphs works element by element, as torch's tags say."""
    return _works_by_element(update.first) and _works_by_element(update.following)


def _works_by_element(exported: ExportedProgram) -> bool:
    for node in calls_in(exported.graph_module):
        if node.target in (_HOP.wrap_with_set_grad_enabled, operator.getitem):
            continue
        if not is_overload(node.target):
            if not isinstance(node.meta.get("val"), Tensor):
                continue
            return False
        if node.target in _OF_0_DIM and node.all_input_nodes[0].meta["val"].ndim == 0:
            continue
        base = _functional_form(node.target)
        if torch.Tag.pointwise not in node.target.tags and torch.Tag.pointwise not in base.tags and node.target not in _COPIES:
            return False
    return True


def _functional_form(target: Overload) -> Overload:
    """`aten.add_.Tensor` -> `aten.add.Tensor`, where there is one."""
    packet_name = target.overloadpacket.__name__.removesuffix("_")
    packet = getattr(torch.ops.aten, packet_name, target.overloadpacket)
    overload = target._overloadname
    return getattr(packet, overload) if overload in packet.overloads() else target
