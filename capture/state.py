"""A model's parameters and buffers: what they are, whether they can be stored, and putting them back after a replay."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainload.capture.errors import CaptureError, JobError
from trainload.capture.program import BufferSpec, ParameterSpec
from trainload.capture.tensor_classes import check_tensors, fake_attributes


def check_model(model: object) -> nn.Module:
    """The model, if its parameters and buffers can be stored: ordinary tensors with values, no two of which share memory.

    Raises:
        JobError: it is no module.
        CaptureError: it is scripted, or holds tensors without values (meta, fake, lazy) or of a class with behaviour; or two parameters
            are different objects on one memory.
    """
    if not isinstance(model, nn.Module):
        raise JobError("not a module", where="Job.model", expected="a torch.nn.Module", got=type(model).__name__)
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                "a scripted module, which torch.export does not follow",
                where=f"Job.model: {path}" if path else "Job.model",
                expected="a module of Python",
                got=type(module).__name__,
                cure="Give the module that was scripted or traced: torch.jit has no use here.",
            )
    check_tensors(("parameter", name, parameter) for name, parameter in model.named_parameters())
    check_tensors(("buffer", name, buffer) for name, buffer in model.named_buffers())
    check_tensors(fake_attributes(model))
    _check_memory([(name, p.detach()) for name, p in model.named_parameters() if p.numel()])
    return model


def _check_memory(named: list[tuple[str, Tensor]]) -> None:
    spans = []
    for name, tensor in named:
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        spans.append((str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + extent * tensor.element_size(), name))
    spans.sort()
    for (device, _, end, name), (other_device, start, _, other) in itertools.pairwise(spans):
        if device == other_device and start < end:
            raise CaptureError(
                f"the parameters {name} and {other} are two objects on one memory, which training apart would untie",
                where=f"Job.model: {other}",
                expected="one nn.Parameter under both names, or memory of their own",
                got="shared memory",
                cure=f"Tie them by assignment, as in module.{other.rpartition('.')[2]} = other.{name.rpartition('.')[2]}.",
            )


def parameter_specs(model: nn.Module, without_gradient: set[str]) -> tuple[ParameterSpec, ...]:
    """The model's parameters; the first name of a tied one owns it. `without_gradient`: owners that the loss does not reach."""
    owners: dict[int, str] = {}
    specs = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = owners.setdefault(id(parameter), name)
        specs.append(
            ParameterSpec(
                name=name,
                dtype=str(parameter.dtype).removeprefix("torch."),
                shape=tuple(parameter.shape),
                trainable=parameter.requires_grad and owner not in without_gradient,
                alias_of=None if owner == name else owner,
            )
        )
    return tuple(specs)


def buffer_specs(model: nn.Module) -> tuple[BufferSpec, ...]:
    """The model's buffers, persistent or not."""
    persistent = model.state_dict().keys()
    return tuple(
        BufferSpec(name, str(value.dtype).removeprefix("torch."), tuple(value.shape), name in persistent)
        for name, value in model.named_buffers(remove_duplicate=False)
    )


def state_of(model: nn.Module, parameters: tuple[ParameterSpec, ...], buffers: tuple[BufferSpec, ...]) -> dict[str, Tensor]:
    """The tensors of `Program.state`, contiguous. On a CPU they are the model's own memory where that is contiguous, not copies."""
    by_name: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    names = [p.name for p in parameters if p.alias_of is None] + [b.name for b in buffers]
    return {name: by_name[name].detach().as_subclass(Tensor).cpu().contiguous() for name in names}


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Puts every module's train or eval mode back: they may differ within a model."""
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Puts back buffers (the objects and their values), gradients and the random generators; what was registered meanwhile is removed."""
    held = [
        (module, name, value, value.detach().clone())
        for module in model.modules()
        for name, value in module._buffers.items()  # the registry itself: a buffer that forward assigned anew is another object
        if value is not None
    ]
    registered = [(registry, set(registry)) for module in model.modules() for registry in (module._buffers, module._parameters)]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    with torch.random.fork_rng():
        try:
            yield
        finally:
            for registry, names in registered:
                for name in set(registry) - names:
                    del registry[name]
            with torch.no_grad():
                for module, name, value, before in held:
                    if value.requires_grad:
                        value.detach_()
                    value.copy_(before)
                    module._buffers[name] = value
            for parameter, gradient in gradients:
                parameter.grad = gradient


def numbers_of(model: nn.Module) -> dict[str, float | str]:
    """module.attribute -> value, for the Python numbers and strings that modules hold."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, int | float | str)
    }
