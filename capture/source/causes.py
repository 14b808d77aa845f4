"""The reasons why a model cannot be captured, and how each is recognised in torch's exceptions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason why a model cannot be captured.

    Attributes:
        anchor: anchor of its section in docs/guides/capture.md.
        sentence: description, to be read after "the train graph cannot be captured: ".
        advice: what to do, in a sentence.
        kinds: names of exception classes that always mean it.
        wording: a pattern for "ClassName: message" of an exception that means it, for several
            versions of torch; empty: never raised.
    """

    anchor: str
    sentence: str
    advice: str
    kinds: tuple[str, ...] = ()
    wording: str = ""

    def explains(self, error: BaseException) -> bool:
        """Return True if the exception has this cause."""
        kind = type(error).__name__
        return kind in self.kinds or bool(
            self.wording and re.search(self.wording, f"{kind}: {error}")
        )


BRANCH = Cause(
    "data-dependent-branch",
    "Python branches on a value that is only known at run time",
    "A graph contains no Python: express both branches with torch.where or torch.cond, and run"
    " checks in eager mode only.",
    ("DataDependentOutputException",),
    r"Could not guard on data-dependent expression|data-dependent",
)
NUMBER = Cause(
    "data-dependent-shape",
    "Python reads a number or a size from a tensor",
    "Its value is only known at run time: keep it as a 0-dim tensor, and replace a size by a fixed"
    " upper bound and a mask.",
    (),
    r"Could not extract specialized|_local_scalar_dense|aten::item|\.item\(\)",
)
VALUES = Cause(
    "values-outside-of-torch",
    "code outside of torch reads a tensor's values",
    "Use torch operators, run this code in eager mode only, or compute the result beforehand and"
    " pass it in the batch.",
    (),
    r"\.numpy\(\) is not supported|to numpy|__array__|Cannot access data pointer|passed to"
    r" FakeTensor\.__format__|"
    r"Can't pickle|cannot pickle|NotImplementedError.*[Ss]torage|UnpicklingError",
)
BREAK = Cause(
    "unsupported-construct",
    "torch.export cannot trace this construct",
    "Express it with plain operators, keep it out of forward, or wrap it in a custom operator.",
    ("Unsupported", "TorchRuntimeError"),
    r"context manager|torch\.jit|[Gg]raph break",
)
DATA = Cause(
    "data-write",
    "`.data` bypasses autograd and the capture",
    "Write to a buffer in place under torch.no_grad() (only the optimizer may write to a"
    " parameter); read with .detach().",
    (),
    r"fake tensor in the exported program constant|access .*\.data\b",
)
SPECIALISED = Cause(
    "specialised-dim",
    "a dim that was declared dynamic can have only one size in this model",
    "Compute sizes from x.shape; or declare that the size never changes.",
    (),
    r"specialized it to be a constant|is specialized to be a constant|unhashable type:"
    r" .*Sym(Int|Float|Bool)",
)
CONSTRAINT = Cause(
    "violated-constraint",
    "a dim that was declared dynamic can only have certain sizes in this model",
    "Make the model accept any size, or declare the sizes that it accepts.",
    ("ConstraintViolationError",),
    r"Constraints violated|not all values of .* satisfy|marked .* as dynamic but",
)
NO_FAKE_KERNEL = Cause(
    "no-fake-kernel",
    "an operator has no fake kernel, which computes the shape of its result",
    "Register one with torch.library.register_fake; wrap an operator of torch in a custom"
    " operator.",
    ("UnsupportedOperatorException", "DynamicOutputShapeException"),
    r"no fake impl|does not have a fake impl|NotImplementedError.*[Mm]eta|attempted to run this"
    r" operator with Meta tensors",
)
NO_AUTOGRAD = Cause(
    "no-autograd",
    "an operator has no derivative",
    "Register one with torch.library.register_autograd.",
    (),
    r"no autograd formula was registered|derivative for .* is not implemented|autograd kernel was"
    r" not registered",
)
DEVICES = Cause(
    "two-devices",
    "tensors are on different devices",
    "Move the model and the batch to one device, and make tensors in forward with device=x.device.",
    (),
    r"to be on the same device|is not on the expected device|found at least two devices|found two"
    r" different devices",
)
INPUT = Cause(
    "unsupported-input",
    "an input has a type that cannot be captured",
    "Pass only tensors: numbers as 0-dim buffers of the model, text as tokens, lists padded to one"
    " tensor.",
    (),
    r"Unsupported input type|pytree.*not.*registered|not.*registered.*pytree",
)
TENSOR_CLASS = Cause(
    "tensor-class",
    "a tensor subclass overrides the behaviour of torch.Tensor, which a trace cannot follow",
    "Use ordinary tensors, and implement the class's behaviour in a function or a module that"
    " forward calls.",
    (),
    r"Creating a new Tensor subclass|Unable to cast NotImplemented to Tensor|__torch_dispatch__"
    r" handlers returned NotImplemented|"
    r"'FakeTensor' object has no attribute",
)
NO_VALUES = Cause(
    "tensor-without-values",
    "a tensor has a shape but no values",
    "Build the model on a real device; run lazy modules once.",
)
OWN_KERNEL = Cause(
    "own-kernel",
    "a custom operator has no kernel for this machine",
    "Register a CPU kernel that computes the same with torch operators: graphs are compared with"
    " eager mode on the CPU.",
)
MODULE = Cause(
    "module-changed-in-forward",
    "forward changes a Python attribute, which a graph would freeze",
    "Keep it in a buffer and change it in place with tensor operators, or count outside of"
    " forward.",
)
GLOBAL = Cause(
    "global-state",
    "forward reads or changes state outside of the model, which a graph would freeze",
    "Draw random numbers with torch, pass changing values in the batch, and read settings once, in"
    " __init__.",
)
ASKS = Cause(
    "global-state",
    "forward behaves differently while it is being compiled or exported",
    "Compute the same result in both cases; code for eager mode only may check, print or log.",
)
PARAMETER_WRITE = Cause(
    "parameter-changed-in-forward",
    "forward writes to a parameter",
    "Keep what changes in a buffer; constrain a parameter with torch.nn.utils.parametrize.",
)
INPUT_WRITE = Cause(
    "input-changed-in-forward",
    "forward writes to an input",
    "Use the operator without the underscore, or write to a clone.",
)
BACKWARD = Cause(
    "own-backward",
    "a custom backward that a graph cannot represent",
    "Express it with plain operators, an autograd function without mark_dirty, or a custom operator"
    " with torch.library.register_autograd.",
)
NO_GRADIENT = Cause(
    "no-gradient",
    "no gradient reaches any parameter",
    "Check for .detach(), torch.no_grad(), frozen parameters, and parameters in a Python list or"
    " dict, which nn.ParameterList registers.",
)
OTHER_SIZE = Cause(
    "other-batch-size",
    "the model does not accept a batch of another size",
    "Compute sizes from x.shape, or fix the size with dynamic={name: {0: Dim.STATIC}}.",
)
EAGER = Cause(
    "model-fails",
    "the model fails on Job.batch in eager mode, before any capture",
    "Fix this first: the line must run in eager mode (for the eval graph, under torch.no_grad()).",
)

DIFFERENCE = Cause(
    "differs-from-eager",
    "the graph computes something different from the model",
    "",
)

RAISED: tuple[Cause, ...] = (
    DEVICES,
    NO_AUTOGRAD,
    NO_FAKE_KERNEL,
    SPECIALISED,
    CONSTRAINT,
    DATA,
    VALUES,
    NUMBER,
    BRANCH,
    INPUT,
    TENSOR_CLASS,
    BREAK,
)
"""Causes recognised in torch's exceptions, in order; the first that explains one is its cause."""

CAUSES: tuple[Cause, ...] = (
    *RAISED,
    NO_VALUES,
    MODULE,
    GLOBAL,
    PARAMETER_WRITE,
    INPUT_WRITE,
    BACKWARD,
    NO_GRADIENT,
    OTHER_SIZE,
    EAGER,
    DIFFERENCE,
)
"""All causes; each has a section in docs/guides/capture.md."""


def cause_of(errors: Iterable[BaseException]) -> Cause | None:
    """Return the cause of a chain of exceptions, which starts with the last one raised."""
    for error in errors:
        for cause in RAISED:
            if cause.explains(error):
                return cause
    return None
