"""Operators that mark, in a graph being traced, what torch.export would drop.

`regions.py` removes them again.

begin(kind, text, number), end(number)    a region: autocast, checkpoint, backward, func_grad, vmap,
                                          branch
keep(text, number)                        region `number`, a checkpoint, keeps the results listed in
                                          `text` (see `selective.py`)
grad_mode(enabled, restored)              the grad mode from here on; `restored`: a context puts
                                          back the earlier mode
tangent(x, number) -> Tensor              placeholder for a gradient that arrives at x in backward
connect(outputs, inputs, gradients, number) -> Tensor[]
                                          the outputs, whose gradient with respect to the inputs
                                          region `number` computed
connect_used(outputs, inputs, gradients, used, given, numbers) -> Tensor[]
                                          the same, by region numbers[i] if gradients arrive at
                                          exactly the outputs that are bits of used[i]; it computed
                                          gradients of the inputs that are bits of given[i]
hook(x, gradient, number) -> ()           from now on region `number` changes the gradient of x
unhook(number) -> ()                      it no longer does, unless a gradient was taken before
variable(x, number) -> Tensor             x as the variable of func_grad region `number`
func_grad(variables, results, number) -> Tensor[]
                                          the gradients of the region's first result, then its
                                          results
row(x, dim, number) -> Tensor             one slice of x along dim, as the input of vmap region
                                          `number`
stacked(results, dims, x, dim, number) -> Tensor[]
                                          the results of vmap region `number`, stacked at dims; as
                                          many slices as x has along dim
autograd_grad(outputs, inputs, gradients, create_graph) -> Tensor[]
branches(pred, one, other, number, number) -> Tensor[]
                                          the result of torch.cond, whose branches are two regions:
                                          `one` or `other`
require_grad(x) -> ()                     from now on x is a variable that requires a gradient
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAMESPACE = "trainload_mark"
_LIBRARY: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]  # torch's own


def _nothing(*_: object) -> None:
    return None


def _like(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


def _connect(outputs: list[Tensor], *_: object) -> list[Tensor]:
    return [torch.empty_like(output) for output in outputs]


def _func_grad(variables: list[Tensor], results: list[Tensor], _: int) -> list[Tensor]:
    return [torch.empty_like(value) for value in (*variables, *results)]


def _row(x: Tensor, dim: int, _: int) -> Tensor:
    return x.new_empty([*x.shape[:dim], *x.shape[dim + 1 :]])


def _stacked(results: list[Tensor], dims: list[int], x: Tensor, dim: int, _: int) -> list[Tensor]:
    return [
        r.new_empty([*r.shape[:at], x.shape[dim], *r.shape[at:]])
        for r, at in zip(results, dims, strict=True)
    ]


def _branches(_: Tensor, one: list[Tensor], *__: object) -> list[Tensor]:
    return [torch.empty_like(value) for value in one]


def _autograd_grad(outputs: list[Tensor], inputs: list[Tensor], *_: object) -> list[Tensor]:
    return [torch.empty_like(value) for value in inputs]


for _schema, _meaning in (
    ("begin(str kind, str text, int number) -> ()", _nothing),
    ("end(int number) -> ()", _nothing),
    ("keep(str text, int number) -> ()", _nothing),
    ("grad_mode(bool enabled, bool restored) -> ()", _nothing),
    ("tangent(Tensor x, int number) -> Tensor", _like),
    (
        "connect(Tensor[] outputs, Tensor[] inputs, Tensor[] gradients, int number) -> Tensor[]",
        _connect,
    ),
    (
        (
            "connect_used(Tensor[] outputs, Tensor[] inputs, Tensor[] gradients, int[] used, int[]"
            " given, int[] numbers) -> Tensor[]"
        ),
        _connect,
    ),
    ("hook(Tensor x, Tensor gradient, int number) -> ()", _nothing),
    ("unhook(int number) -> ()", _nothing),
    ("variable(Tensor x, int number) -> Tensor", _like),
    ("func_grad(Tensor[] variables, Tensor[] results, int number) -> Tensor[]", _func_grad),
    ("row(Tensor x, int dim, int number) -> Tensor", _row),
    ("stacked(Tensor[] results, int[] dims, Tensor x, int dim, int number) -> Tensor[]", _stacked),
    (
        "branches(Tensor pred, Tensor[] one, Tensor[] other, int first, int second) -> Tensor[]",
        _branches,
    ),
    (
        (
            "autograd_grad(Tensor[] outputs, Tensor[] inputs, Tensor[] gradients, bool"
            " create_graph) -> Tensor[]"
        ),
        _autograd_grad,
    ),
    ("require_grad(Tensor x) -> ()", _nothing),
):
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_schema.split("(")[0], _meaning, "CompositeExplicitAutograd")

BEGIN = torch.ops.trainload_mark.begin.default
END = torch.ops.trainload_mark.end.default
KEEP = torch.ops.trainload_mark.keep.default
GRAD_MODE = torch.ops.trainload_mark.grad_mode.default
TANGENT = torch.ops.trainload_mark.tangent.default
CONNECT = torch.ops.trainload_mark.connect.default
CONNECT_USED = torch.ops.trainload_mark.connect_used.default
HOOK = torch.ops.trainload_mark.hook.default
UNHOOK = torch.ops.trainload_mark.unhook.default
VARIABLE = torch.ops.trainload_mark.variable.default
FUNC_GRAD = torch.ops.trainload_mark.func_grad.default
ROW = torch.ops.trainload_mark.row.default
STACKED = torch.ops.trainload_mark.stacked.default
BRANCHES = torch.ops.trainload_mark.branches.default
AUTOGRAD_GRAD = torch.ops.trainload_mark.autograd_grad.default
REQUIRE_GRAD = torch.ops.trainload_mark.require_grad.default

for _effect in (BEGIN, END, KEEP, GRAD_MODE, HOOK, UNHOOK, REQUIRE_GRAD):
    # without it, dead code elimination removes operators that return nothing
    torch.fx.node.has_side_effect(_effect)
