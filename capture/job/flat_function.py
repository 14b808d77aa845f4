"""A job's loss and predict functions as modules for torch.export.

They take a flat batch and return one flat tuple of tensors.

The user's functions receive the batch nested like `Job.batch`, with its constants.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainload.capture.job.definition import Loss, LossFunction
from trainload.capture.job.definition import PredictFunction as TensorsOf
from trainload.capture.job.inputs import leaves_of, rebuild
from trainload.capture.program import OutputRole, OutputSpec
from trainload.core.errors import JobError


class Signature:
    """The outputs of the last call of a traced function.

    It is not an attribute of the module itself, since torch.export restores those after tracing.
    """

    def __init__(self) -> None:
        self.outputs: tuple[OutputSpec, ...] = ()


Around = Callable[[Mapping[str, Tensor]], AbstractContextManager[None]]
"""Returns the context in which a function is traced, for the leaves of its batch."""


def nothing_around(_: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """Return a context that does nothing."""
    return nullcontext()


class Traced(nn.Module):
    """A function of a job's model as a module: {leaf name: tensor} -> flat tuple of tensors.

    Attributes:
        inputs: names of its leaves, sorted.
        signature: outputs of its last call.
        watched: returns the context in which forward runs, for the leaves; set by a trace.
        differentiates: True if it computes gradients itself, so that evaluation needs grad mode
            too.
        runs: True if it can run in eager mode, which needs values.
    """

    def __init__(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.inputs = tuple(leaves_of(batch))
        # in a tuple, so that torch.export does not look for its tensors here
        self._batch = (batch,)
        self.signature = Signature()
        self.watched: Around = nothing_around
        self.differentiates = False
        self.runs = True

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        (example,) = self._batch
        with self.watched(batch), torch.enable_grad() if self.differentiates else nullcontext():
            return self.run(rebuild(example, batch))

    def run(self, batch: dict[str, Any]) -> tuple[Tensor, ...]:
        """Run the traced function; `batch` is nested like the example."""
        raise NotImplementedError

    def functions(self) -> tuple[Callable[..., Any], ...]:
        """Return the user's functions that are traced."""
        raise NotImplementedError

    def _record_outputs(self, outputs: tuple[OutputSpec, ...]) -> None:
        """Record the signature.

        Strict mode must not see the assignment, which it would treat as a side effect of the model.
        """
        if not torch.compiler.is_dynamo_compiling():
            self.signature.outputs = outputs


class StepFunction(Traced):
    """A loss as a module; `signature` describes its outputs after a call.

    Args:
        model: the job's model.
        batch: an example batch, nested.
        loss: like `Job.loss`.
        where: its place in the job, for errors.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Mapping[str, Any],
        loss: LossFunction | None,
        where: str = "Job.loss",
    ) -> None:
        super().__init__(model, batch)
        # In a tuple, so that a loss that is a module is not registered as a submodule.
        self._loss = (None if loss is None else _traced_as_forward(loss),)
        self._where = where
        _check_stateless(loss, where)

    def run(self, batch: dict[str, Any]) -> tuple[Tensor, ...]:
        (function,) = self._loss
        result = self.model(**batch) if function is None else function(self.model, batch)
        loss = result if isinstance(result, Loss) else Loss(result)
        value: Any = loss.value  # a user's function may return anything
        if not isinstance(value, Tensor) or value.ndim != 0 or not value.is_floating_point():
            raise JobError(
                "the loss is not a scalar",
                where=self._where,
                expected="a 0-dim floating-point tensor, or trainload.Loss with one",
                got=_describe(value),
                hint="Reduce it with .mean(), or use a loss function that returns the scalar.",
            )
        outputs = [OutputSpec("loss", OutputRole.LOSS)]
        values: list[Any] = [value]
        if loss.weight is not None:
            outputs.append(OutputSpec("weight", OutputRole.WEIGHT))
            values.append(loss.weight)
        _check_names(loss.metrics, f"{self._where}: metrics")
        if taken := sorted(each.name for each in outputs if each.name in loss.metrics):
            raise JobError(
                f"a metric has the name of the {taken[0]} itself",
                where=f"{self._where}: metrics",
                expected="another name",
                got=repr(taken[0]),
                hint="Rename the metric.",
            )
        _check_names(loss.outputs, f"{self._where}: outputs")
        for name in sorted(loss.metrics):
            outputs.append(OutputSpec(name, OutputRole.METRIC))
            values.append(loss.metrics[name])
        for spec, entry in zip(outputs, values, strict=True):
            if not isinstance(entry, Tensor) or entry.ndim != 0 or entry.is_complex():
                raise JobError(
                    "not a 0-dim tensor",
                    where=f"{self._where}: {spec.role} {spec.name!r}",
                    expected="a 0-dim tensor",
                    got=_describe(entry),
                )
        for name in sorted(loss.outputs):
            outputs.append(OutputSpec(name, OutputRole.OUTPUT))
            values.append(_detach(loss.outputs[name], f"{self._where}: output {name!r}"))
        self._record_outputs(tuple(outputs))
        return tuple(values)

    def functions(self) -> tuple[Callable[..., Any], ...]:
        return tuple(function for function in self._loss if function is not None)


class TensorsFunction(Traced):
    """A function that returns tensors by name (`Job.predict`, `Graph.compute`) as a module.

    `signature` names its outputs after a call.

    Args:
        model: the job's model.
        batch: the entries of an example that it reads, nested.
        function: like `Job.predict`.
        role: role of its outputs.
        where: its place in the job, for errors.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Mapping[str, Any],
        function: TensorsOf,
        role: OutputRole,
        where: str,
    ) -> None:
        super().__init__(model, batch)
        self._function = (_traced_as_forward(function),)
        self._role = role
        self._where = where
        _check_stateless(function, where)

    def run(self, batch: dict[str, Any]) -> tuple[Tensor, ...]:
        (function,) = self._function
        result = function(self.model, batch)
        tensors: dict[str, Any] = (
            dict(result) if isinstance(result, Mapping) else {self._role.value: result}
        )
        for name, value in tensors.items():
            if not isinstance(value, Tensor):
                raise JobError(
                    f"its {name!r} is not a tensor",
                    where=self._where,
                    expected="a tensor, or a flat mapping of names to tensors",
                    got=type(value).__name__,
                )
        _check_names(tensors, self._where)
        names = sorted(tensors)
        self._record_outputs(tuple(OutputSpec(name, self._role) for name in names))
        return tuple(tensors[name] for name in names)

    def functions(self) -> tuple[Callable[..., Any], ...]:
        return self._function


def _traced_as_forward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function renamed to forward.

    torch.export keeps only stack frames of that name, and nodes would have no line in the loss
    otherwise.
    """
    if not isinstance(function, types.FunctionType):
        return function
    renamed = types.FunctionType(
        function.__code__.replace(co_name="forward"),
        function.__globals__,
        "forward",
        function.__defaults__,
        function.__closure__,
    )
    renamed.__kwdefaults__ = function.__kwdefaults__
    return renamed


def _check_names(values: Mapping[Any, Any], where: str) -> None:
    """Check that the names of metrics and outputs are non-empty printable strings."""
    for name in values:
        if not isinstance(name, str) or not name or not name.isprintable():
            raise JobError(
                "invalid name",
                where=where,
                expected="a string of printable characters",
                got=repr(name),
            )


def _detach(value: Any, where: str) -> Tensor:
    if not isinstance(value, Tensor) or value.ndim == 0:
        raise JobError(
            "not a tensor with one row per row of the batch", where=where, got=_describe(value)
        )
    return value.detach()


def _describe(value: object) -> str:
    return (
        f"shape {tuple(value.shape)}, {value.dtype}"
        if isinstance(value, Tensor)
        else type(value).__name__
    )


def _check_stateless(function: object, where: str) -> None:
    if isinstance(function, nn.Module) and (
        any(True for _ in function.parameters()) or any(True for _ in function.buffers())
    ):
        raise JobError(
            "the function has its own parameters or buffers, which would be lost",
            where=where,
            expected="a function of the model and the batch",
            got=f"a {type(function).__name__} with state",
            hint="Make it a submodule of Job.model, and call it there: model.criterion(...).",
        )
