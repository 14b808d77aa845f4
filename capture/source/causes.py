"""The reasons why a model cannot be captured, and how each is recognised in torch's exceptions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason why a model cannot be captured.

    Attributes:
        anchor: anchor of its section in docs/capture.md.
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
        return kind in self.kinds or bool(self.wording and re.search(self.wording, f"{kind}: {error}"))


BRANCH = Cause(
    "data-dependent-branch",
    "Python branches on a value that is only known when the batch is there",
    "A graph has no Python: write both outcomes with torch.where or torch.cond, and checks for eager mode only.",
    ("DataDependentOutputException",),
    r"Could not guard on data-dependent expression|data-dependent",
)
NUMBER = Cause(
    "data-dependent-shape",
    "Python takes a number or a size out of a tensor",
    "Its value is only known when the batch is there: keep it a 0-dim tensor, and give sizes a fixed upper bound with a mask.",
    (),
    r"Could not extract specialized|_local_scalar_dense|aten::item|\.item\(\)",
)
VALUES = Cause(
    "values-outside-of-torch",
    "something outside of torch asks for a tensor's values",
    "Use torch's own operators, keep it to eager mode, or compute it beforehand and pass it in the batch.",
    (),
    r"\.numpy\(\) is not supported|to numpy|__array__|Cannot access data pointer|passed to FakeTensor\.__format__|"
    r"Can't pickle|cannot pickle|NotImplementedError.*[Ss]torage|UnpicklingError",
)
BREAK = Cause(
    "unsupported-construct",
    "a construct that torch.export does not follow",
    "Express it with plain operators, keep it out of forward, or hide it in a custom operator.",
    ("Unsupported", "TorchRuntimeError"),
    r"context manager|torch\.jit|[Gg]raph break",
)
DATA = Cause(
    "data-write",
    "`.data` reaches around autograd and around the capture",
    "Write to a buffer in place under torch.no_grad() (to a parameter only the optimizer writes); read with .detach().",
    (),
    r"fake tensor in the exported program constant|access .*\.data\b",
)
SPECIALISED = Cause(
    "specialised-dim",
    "a dim that was declared dynamic has one size only in this model",
    "Compute sizes from x.shape; or declare that the size never changes.",
    (),
    r"specialized it to be a constant|is specialized to be a constant|unhashable type: .*Sym(Int|Float|Bool)",
)
CONSTRAINT = Cause(
    "violated-constraint",
    "a dim that was declared dynamic can only have certain sizes in this model",
    "Make the model accept any size, or declare the sizes that it takes.",
    ("ConstraintViolationError",),
    r"Constraints violated|not all values of .* satisfy|marked .* as dynamic but",
)
NO_FAKE_KERNEL = Cause(
    "no-fake-kernel",
    "an operator has no fake kernel, which says the shape of its result",
    "Register one with torch.library.register_fake; around an operator of torch's, write a custom one.",
    ("UnsupportedOperatorException", "DynamicOutputShapeException"),
    r"no fake impl|does not have a fake impl|NotImplementedError.*[Mm]eta|attempted to run this operator with Meta tensors",
)
NO_AUTOGRAD = Cause(
    "no-autograd",
    "an operator has no derivative",
    "Register one with torch.library.register_autograd.",
    (),
    r"no autograd formula was registered|derivative for .* is not implemented|autograd kernel was not registered",
)
DEVICES = Cause(
    "two-devices",
    "tensors are on different devices",
    "Move the model and the batch to one device, and make tensors in forward with device=x.device.",
    (),
    r"to be on the same device|is not on the expected device|found at least two devices|found two different devices",
)
INPUT = Cause(
    "unsupported-input",
    "an input is of a type that cannot be captured",
    "Pass tensors only: numbers as 0-dim parts of the model, text as tokens, lists padded to one tensor.",
    (),
    r"Unsupported input type|pytree.*not.*registered|not.*registered.*pytree",
)
TENSOR_CLASS = Cause(
    "tensor-class",
    "a tensor of a class with behaviour of its own, which a trace does not follow",
    "Keep ordinary tensors, and write what the class does as a function or a module that forward calls.",
    (),
    r"Creating a new Tensor subclass|Unable to cast NotImplemented to Tensor|__torch_dispatch__ handlers returned NotImplemented|"
    r"'FakeTensor' object has no attribute",
)
NO_VALUES = Cause(
    "tensor-without-values",
    "a tensor has a shape and no values",
    "Build the model on a real device; run lazy modules once.",
)
OWN_KERNEL = Cause(
    "own-kernel",
    "an operator of your own has no kernel for this machine",
    "Register one that computes the same in torch, for the CPU: the comparison runs there, and the package then trains there too.",
)
MODULE = Cause(
    "module-changed-in-forward",
    "forward changes a Python attribute, which a graph would freeze",
    "Keep it in a buffer and change it in place with tensor operators, or count outside of forward.",
)
GLOBAL = Cause(
    "global-state",
    "forward reads or changes what is no part of the model, which a graph would freeze",
    "Draw with torch, pass what changes in the batch, and read settings once, in __init__.",
)
ASKS = Cause(
    "global-state",
    "forward asks whether it is being compiled or exported, and does something else then",
    "Compute the same in both cases; what is for eager mode alone may only check, print or log.",
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
    "a backward of its own that a graph cannot hold",
    "Express it with plain operators, an autograd function without mark_dirty, or a custom operator with torch.library.register_autograd.",
)
NO_GRADIENT = Cause(
    "no-gradient",
    "no gradient reaches any parameter",
    "Check for .detach(), torch.no_grad(), frozen parameters, and parameters in a Python list or dict, which nn.ParameterList registers.",
)
OTHER_SIZE = Cause(
    "other-batch-size",
    "the model does not take a batch of another size",
    "Compute sizes from x.shape, or fix the size with dynamic={name: {0: Dim.STATIC}}.",
)
EAGER = Cause(
    "model-fails",
    "the model itself fails on Job.batch, without any capture",
    "Mend it first: this line must run in eager mode, for the eval graph under torch.no_grad().",
)

DIFFERENCE = Cause(
    "differs-from-eager",
    "the graph computes something else than the model",
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
"""All causes; each has a section in docs/capture.md."""


def cause_of(errors: Iterable[BaseException]) -> Cause | None:
    """Return the cause of a chain of exceptions, which starts with the last one raised."""
    for error in errors:
        for cause in RAISED:
            if cause.explains(error):
                return cause
    return None
