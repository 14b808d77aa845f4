"""Captures an optimizer: its update as graphs, its hyperparameters and schedule as data."""

from __future__ import annotations

import copy
import math
import operator
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule

from trainload.autograd_trace.graphs import GroupRecipe, Recipe, StateSpec, UpdateGraph
from trainload.autograd_trace.operators import Overload, is_overload
from trainload.capture.errors import CaptureError, JobError
from trainload.capture.job import Job
from trainload.capture.program import Program
from trainload.capture.quiet import quiet_torch

_EXAMPLE = 64
_CHECKED_RATES = (0.1, 0.05, 0.2)
"""Learning rates that differ, so that one that was frozen into a graph shows, and are large enough for an error to show."""
_LEAST_RATE = 1e-30
"""Stands for a learning rate of 0: no parameter moves by it."""
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
    _ATEN.item.default,
    _ATEN.to.device,
    _ATEN.where.ScalarOther,
    _ATEN.where.ScalarSelf,
    _ATEN.where.Scalar,
    _ATEN._assert_tensor_metadata.default,
}
"""Operators that do not mix elements and that torch does not tag as pointwise. `item` reads 0-dim tensors only."""


def capture_optimizer(job: Job, program: Program) -> tuple[Recipe, tuple[UpdateGraph, ...]]:
    """Captures the job's optimizer and schedule.

    Raises:
        JobError: the optimizer does not fit the model or the schedule fails.
        CaptureError: the update is not a function of (param, grad, state, lr) that can be captured.
    """
    optimizer = job.optimizer(job.model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise JobError(
            "does not return an optimizer", where="Job.optimizer", expected="a torch.optim.Optimizer", got=type(optimizer).__name__
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise CaptureError("an optimizer that calls a closure has no fixed update", where="Job.optimizer", cure="Use AdamW or SGD.")
    groups = _group_parameters(job, program, optimizer)
    rates = _learning_rates(job, optimizer)
    rows = next(iter(job.batch.values())).shape[0]
    recipe = Recipe(
        optimizer=type(optimizer).__name__,
        groups=tuple(
            GroupRecipe(name=f"group{i}", parameters=tuple(names), learning_rates=tuple(rates[i]))
            for i, names in enumerate(groups)
            if names
        ),
        steps=job.steps,
        global_batch=job.global_batch or rows,
        clip_norm=job.clip_norm,
        seed=job.seed,
    )
    dtypes = {p.name: p.dtype for p in program.parameters}
    updates = []
    for i, names in enumerate(groups):
        if not names:
            continue
        kinds = {dtypes[n] for n in names}
        if len(kinds) > 1:
            raise JobError(
                "a parameter group mixes dtypes",
                where=f"Job.optimizer: group {i}",
                expected="one dtype",
                got=str(sorted(kinds)),
                cure="Make one parameter group for each dtype.",
            )
        updates.append(_capture_group(f"group{i}", optimizer, optimizer.param_groups[i], getattr(torch, kinds.pop())))
    return recipe, tuple(updates)


def _group_parameters(job: Job, program: Program, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    names = {id(p): n for n, p in reversed(list(job.model.named_parameters(remove_duplicate=False)))}
    trainable = {p.name for p in program.parameters if p.trainable and p.alias_of is None}
    groups: list[list[str]] = []
    seen: set[str] = set()
    for number, group in enumerate(optimizer.param_groups):
        found = []
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                raise JobError(
                    "holds a tensor that is no parameter of the model",
                    where=f"Job.optimizer: group {number}",
                    got=f"shape {tuple(parameter.shape)}",
                    cure="Build the optimizer from the model that the function is given.",
                )
            if name in trainable and name not in seen:
                found.append(name)
                seen.add(name)
        groups.append(sorted(found))
    left_out = sorted(trainable - seen)
    if left_out and seen:
        warnings.warn(
            f"{len(left_out)} parameters get a gradient and are not in the optimizer; they stay as they are: {', '.join(left_out)}",
            stacklevel=3,
        )
    if not seen:
        raise JobError("the optimizer trains no parameter", where="Job.optimizer", cure="Give it model.parameters().")
    return groups


def _learning_rates(job: Job, optimizer: torch.optim.Optimizer) -> list[list[float]]:
    """The learning rate of every group at every step; one entry where it never changes."""
    base = [float(g["lr"]) for g in optimizer.param_groups]
    if job.schedule is None:
        return [[b] for b in base]
    first = _call_schedule(job, 0) if not _wants_optimizer(job) else None
    if first is not None:
        factors = [_call_schedule(job, s) for s in range(job.steps)]
        return [[b * f for f in factors] for b in base]
    # A stand-in with the same options, so that schedulers which drive momentum or betas find them and are found out.
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    shadow = torch.optim.SGD([{**o, "params": [nn.Parameter(torch.zeros(1))]} for o in options], lr=0.1)
    shadow.defaults = dict(optimizer.defaults)
    try:
        return _tabulate(job, shadow, options)
    except JobError:
        raise
    except Exception as error:  # a user's scheduler may raise anything; all of it becomes one line
        raise JobError(f"the schedule fails: {type(error).__name__}: {error}", where="Job.schedule") from error


def _tabulate(job: Job, shadow: torch.optim.Optimizer, options: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    scheduler = job.schedule(shadow)  # type: ignore[misc, arg-type]  # called so after it was found to want an optimizer
    if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        raise JobError(
            "returns neither a factor nor a scheduler",
            where="Job.schedule",
            got=type(scheduler).__name__,
            expected="a float for a step, or a torch.optim.lr_scheduler for an optimizer",
        )
    rates: list[list[float]] = [[] for _ in options]
    for step in range(job.steps):
        if step:
            shadow.step()
            scheduler.step()
        for table, group, before in zip(rates, shadow.param_groups, options, strict=True):
            table.append(_finite(float(group["lr"]), step))
            driven = sorted(k for k, v in before.items() if k not in ("lr", "initial_lr") and group.get(k) != v)
            if driven:
                raise JobError(
                    f"the scheduler changes {', '.join(driven)}, and only learning rates are scheduled",
                    where=f"Job.schedule at step {step}",
                    expected="learning rates alone",
                    got=f"{driven[0]} = {group[driven[0]]}, was {before[driven[0]]}",
                    cure="Give the scheduler cycle_momentum=False.",
                )
    return rates


def _finite(rate: float, step: int) -> float:
    if not math.isfinite(rate):
        raise JobError("is not a finite number", where=f"Job.schedule at step {step}", expected="a finite learning rate", got=str(rate))
    return rate


def _wants_optimizer(job: Job) -> bool:
    """Whether the schedule is a scheduler's factory: it fails on a step's number."""
    try:
        return isinstance(job.schedule(0), torch.optim.lr_scheduler.LRScheduler)  # type: ignore[misc, arg-type]  # tried as a step's
    except Exception:  # noqa: BLE001 - what a factory raises for a number is anything; the second try tells
        return True


def _call_schedule(job: Job, step: int) -> float:
    try:
        value = job.schedule(step)  # type: ignore[misc, arg-type]  # called so after it was found to take a step
    except Exception as error:  # a user's schedule may raise anything; all of it becomes one line
        raise JobError(f"fails: {type(error).__name__}: {error}", where=f"Job.schedule at step {step}") from error
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise JobError("does not return a number", where=f"Job.schedule at step {step}", expected="a factor", got=repr(value))
    return float(value)


class _Update(nn.Module):
    """One call of an optimizer's step on one tensor."""

    def __init__(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], names: Sequence[str]) -> None:
        super().__init__()
        self._parts = (optimizer, group)
        self._names = tuple(names)

    def forward(self, param: Tensor, grad: Tensor, lr: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        param = param.clone()
        optimizer = _bound(*self._parts, param, lr)
        if self._names:
            optimizer.state[param] = {n: s.clone() for n, s in zip(self._names, state, strict=True)}
        param.grad = grad.clone()
        optimizer.step()
        entries = optimizer.state[param]
        names = sorted(n for n, v in entries.items() if isinstance(v, Tensor))
        return (param, *(entries[n] for n in names))


def _bound(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], param: Tensor, lr: Tensor | float) -> torch.optim.Optimizer:
    """The same optimizer over one tensor, on its plain path (no foreach, no fused kernels), with the learning rate as a tensor."""
    bound = copy.copy(optimizer)
    options = {**group, "params": [param], "lr": lr}
    for name in ("foreach", "fused"):
        if name in options:
            options[name] = False
    if "capturable" in options and isinstance(lr, Tensor):
        options["capturable"] = True
        # That path divides by the learning rate: at 0 (the first step of a warmup) a gradient of 0 would give NaN.
        options["lr"] = torch.where(lr == 0, _LEAST_RATE, lr)
    bound.param_groups = [options]
    bound.state = defaultdict(dict)
    return bound


def _capture_group(name: str, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> UpdateGraph:
    generator = torch.Generator().manual_seed(0)
    param = torch.randn(_EXAMPLE, generator=generator).to(dtype)
    grad = torch.randn(_EXAMPLE, generator=generator).to(dtype)
    rate = torch.tensor(float(group["lr"]))
    names = _state_names(optimizer, group, param, grad)
    first = _export(name, _Update(optimizer, group, ()), (param, grad, rate, ()))
    _, *state = first.module()(param, grad, rate, ())
    if len(state) != len(names):
        raise CaptureError(
            "the optimizer's state has other entries after the first step than after the second",
            where=f"{type(optimizer).__name__}, {name}",
            expected=f"{len(names)} entries",
            got=f"{len(state)}",
            cure="Make all of the state in the first step.",
        )
    following = _export(name, _Update(optimizer, group, names), (param, grad, rate, tuple(state)))
    specs = tuple(
        StateSpec(name=n, dtype=str(s.dtype).removeprefix("torch."), like_parameter=s.ndim > 0) for n, s in zip(names, state, strict=True)
    )
    for spec, value in zip(specs, state, strict=True):
        if value.ndim > 0 and value.shape != param.shape:
            raise CaptureError(
                "an optimizer state of this shape is not supported",
                where=f"{type(optimizer).__name__} state {spec.name!r}",
                expected="the parameter's shape or 0 dims",
                got=str(tuple(value.shape)),
            )
    update = UpdateGraph(name, first, following, specs, _is_elementwise(first) and _is_elementwise(following))
    for shape in ((_EXAMPLE + 1,), (5, 13)):
        _check(update, optimizer, group, dtype, shape)
    return update


def _state_names(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], param: Tensor, grad: Tensor) -> list[str]:
    """Names of the tensors in the optimizer's state; a state of another kind that changes cannot be captured."""
    tensor = param.clone()
    bound = _bound(optimizer, group, tensor, float(group["lr"]))
    others = []
    for _ in range(2):
        tensor.grad = grad.clone()
        try:
            bound.step()
        except Exception as error:  # an optimizer's own code may raise anything; all of it becomes one line
            raise CaptureError(
                f"the optimizer cannot update a flat parameter: {type(error).__name__}: {error}",
                where=f"Job.optimizer: {type(optimizer).__name__}",
                expected="an update of tensors of any shape, without a closure",
                cure="Use an optimizer such as AdamW or SGD for these parameters.",
            ) from error
        others.append({n: v for n, v in bound.state[tensor].items() if not isinstance(v, Tensor)})
    if others[0] != others[1]:
        raise CaptureError(
            "the optimizer counts in Python numbers, which a graph would freeze",
            where=type(optimizer).__name__,
            expected="tensors in its state",
            got=str(sorted(others[0])),
            cure="Keep the count as a 0-dim tensor in self.state[param].",
        )
    return sorted(n for n, v in bound.state[tensor].items() if isinstance(v, Tensor))


def _export(name: str, update: _Update, args: tuple[Any, ...]) -> ExportedProgram:
    length = Dim("length", min=1)
    shapes = ({0: length}, {0: length}, None, tuple({0: length} if s.ndim else None for s in args[3]))
    try:
        with quiet_torch(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return torch.export.export(update, args, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # an optimizer's own code may raise anything; all of it becomes one line
        raise CaptureError(
            f"the update of {type(update._parts[0]).__name__} cannot be captured: {str(error).strip().splitlines()[0]}",
            where=f"Job.optimizer: {name}",
            cure="Its step must be tensor operators on the parameter, the gradient and the state, without Python branches on their values.",
        ) from error


def _is_elementwise(exported: ExportedProgram) -> bool:
    """Whether every operator of the graph works element by element, as torch's tags say, and its constants are 0-dim."""
    if not all(isinstance(c, Tensor) and c.ndim == 0 for c in exported.constants.values()):
        return False
    for module in exported.graph_module.modules():
        if not isinstance(module, GraphModule):
            continue
        for node in module.graph.nodes:
            if node.op != "call_function" or node.target in (_HOP.wrap_with_set_grad_enabled, operator.getitem):
                continue
            if not is_overload(node.target):
                if not isinstance(node.meta.get("val"), Tensor):
                    continue
                return False
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


def _check(
    update: UpdateGraph, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Replays a few steps through the real optimizer on a parameter of `shape` and through the graphs, flat, whole and in two parts."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(shape, generator=generator).to(dtype)
    gradients = [torch.randn(shape, generator=generator).to(dtype) for _ in _CHECKED_RATES]
    real = start.clone()
    bound = _bound(optimizer, group, real, _CHECKED_RATES[0])
    for gradient, rate in zip(gradients, _CHECKED_RATES, strict=True):
        bound.param_groups[0]["lr"] = rate
        real.grad = gradient.clone()
        bound.step()
    flat = [g.flatten() for g in gradients]
    whole = _run(update, start.flatten(), flat)
    tolerance = 8 * torch.finfo(dtype).eps if dtype.itemsize < 4 else 5e-6
    if not torch.allclose(whole.view(shape), real, rtol=tolerance, atol=tolerance):
        raise CaptureError(
            f"the captured update differs from the optimizer's own on a parameter of shape {shape}",
            where=f"{type(optimizer).__name__}, {update.group}",
            expected=f"at most {tolerance:g}",
            got=f"{float((whole.view(shape) - real).abs().max()):.2g} after {len(_CHECKED_RATES)} steps",
            cure="The optimizer keeps something outside self.state[param], such as an attribute that step() changes, or its update "
            "depends on the parameter's shape.",
        )
    if update.elementwise:
        cut = 17
        parts = torch.cat([_run(update, start.flatten()[s], [g[s] for g in flat]) for s in (slice(0, cut), slice(cut, None))])
        assert torch.allclose(parts, whole, rtol=tolerance, atol=tolerance), f"{update.group}: elementwise by its operators only"


def _run(update: UpdateGraph, start: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    rates = [torch.tensor(rate) for rate in _CHECKED_RATES]
    param, *state = update.first.module()(start, gradients[0], rates[0], ())
    following = update.following.module()
    for gradient, rate in zip(gradients[1:], rates[1:], strict=True):
        param, *state = following(param, gradient, rate, tuple(state))
    result: Tensor = param
    return result
