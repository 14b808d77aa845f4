"""A model's parameters and buffers: specs, checks, and restoring them after a replay."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from trainload.capture.job.names import check_names
from trainload.capture.job.shared_memory import check_sharing
from trainload.capture.job.stored_tensors import StoredTensors
from trainload.capture.job.tensor_classes import check_tensors, fake_attributes
from trainload.capture.program import BufferSpec, ParameterSpec
from trainload.capture.source.source_place import place_of_error
from trainload.core.errors import CaptureError, JobError, raised


def check_model(model: object) -> nn.Module:
    """Return the model if its parameters and buffers can be stored.

    They must be ordinary tensors with values, no two of which share memory.

    Raises:
        JobError: if it is not a module, has a name that a package cannot hold, or was made in
            inference mode.
        CaptureError: if it is scripted or wrapped for distribution, holds tensors without values
            (meta, fake, lazy), of a class with behaviour of its own or parameters that are not
            floating point, or if two parameters are different objects on one memory.
    """
    if not isinstance(model, nn.Module):
        raise JobError(
            "the model is not a module",
            where="Job.model",
            expected="a torch.nn.Module",
            got=type(model).__name__,
        )
    _check_no_modules(
        model,
        (torch.jit.ScriptModule,),
        "a scripted module, which torch.export cannot capture",
        expected="an ordinary torch.nn.Module",
        hint="Pass the original module instead of the scripted or traced one.",
    )
    _check_no_modules(
        model,
        _wrappers(),
        "a wrapper that distributes the model over ranks, which the plan of a launch decides",
        expected="the wrapped module",
        hint="Pass model.module.",
    )
    check_names(model)
    check_tensors(("parameter", name, parameter) for name, parameter in model.named_parameters())
    _check_floating(model)
    _check_not_inference(model)
    check_tensors(("buffer", name, buffer) for name, buffer in model.named_buffers())
    check_tensors(fake_attributes(model))
    check_sharing(model)
    return model


def _check_no_modules(
    model: nn.Module, kinds: tuple[type, ...], problem: str, expected: str, hint: str
) -> None:
    """Raise CaptureError if one of the model's modules is of one of these classes."""
    for path, module in model.named_modules():
        if isinstance(module, kinds):
            where = f"Job.model: {path}" if path else "Job.model"
            raise CaptureError(
                problem, where=where, expected=expected, got=type(module).__name__, hint=hint
            )


def _wrappers() -> tuple[type, ...]:
    """Return the classes that distribute a module over ranks.

    FSDP's is looked up only if it has been imported, since the import takes 0.8 s.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    own = () if fsdp is None else (fsdp.FullyShardedDataParallel,)
    return (nn.parallel.DistributedDataParallel, nn.DataParallel, *own)


def _check_not_inference(model: nn.Module) -> None:
    """Check that no parameter or buffer was made in inference mode.

    Such a tensor cannot be written to outside of it.
    """
    for kind, tensors in (
        ("parameter", model.named_parameters()),
        ("buffer", model.named_buffers()),
    ):
        for name, tensor in tensors:
            if tensor.is_inference():
                raise JobError(
                    f"the {kind} was created in inference mode, so it cannot be changed in"
                    " training",
                    where=f"Job.model: {name}",
                    expected="a model built outside of torch.inference_mode()",
                    hint="Build the model outside of inference mode, or pass copy.deepcopy(model).",
                )


def _check_floating(model: nn.Module) -> None:
    """Check that all parameters are floating point.

    Ranks store them, frozen ones too, in floating-point buckets.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            owner, _, own = name.rpartition(".")
            raise CaptureError(
                "the parameter does not have a floating-point dtype",
                where=f"Job.model: {name}",
                expected="float32, bfloat16, float16 or float64",
                got=str(parameter.dtype).removeprefix("torch."),
                hint=(
                    "It cannot be trained, so register it as a buffer:"
                    f" {owner or 'self'}.register_buffer({own!r}, value)."
                ),
            )


def parameter_specs(model: nn.Module, without_gradient: set[str]) -> tuple[ParameterSpec, ...]:
    """Return the specs of the model's parameters; the first name of a tied parameter owns it.

    without_gradient: owners that the loss does not reach.
    """
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
    """Return the specs of the model's buffers, persistent or not."""
    persistent = model.state_dict().keys()
    return tuple(
        BufferSpec(
            name, str(value.dtype).removeprefix("torch."), tuple(value.shape), name in persistent
        )
        for name, value in model.named_buffers(remove_duplicate=False)
    )


def state_of(
    model: nn.Module, parameters: tuple[ParameterSpec, ...], buffers: tuple[BufferSpec, ...]
) -> dict[str, Tensor]:
    """Return the tensors of `Program.state`, contiguous.

    Tensors that are contiguous and on a CPU share the model's memory and are not copied.
    """
    by_name: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )
    names = [p.name for p in parameters if p.alias_of is None] + [b.name for b in buffers]
    return {name: by_name[name].detach().as_subclass(Tensor).cpu().contiguous() for name in names}


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[Callable[[bool], None]]:
    """Restore every module's train or eval mode, and every parameter's `requires_grad`, on exit.

    Yields:
        A function that sets the model to train mode (True) or eval mode (False) like
        `model.train(mode)`. In train mode, a module that the user had set to eval mode within a
        model in train mode (a frozen normalization, a teacher) stays in eval mode.

    Raises:
        CaptureError: raised by the yielded function if an overridden `train()` also changes values
            of the model.
    """
    before = [(module, module.training) for module in model.modules()]
    required = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    kept_in_eval = [module for module, training in before if not training] if model.training else []
    overridden = next(
        (module for module, _ in before if type(module).train is not nn.Module.train), None
    )

    def set_training(training: bool) -> None:
        with nullcontext() if overridden is None else _values_unchanged(model, overridden):
            try:
                model.train(training)
            except Exception as error:  # train() may be the user's own method
                raise CaptureError(
                    f"the model cannot be put into {'train' if training else 'eval'} mode:"
                    f" {raised(error)}",
                    where=str(place_of_error(error) or "Job.model"),
                    hint=(
                        "Pass the original module instead of the exported one."
                        if isinstance(model, GraphModule)
                        else ""
                    ),
                ) from error
        if training:
            for module in kept_in_eval:
                module.training = False

    try:
        yield set_training
    finally:
        for module, training in before:
            module.training = training
        for parameter, requires in required:
            parameter.requires_grad_(requires)


@contextmanager
def _values_unchanged(model: nn.Module, overridden: nn.Module) -> Iterator[None]:
    """Raise CaptureError if the model's values change inside the block, and restore them.

    overridden: a module with a `train()` of its own.
    """
    tensors = (*model.named_parameters(), *model.named_buffers())
    # The sparse file of an abstract model's tensors (hollow.py) must not be read.
    values = {n: value for n, value in tensors if value.untyped_storage().filename is None}
    before = StoredTensors()
    before.update(values)
    yield
    changed = [name for name, value in values.items() if not before.is_equal(name, value)]
    if changed:
        with torch.no_grad():
            for name in changed:
                before.restore(name, values[name])
        raise CaptureError(
            f"{type(overridden).__name__}.train() changes values of the model:"
            f" {', '.join(changed[:4])}",
            where=f"Job.model: {changed[0]}",
            expected="train() and eval() that only set the mode, since a run calls neither",
            got="different values after a change of mode",
            hint="Merge or change the weights elsewhere (for LoRA layers: merge_weights=False).",
        )


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Restore buffers, gradients and random generators on exit.

    Buffers are restored as objects and in value; what was registered inside is removed.
    """
    saved_buffers = [
        (module, name, value, value.detach().clone())
        for module in model.modules()
        # the registry itself: a buffer that forward reassigns is another object
        for name, value in module._buffers.items()
        if value is not None
    ]
    registered = [
        (registry, set(registry))
        for module in model.modules()
        for registry in (module._buffers, module._parameters)
    ]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    with torch.random.fork_rng():
        try:
            yield
        finally:
            for registry, names in registered:
                for name in set(registry) - names:
                    del registry[name]
            with torch.no_grad():
                for module, name, value, before in saved_buffers:
                    if value.requires_grad:
                        value.detach_()
                    value.copy_(before)
                    module._buffers[name] = value
            for parameter, gradient in gradients:
                parameter.grad = gradient
