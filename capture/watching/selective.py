"""Selective activation checkpointing: what a policy says while a model is traced, as text.

The text is a list of `OPERATOR=ANSWERS`, separated by blanks: an operator below autograd ("aten.mm.default") and a digit for each of its
calls in the region, 1 where its result is kept; one digit where all are alike. Operators of which nothing is kept are left out.
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
"""The class of the context that asks a policy in forward."""
_SAVED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


class Answers:
    """What the policies of one region answered."""

    def __init__(self) -> None:
        self._calls: dict[str, list[bool]] = {}
        self._listed: set[str] = set()

    def listen(self, context: Any) -> None:
        """Hears from now on what the policy of a SELECTIVE context answers."""
        policy: Callable[..., Any] = context.policy_fn
        if inspect.isfunction(policy):  # a list of operators is a policy of torch's own; it may name kernels of other devices
            listed = inspect.getclosurevars(policy).nonlocals.get("policy_fn_or_list")
            self._listed |= {_name(op) for op in listed} if isinstance(listed, list) else set()

        def heard(state: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(op, "namespace", "") == marks.NAMESPACE:
                return CheckpointPolicy.PREFER_RECOMPUTE
            answer = policy(state, op, *args, **kwargs)
            self._calls.setdefault(_name(op), []).append(answer is True or answer in _SAVED)
            return answer

        context.policy_fn = heard

    def text(self) -> str:
        """As the module says."""
        found = {name: [True] for name in self._listed} | self._calls
        digits = {name: "".join("01"[answer] for answer in answers) for name, answers in found.items() if any(answers)}
        return " ".join(f"{name}={'1' if '0' not in said else said}" for name, said in sorted(digits.items()))


def _name(op: Any) -> str:
    """An operator's name; that of the functional operator for one that writes in place: a derived graph has no other."""
    if is_overload(op) and op._schema.is_mutable:
        packet = getattr(torch.ops.aten, op.overloadpacket.__name__.removesuffix("_"), None)
        overload = getattr(packet, op._overloadname, None)
        return str(op if overload is None else overload)
    return str(op)


def kept_operators(text: str) -> dict[str, str]:
    """The operators of a text, and their answers.

    Raises:
        CaptureError: it is no such text.
    """
    found: dict[str, str] = {}
    for entry in text.split():
        name, equals, answers = entry.rpartition("=")
        if not equals or not answers or set(answers) - {"0", "1"}:
            raise CaptureError(
                "a selective checkpoint does not say which calls of an operator it keeps",
                where="trainload_selective_checkpoint",
                expected="an operator, =, and a 0 or 1 for each call",
                got=entry[:80],
            )
        found[name] = answers
    return found
