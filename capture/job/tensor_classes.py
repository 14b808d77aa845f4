"""Rejects tensors that differ from plain dense tensors.

These are subclasses with behaviour, other layouts, and tensors without values.

A subclass without behaviour of its own (it overrides nothing of `torch.Tensor`) computes what a
tensor computes, and is captured as one. Any other class decides in Python what its operators do. In
a trace every parameter and input is a fake tensor, whatever its class was, and cannot be converted
to another class (`as_subclass` raises). The graph would lack what the class does, or have it over
tensors that are not parameters of the model. Such a tensor is rejected by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainload.capture.source.causes import NO_VALUES, TENSOR_CLASS, Cause
from trainload.core.errors import CaptureError
from trainload.core.finding import Finding, Place

_HARMLESS = frozenset(
    {
        "__init__",
        "__new__",
        "__repr__",
        "__str__",
        "__doc__",
        "__module__",
        "__dict__",
        "__weakref__",
        "__slots__",
    }
) | {
    "__deepcopy__",
    "__reduce__",
    "__reduce_ex__",
    "__setstate__",
    "__init_subclass__",
}
"""Attributes that a class may override without changing what is computed."""
_TRACING_MODULES = ("torch._subclasses", "torch._functorch", "torch._C", "torch._higher_order_ops")
"""Modules of the classes that torch uses while tracing."""
_METADATA_FUNCTIONS = frozenset(
    {
        "__get__",
        "size",
        "dim",
        "stride",
        "numel",
        "is_floating_point",
        "is_complex",
        "__len__",
        "__repr__",
        "ndimension",
    }
)
"""Functions of torch that do not read values."""


@dataclass(frozen=True, slots=True)
class _Special:
    """The reason why a tensor cannot be captured, and code that replaces it.

    `code` takes the expression by which the user reaches the tensor, and what it is ("parameter",
    "input", ...).
    """

    cause: Cause
    sentence: str
    advice: str
    code: Callable[[str, str], str]


def behaviour_of(cls: type) -> tuple[str, ...]:
    """Return the attributes of `torch.Tensor` that a subclass overrides, sorted.

    () for a class that computes what a tensor computes.
    """
    overridable = set(dir(Tensor)) - _HARMLESS
    bases = [
        base
        for base in cls.__mro__
        if issubclass(base, Tensor) and base not in (Tensor, nn.Parameter, nn.Buffer)
    ]
    return tuple(sorted({name for base in bases for name in vars(base)} & overridable))


def has_values(tensor: Tensor) -> bool:
    """Return True if a tensor is neither on the meta device nor fake."""
    return tensor.device.type != "meta" and not is_fake(tensor)


def class_name(tensor: Tensor) -> str:
    """Return the qualified name of a tensor's class, as a user would import it."""
    return f"{type(tensor).__module__}.{type(tensor).__qualname__}"


def check_tensors(entries: Iterable[tuple[str, str, Tensor]]) -> None:
    """Check that a package can hold some tensors.

    Args:
        entries: (kind: "parameter", "buffer" or "input"; name; tensor).

    Raises:
        CaptureError: if it cannot hold some of them; lists all of these, with their classes.
    """
    unsupported = [
        (entry, special) for entry in entries if (special := _find_special(entry[2])) is not None
    ]
    if unsupported:
        (what, _, tensor), _ = unsupported[0]
        raise _error(
            [_make_finding(*entry, special) for entry, special in unsupported],
            tensor,
            "Job.batch" if what == "input" else "Job.model",
        )


def fake_attributes(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Yield fake tensors that modules hold as plain attributes, as entries for `check_tensors`."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if is_fake(value):
                yield "constant", f"{path}.{name}" if path else name, value


def check_traceable_arguments(
    function: Any, arguments: Iterable[Any], model: nn.Module, place: Callable[[], Place | None]
) -> None:
    """Check that a trace can follow the arguments of a torch function that forward calls.

    Args:
        function: the called function.
        arguments: positional and keyword arguments.
        model: its attributes give an argument its name.
        place: returns the current line of the user's code.

    Raises:
        CaptureError: if one is a tensor of another class or layout than that of `torch.Tensor`.
    """
    if getattr(function, "__name__", "") in _METADATA_FUNCTIONS:
        return
    for argument in arguments:
        for value in argument if isinstance(argument, list | tuple) else (argument,):
            if not isinstance(value, Tensor) or type(value).__module__.startswith(_TRACING_MODULES):
                continue
            plain = type(value) in (Tensor, nn.Parameter)
            special = (
                _find_special(value)
                if not plain or value.layout is not torch.strided or value.is_quantized
                else None
            )
            if special is None and plain:
                continue
            name = next(iter(_attributes(model, value)), "")
            what = "constant" if name else "tensor"
            finding = _make_finding(what, name or "x", value, special or _OTHER_CLASS, place())
            raise _error([finding], value, str(finding.place or "Job.model"))


def _error(findings: list[Finding], tensor: Tensor, where: str) -> CaptureError:
    expected = "torch.Tensor or torch.nn.Parameter, dense, with values"
    first = findings[0]
    return CaptureError(
        first.sentence,
        where=where,
        expected=expected,
        got=_describe(tensor),
        hint=first.advice,
        findings=findings,
    )


def _make_finding(
    what: str, name: str, tensor: Tensor, special: _Special, place: Place | None = None
) -> Finding:
    reached = {"input": f'batch["{name}"]', "tensor": "x"}.get(what, f"model.{name}")
    called = "a tensor that forward creates" if what == "tensor" else f"the {what} {name}"
    sentence = f"{called} ({class_name(tensor)}) {special.sentence}"
    return Finding(
        special.cause.anchor, sentence, special.advice, special.code(reached, what), place
    )


def _describe(tensor: Tensor) -> str:
    layout = "" if tensor.layout is torch.strided else f", {tensor.layout}"
    return f"{class_name(tensor)}{layout}, on {tensor.device}"


def _attributes(model: nn.Module, tensor: Tensor) -> Iterator[str]:
    """Yield the names by which modules hold a tensor that is neither a parameter nor a buffer."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if value is tensor:
                yield f"{path}.{name}" if path else name


def is_fake(value: object) -> bool:
    """Return True if the value is a tensor of a trace, which has no values."""
    return isinstance(value, Tensor) and type(value).__name__ == "FakeTensor"


def _find_special(tensor: Tensor) -> _Special | None:
    """Return the reason why a tensor cannot be captured, or None.

    The class is checked first: an attribute of the tensor may run code of its class.
    """
    cls = type(tensor)
    if issubclass(cls, nn.UninitializedParameter | nn.UninitializedBuffer):
        return _UNINITIALISED
    if is_fake(tensor):
        return _FAKE
    if cls.__module__.startswith("torch.nested."):
        return _NESTED
    if hasattr(cls, "full_tensor") and hasattr(cls, "redistribute"):
        return _DISTRIBUTED
    if cls.__module__.startswith("torch.masked."):
        return _MASKED
    overridden = behaviour_of(cls)
    if hasattr(cls, "__tensor_flatten__"):
        return _wrapper(tensor)
    if "__torch_dispatch__" in overridden:
        return _Special(
            TENSOR_CLASS,
            "decides in Python what torch's operators do (__torch_dispatch__)",
            _PLAIN_ADVICE,
            _plain_code,
        )
    if overridden:
        listed = ", ".join(overridden[:3]) + (
            f" and {len(overridden) - 3} more" if len(overridden) > 3 else ""
        )
        return _Special(
            TENSOR_CLASS,
            f"overrides the behaviour of torch.Tensor ({listed}), which a trace loses",
            _PLAIN_ADVICE,
            _plain_code,
        )
    if tensor.is_nested:
        return _NESTED
    if tensor.layout is not torch.strided:
        return _SPARSE
    if tensor.is_quantized:
        return _QUANTISED
    return _META if tensor.device.type == "meta" else None


def _wrapper(tensor: Any) -> _Special:
    inner: Mapping[str, Tensor] = {
        name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]
    }
    return _Special(
        TENSOR_CLASS,
        f"wraps other tensors ({', '.join(inner)}) and computes with them in Python",
        "Register the wrapped tensors as parameters (if trained) or buffers, and implement the"
        " class's behaviour with plain operators.",
        partial(_inner_code, inner),
    )


def _replacement_code(reached: str, what: str, value: str) -> str:
    """Return the statement that replaces a tensor by a plain one."""
    if what == "parameter":
        return f"{reached} = nn.Parameter({value}.detach())"
    return f"{reached} = {value}"


_PLAIN_ADVICE = (
    "Use an ordinary tensor, and implement the class's behaviour in a function or a module that"
    " forward calls."
)


def _plain_code(reached: str, what: str) -> str:
    plain = _replacement_code(reached, what, f"{reached}.as_subclass(torch.Tensor)")
    return f"{plain}\n# and in forward, what the class did: y = scaled(F.linear(x, weight))"


def _inner_code(inner: Mapping[str, Tensor], reached: str, what: str) -> str:
    if what == "tensor":
        return f"y = ...  # of the ordinary tensors {', '.join(inner)}, with torch's operators"
    owner, _, last = reached.rpartition(".")
    if what == "input":
        key = reached[7:-2]
        entries = ", ".join(f'"{key}_{name}": {key}.{name}' for name in inner)
        return f"Job(batch={{{entries}}}, ...)"
    lines = [
        f"wrapped = {reached}",
        *([f"del {reached}"] if what in ("parameter", "buffer") else []),
    ]
    for name, value in inner.items():
        if what == "parameter" and value.is_floating_point():
            lines.append(f"{owner}.{last}_{name} = nn.Parameter(wrapped.{name}.detach())")
        else:
            lines.append(f'{owner}.register_buffer("{last}_{name}", wrapped.{name})')
    return "\n".join(
        [
            *lines,
            (
                "# and in forward: weight = ...  # of"
                f" {', '.join(f'self.{last}_{name}' for name in inner)}"
            ),
        ]
    )


def _attribute_code(name: str, template: str) -> Callable[[str, str], str]:
    def code(reached: str, what: str) -> str:
        if what == "input":
            key = reached[7:-2]
            return f"Job(batch={{{template.format(key=key, x=name)}}}, ...)"
        return _replacement_code(reached, what, f"{reached}.{name}")

    return code


_OTHER_CLASS = _Special(
    TENSOR_CLASS,
    "is not a plain torch.Tensor, and a trace cannot turn other classes into constants",
    _PLAIN_ADVICE,
    _plain_code,
)
_NESTED = _Special(
    TENSOR_CLASS,
    "holds rows of different lengths (a nested tensor)",
    "Pad it to one dense tensor, and pass the lengths or a mask beside it.",
    lambda reached, what: (
        f'Job(batch={{"{reached[7:-2]}": torch.nested.to_padded_tensor(rows, 0.0), "lengths":'
        " lengths}, ...)"
        if what == "input"
        else f"{reached} = torch.nested.to_padded_tensor({reached}, 0.0)"
    ),
)
_DISTRIBUTED = _Special(
    TENSOR_CLASS,
    "is already distributed over a device mesh (DTensor)",
    "Freeze the model before it is sharded: the plan decides how it is sharded.",
    lambda reached, what: _replacement_code(reached, what, f"{reached}.full_tensor()"),
)
_SPARSE = _Special(
    TENSOR_CLASS,
    "is not dense",
    "Make it dense, or pass its indices and values as separate tensors and compute with"
    " index_select, index_add or scatter.",
    _attribute_code("to_dense()", '"{key}": {key}.{x}'),
)
_QUANTISED = _Special(
    TENSOR_CLASS,
    "is a quantised tensor, which has no gradient",
    "Train in floating point; fake quantisation (torch.fake_quantize_per_tensor_affine) trains for"
    " quantised inference.",
    _attribute_code("dequantize()", '"{key}": {key}.{x}'),
)
_MASKED = _Special(
    TENSOR_CLASS,
    "is a masked tensor, whose operators are chosen in Python",
    "Pass data and mask as two tensors, and multiply or torch.where with the mask.",
    lambda reached, what: (
        f'Job(batch={{"{reached[7:-2]}": {reached[7:-2]}.get_data(), "mask":'
        f" {reached[7:-2]}.get_mask()}}, ...)"
        if what == "input"
        else _replacement_code(reached, what, f"{reached}.get_data()")
    ),
)
_UNINITIALISED = _Special(
    NO_VALUES,
    "has no shape yet (it belongs to a lazy module)",
    "Run the model once to initialize its lazy modules.",
    lambda reached, what: "model(**example)  # once, before Job(model=model, ...)",
)
_FAKE = _Special(
    NO_VALUES,
    "is a fake tensor, which has a shape but no values",
    "Build the model and the example batch outside of FakeTensorMode.",
    lambda reached, what: (
        "model = Model()  # not under FakeTensorMode\nmodel.load_state_dict(state)"
    ),
)
_META = _Special(
    NO_VALUES,
    "is on the meta device: it has a shape but no values",
    "Give it values: build the model on a real device, or move it there and load its weights.",
    lambda reached, what: (
        f'Job(batch={{"{reached[7:-2]}": torch.randn(4, ...)}}, ...)'
        if what == "input"
        else 'model = model.to_empty(device="cpu")\nmodel.load_state_dict(state)'
    ),
)
