"""Turns what torch.export raises into one line that names the user's file, the cause and the cure."""

from __future__ import annotations

import re
import sysconfig
import traceback
from pathlib import Path

import torch

from trainload.capture.errors import CaptureError

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).resolve().parent)
_FACE = "trainload/capture"
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")

_CAUSES: tuple[tuple[str, str, str], ...] = (
    (
        r"Could not guard on data-dependent expression|data-dependent|GuardOnDataDependent|_local_scalar_dense|aten::item|\.item\(\)",
        "Python branches or computes on a value that is only known when the batch is there",
        "Write the branch with torch.cond or torch.where, and the number with tensor operators.",
    ),
    (
        r"Constraints violated|marked .* as dynamic but|not all values of .* satisfy|specialized it to be a constant",
        "a dim that was declared dynamic can only have certain sizes in this model",
        "Make the model accept any size, or declare the dim as it is: dynamic={name: {dim: Dim.STATIC}}.",
    ),
    (
        r"does not have a fake impl|no fake impl|UnsupportedOperatorException|NotImplementedError.*[Mm]eta",
        "an operator has no fake kernel",
        "Register one with torch.library.register_fake.",
    ),
    (r"Unsupported input type|pytree|not.*registered", "an input is of a type that cannot be captured", "Pass tensors only."),
    (
        r"Expected .*tensors? to be on the same device|found at least two devices",
        "tensors are on different devices",
        "Move the model and the batch to one device.",
    ),
)


def capture_error(graph: str, error: Exception) -> CaptureError:
    """One line for an exception of torch.export or of the model's own code.

    Args:
        graph: which graph was being captured.
        error: what was raised.
    """
    text = str(error)
    for pattern, cause, cure in _CAUSES:
        if re.search(pattern, text) or re.search(pattern, type(error).__name__):
            return CaptureError(
                f"the {graph} graph cannot be captured: {cause}",
                where=_place(error),
                got=_first_line(text) or type(error).__name__,
                expected="something that torch.export can follow",
                cure=cure,
            )
    return CaptureError(
        f"the {graph} graph cannot be captured: {type(error).__name__}: {_first_line(text)}",
        where=_place(error),
        cure="The same line must run in eager mode on Job.batch; see the error below it for the whole story.",
    )


def replay_error(graph: str, rows: int, by: str, error: Exception) -> CaptureError:
    """One line for an exception of a replay: eager (`by` "the model") or captured (`by` "the captured graph")."""
    return CaptureError(
        f"{by} fails on {rows} rows of the example batch in the {graph} graph: {type(error).__name__}: {_first_line(str(error))}",
        where=_place(error) if by == "the model" else f"graph {graph}",
        cure="The model must take batches of any size, this one too; or fix the size with dynamic={name: {0: Dim.STATIC}}.",
    )


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:200]


def _place(error: BaseException) -> str:
    """The innermost frame of the user's code: file:line and its source."""
    seen: BaseException | None = error
    while seen is not None:
        for frame in reversed(traceback.extract_tb(seen.__traceback__)):
            if _is_users(frame.filename):
                return f"{frame.filename}:{frame.lineno} `{frame.line}`"
        seen = seen.__cause__ or seen.__context__
    named = [m for m in re.findall(r'File "([^"]+)", line (\d+)', str(error)) if _is_users(m[0])]
    return f"{named[-1][0]}:{named[-1][1]}" if named else ""


def _is_users(filename: str) -> bool:
    if filename.startswith((_TORCH, _HERE, "<")) or _FACE in filename:
        return False
    return "site-packages" in Path(filename).parts or not filename.startswith(_STANDARD_LIBRARY)
