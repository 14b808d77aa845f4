"""Selective activation checkpointing: the decisions of a policy while a model is traced, as text.

The text is a list of `OPERATOR=ANSWERS`, separated by spaces: an operator below autograd
("aten.mm.default") and a digit for each of its calls in the region, 1 if its result is kept; a
single digit if all are alike. Operators of which nothing is kept are left out.

A policy sees operators below autograd in eager mode's order, also while torch.export traces above
autograd.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from trainload.capture.operators import is_overload
from trainload.capture.watching import marks
from trainload.core.errors import CaptureError

SELECTIVE: Any = type(create_selective_checkpoint_contexts([])[0])  # type: ignore[no-untyped-call]  # torch's own
"""Class of the context that calls a policy in forward."""
_SAVED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


class Answers:
    """The decisions of the policies of one region."""

    def __init__(self) -> None:
        self._calls: dict[str, list[bool]] = {}
        self._listed: set[str] = set()

    def listen(self, context: Any) -> None:
        """Record the decisions of a SELECTIVE context's policy from now on."""
        policy: Callable[..., Any] = context.policy_fn
        # torch wraps a list of operators into a policy; it may name kernels of other devices
        if inspect.isfunction(policy):
            listed = inspect.getclosurevars(policy).nonlocals.get("policy_fn_or_list")
            self._listed |= (
                {_operator_name(op) for op in listed} if isinstance(listed, list) else set()
            )

        def heard(state: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(op, "namespace", "") == marks.NAMESPACE:
                return CheckpointPolicy.PREFER_RECOMPUTE
            answer = policy(state, op, *args, **kwargs)
            self._calls.setdefault(_operator_name(op), []).append(
                answer is True or answer in _SAVED
            )
            return answer

        context.policy_fn = heard

    def text(self) -> str:
        """Return the decisions in the format of this module."""
        answers_by_name = {name: [True] for name in self._listed} | self._calls
        digits = {
            name: "".join("01"[answer] for answer in answers)
            for name, answers in answers_by_name.items()
            if any(answers)
        }
        return " ".join(
            f"{name}={'1' if '0' not in bits else bits}" for name, bits in sorted(digits.items())
        )


def _operator_name(op: Any) -> str:
    """Return an operator's name.

    For one that writes in place it is the name of its functional variant, as in derived graphs.
    """
    if is_overload(op) and op._schema.is_mutable:
        packet = getattr(torch.ops.aten, op.overloadpacket.__name__.removesuffix("_"), None)
        overload = getattr(packet, op._overloadname, None)
        return str(op if overload is None else overload)
    return str(op)


def kept_operators(text: str) -> dict[str, str]:
    """Parse a text and return operator -> answers.

    Raises:
        CaptureError: if the text is malformed.
    """
    answers_by_name: dict[str, str] = {}
    for entry in text.split():
        name, equals, answers = entry.rpartition("=")
        if not equals or not answers or set(answers) - {"0", "1"}:
            raise CaptureError(
                "a selective checkpoint does not specify which calls of an operator it keeps",
                where="trainload_selective_checkpoint",
                expected="an operator, =, and a 0 or 1 for each call",
                got=entry[:80],
            )
        answers_by_name[name] = answers
    return answers_by_name
