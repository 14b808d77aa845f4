"""Models that no capture can hold: functions between two layers, as in `tests.capture.jobs.Model`.

Above the line at fault, `# -> expression` names what the caret must point at.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

SAVED = io.BytesIO()
torch.save(torch.ones(8), SAVED)
SEEN: list[int] = []
COUNT = 0


@dataclass(frozen=True, slots=True)
class Refused:
    """A function, the anchor of its cause, and a part of the rewrite."""

    function: Callable[[Any, Tensor], Any]
    cause: str
    rewrite: str


REFUSED: list[Refused] = []


def refused(
    cause: str, rewrite: str
) -> Callable[[Callable[[Any, Tensor], Any]], Callable[[Any, Tensor], Any]]:
    def keep(function: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Any]:
        REFUSED.append(Refused(function, cause, rewrite))
        return function

    return keep


# Branches


@refused("data-dependent-branch", "return torch.where(x.sum() > 0, x * 2, x)")
def an_if(_: Any, x: Tensor) -> Any:
    # -> x.sum() > 0
    if x.sum() > 0:
        return x * 2
    return x


@refused("data-dependent-branch", "return torch.where(x.mean() > 0, x, -x)")
def a_conditional_expression(_: Any, x: Tensor) -> Any:
    # -> x.mean() > 0
    return x if x.mean() > 0 else -x


@refused("data-dependent-branch", "x = torch.where(x.abs().max() > 0.5, x / 2, x)")
def a_while(_: Any, x: Tensor) -> Any:
    # -> x.abs().max() > 0.5
    while x.abs().max() > 0.5:
        x = x / 2
    return x


@refused("data-dependent-branch", "return torch.where(torch.isnan(x).any(), -x, x)")
def a_condition_that_is_a_call(_: Any, x: Tensor) -> Any:
    # -> torch.isnan(x).any()
    return -x if torch.isnan(x).any() else x


@refused("data-dependent-branch", "x = torch.where(torch.logical_not(x.any()), x + 1, x)")
def a_negation(_: Any, x: Tensor) -> Any:
    # -> x.any()
    if not x.any():
        x = x + 1
    return x


@refused("data-dependent-branch", "x = torch.where(x.abs().max() > 1000, x / 10, x)")
def a_branch_in_a_try(_: Any, x: Tensor) -> Any:
    try:
        # -> x.abs().max() > 1000
        if x.abs().max() > 1000:
            x = x / 10
    except (RuntimeError, ValueError):
        x = x * 2
    return x


@refused("data-dependent-branch", "")
def a_branch_on_a_count_in_a_suppress(_: Any, x: Tensor) -> Any:
    count = (x > 1000).sum().item()
    with contextlib.suppress(Exception):
        # -> count > 3
        if count > 3:
            x = x / 10
    return x


@refused("data-dependent-shape", "")
def a_number_in_a_try(_: Any, x: Tensor) -> Any:
    try:
        # -> int(x.abs().max() > 1000)
        x = x * (10 ** -int(x.abs().max() > 1000))
    except RuntimeError:
        x = x * 2
    return x


@refused("unsupported-construct", "")
def a_parameter_without_its_gradient(m: Any, x: Tensor) -> Any:
    # -> m.last.bias.requires_grad_(False)
    m.last.bias.requires_grad_(False)
    m.last.bias.requires_grad_(True)
    return x


@refused("global-state", "self.setting = torch.compiler.is_compiling()")
def a_question_whether_it_is_compiled(_: Any, x: Tensor) -> Any:
    # -> torch.compiler.is_compiling()
    return x * (2 if torch.compiler.is_compiling() else 1)


@refused("values-outside-of-torch", "")
def an_array_in_a_try(_: Any, x: Tensor) -> Any:
    try:
        # -> x.detach().numpy()
        x = x * float(x.detach().numpy().max() < 1000)
    except RuntimeError:
        x = x * 2
    return x


@refused("data-dependent-branch", "if not torch.compiler.is_exporting():")
def an_assertion(_: Any, x: Tensor) -> Any:
    # -> (x.abs() < 100).all()
    assert (x.abs() < 100).all(), "overflow"
    return x


@refused("data-dependent-branch", "if not torch.compiler.is_exporting():")
def a_check_that_raises(_: Any, x: Tensor) -> Any:
    # -> torch.isnan(x).any()
    if torch.isnan(x).any():
        raise ValueError("nan")
    return x


@refused("data-dependent-branch", "torch.where(m.training & (x.mean() > -9), x * 2, x)")
def a_conjunction(m: Any, x: Tensor) -> Any:
    # -> x.mean() > -9
    if m.training and x.mean() > -9:
        return x * 2
    return x


@refused("data-dependent-branch", "torch.where((x == x * 2).all(), x, x * 2)")
def an_equality_of_tensors(_: Any, x: Tensor) -> Any:
    # -> torch.equal(x, x * 2)
    return x if torch.equal(x, x * 2) else x * 2


@refused("data-dependent-branch", "torch.where")
def a_membership(_: Any, x: Tensor) -> Any:
    # -> x[0, 0] in [1, 2]
    return x if x[0, 0] in [1, 2] else x * 2


@refused("data-dependent-branch", "torch.where")
def a_sort_of_rows(_: Any, x: Tensor) -> Any:
    # -> sorted([x[0], x[1]], key=Tensor.sum)
    least = sorted([x[0], x[1]], key=Tensor.sum)[0]
    return x + least


@refused("data-dependent-branch", "mask")
def an_empty_selection(_: Any, x: Tensor) -> Any:
    index = (x > 0).nonzero()
    # -> index.numel() == 0
    if index.numel() == 0:
        return x
    return x + index.to(x.dtype).mean()


@refused("data-dependent-branch", "n = x.abs().max()")
def a_branch_on_an_item(_: Any, x: Tensor) -> Any:
    n = x.abs().max().item()
    # -> n > 3
    if n > 3:
        return x * 2
    return x


# Numbers and sizes


@refused("data-dependent-shape", "n = x.detach().abs().sum()  # a 0-dim tensor")
def a_size(_: Any, x: Tensor) -> Any:
    # -> int(x.detach().abs().sum())
    n = int(x.detach().abs().sum())
    return x + torch.zeros(n).sum()


@refused("data-dependent-shape", "scale = x.detach().abs().max()")
def an_argument_of_max(_: Any, x: Tensor) -> Any:
    # -> float(x.detach().abs().max())
    scale = float(x.detach().abs().max())
    return x / max(scale, 1.0)


@refused("data-dependent-shape", "x = torch.where(_ < n, x + 1, x)")
def a_number_of_rounds(m: Any, x: Tensor) -> Any:
    n: Any = x.detach().abs().max().long().item()
    # -> range(n)
    for _ in range(n):
        x = x + 1
    return x


@refused("data-dependent-shape", "an index may stay a tensor")
def a_key_of_a_dict(_: Any, x: Tensor) -> Any:
    # -> int(x.sum() > 0)
    return x * {0: 1.0, 1: 2.0}[int(x.sum() > 0)]


@refused("specialised-dim", "an index may stay a tensor")
def a_list_of_numbers(_: Any, x: Tensor) -> Any:
    # -> x.detach().sum(1).tolist()
    return x * sum(x.detach().sum(1).tolist())


# Values


@refused("values-outside-of-torch", "x * torch.mean(x)")
def numpy_function(_: Any, x: Tensor) -> Any:
    # -> x.detach().numpy()
    scaled: Tensor = x * float(np.mean(x.detach().numpy()))
    return scaled


@refused("values-outside-of-torch", "if not torch.compiler.is_exporting():")
def a_formatted_print(_: Any, x: Tensor) -> Any:
    # -> f"{x.sum():.3f}"
    print(f"{x.sum():.3f}")
    return x


@refused("values-outside-of-torch", "return x * m.gain.clone()")
def a_deep_copy(m: Any, x: Tensor) -> Any:
    # -> copy.deepcopy(m.gain)
    return x * copy.deepcopy(m.gain)


@refused("values-outside-of-torch", "if not torch.compiler.is_exporting():")
def an_address(_: Any, x: Tensor) -> Any:
    # -> x.data_ptr()
    return x + x.data_ptr() % 2


@refused("values-outside-of-torch", "pickle.dump(x.detach(), file)")
def a_file(_: Any, x: Tensor) -> Any:
    with open(os.devnull, "wb") as file:
        # -> pickle.dump(x.detach(), file)
        pickle.dump(x.detach(), file)
    return x


@refused(
    "values-outside-of-torch", 'self.register_buffer("loaded", torch.load(path))  # in __init__'
)
def a_loaded_tensor(_: Any, x: Tensor) -> Any:
    SAVED.seek(0)
    # -> torch.load(SAVED)
    return x + torch.load(SAVED)  # noqa: TID251  # what is refused here


# `.data`, attributes, global state


@refused("data-write", "with torch.no_grad():\n    m.seen.mul_(0.9)")
def a_write_through_data(m: Any, x: Tensor) -> Any:
    # -> m.seen.data
    m.seen.data.mul_(0.9)
    return x + m.seen


@refused("data-write", "with torch.no_grad():\n    m.seen.copy_(")
def an_assignment_to_data(m: Any, x: Tensor) -> Any:
    # -> m.seen.data
    m.seen.data = x.detach().mean(0)
    return x + m.seen


@refused("module-changed-in-forward", "m.calls.add_(1)")
def a_counter(m: Any, x: Tensor) -> Any:
    # -> m.calls
    m.calls += 1
    scaled: Tensor = x * m.calls
    return scaled


@refused("module-changed-in-forward", "m.history.append(1)")
def a_list_of_the_module(m: Any, x: Tensor) -> Any:
    # -> m.history.append(1)
    m.history.append(1)
    return x * len(m.history)


@refused("global-state", "# no generator")
def a_generator_of_its_own(_: Any, x: Tensor) -> Any:
    # -> torch.rand(x.shape[1], generator=torch.Generator())
    return x * torch.rand(x.shape[1], generator=torch.Generator())


@refused("global-state", "SEEN.append(1)")
def a_list_of_the_file(_: Any, x: Tensor) -> Any:
    # -> SEEN.append(1)
    SEEN.append(1)
    return x * len(SEEN)


@refused("global-state", "batch")
def a_global_counter(_: Any, x: Tensor) -> Any:
    global COUNT
    # -> COUNT
    COUNT += 1
    return x * COUNT


@refused("global-state", "return x * torch.rand(())")
def a_draw_of_pythons(_: Any, x: Tensor) -> Any:
    # -> random.random()
    return x * random.random()


@refused("global-state", "return x * torch.rand(())")
def a_draw_of_numpys(_: Any, x: Tensor) -> Any:
    # -> np.random
    return x * float(np.random.rand())


@refused("global-state", "self.setting = time.time()")
def a_clock(_: Any, x: Tensor) -> Any:
    # -> time.time()
    return x * (time.time() % 1)


@refused("global-state", "leave this line out")
def a_seed(_: Any, x: Tensor) -> Any:
    # -> torch.manual_seed(0)
    torch.manual_seed(0)
    return x * torch.rand(8)


@refused("parameter-changed-in-forward", "register_parametrization(m")
def a_write_to_a_parameter(m: Any, x: Tensor) -> Any:
    with torch.no_grad():
        # -> m.gain.clamp_(-1, 1)
        m.gain.clamp_(-1, 1)
    clamped: Tensor = x * m.gain
    return clamped


# Sizes of the batch


@refused("specialised-dim", "return x.view(x.shape[0], 2, 4).flatten(1)")
def a_fixed_size(_: Any, x: Tensor) -> Any:
    # -> x.view(4, 2, 4)
    return x.view(4, 2, 4).flatten(1)


@refused("specialised-dim", "{0: Dim.STATIC}")
def a_size_as_a_key(_: Any, x: Tensor) -> Any:
    # -> {4: 1.0, 5: 2.0}[x.shape[0]]
    return x * {4: 1.0, 5: 2.0}[x.shape[0]]


@refused("specialised-dim", "x.sum(0)  # an operator over the dim")
def a_loop_over_rows(_: Any, x: Tensor) -> Any:
    total = torch.zeros(x.shape[1])
    # -> for row in x:
    for row in x:
        total = total + row
    return x - total


@refused("specialised-dim", "torch.vmap(lambda row: row * 2)(x)  # or an operator over the dim")
def a_list_of_rows(_: Any, x: Tensor) -> Any:
    # -> [row * 2 for row in x]
    return torch.stack([row * 2 for row in x])


@refused("specialised-dim", "torch.vmap(lambda row: row.sum())(x)  # or an operator over the dim")
def a_sum_of_rows(_: Any, x: Tensor) -> Any:
    # -> (row.sum() for row in x)
    return x * sum(row.sum() for row in x)


@refused("specialised-dim", "return x * torch.sym_float(len(x))")
def a_length_as_a_float(_: Any, x: Tensor) -> Any:
    # -> float(len(x))
    return x * float(len(x))


@refused("violated-constraint", "Dim('batch', max=4)")
def a_branch_on_the_size(_: Any, x: Tensor) -> Any:
    # -> x.shape[0] > 4
    if x.shape[0] > 4:
        return x * 2
    return x


@refused("violated-constraint", "Dim.STATIC")
def a_branch_on_a_remainder(_: Any, x: Tensor) -> Any:
    # -> x.shape[0] % 2 == 0
    return x * 2 if x.shape[0] % 2 == 0 else x


@refused("violated-constraint", "Dim.STATIC")
def a_rounded_size(_: Any, x: Tensor) -> Any:
    # -> x[: round(x.shape[0] / 2)]
    return x + x[: round(x.shape[0] / 2)].sum(0)


@refused("other-batch-size", "Dim.STATIC")
def a_size_that_is_checked(_: Any, x: Tensor) -> Any:
    if not torch.compiler.is_exporting() and x.shape[0] != 4:
        # -> raise ValueError("four only")
        raise ValueError("four only")
    return x


# Operators, types, the model's own errors

untyped: Any = torch.library  # torch has no types for this part
library = untyped.Library("refused", "FRAGMENT")
library.define("shapeless(Tensor x) -> Tensor")
library.impl("shapeless", lambda x: x.clone(), "CPU")


@torch.library.custom_op("refused::constant", mutates_args=())
def constant(x: Tensor) -> Tensor:
    return x.clone()


@constant.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("refused::elsewhere", mutates_args=(), device_types="cuda")
def elsewhere(x: Tensor) -> Tensor:
    return x * 2


elsewhere.register_fake(torch.empty_like)
elsewhere.register_autograd(lambda ctx, gradient: gradient * 2)


class Tagged(Tensor):
    """A subclass."""


@refused("no-fake-kernel", '@torch.library.register_fake("refused::shapeless")')
def an_operator_without_a_fake_kernel(_: Any, x: Tensor) -> Any:
    # -> torch.ops.refused.shapeless(x)
    return torch.ops.refused.shapeless(x)


@refused("no-fake-kernel", '@torch.library.custom_op("my_library::linalg_lstsq"')
def a_result_whose_shape_is_data(_: Any, x: Tensor) -> Any:
    # -> torch.linalg.lstsq(torch.eye(8), x.t())
    return x + torch.linalg.lstsq(torch.eye(8), x.t()).solution.t()


@refused("no-autograd", 'torch.library.register_autograd("refused::constant"')
def an_operator_without_a_derivative(_: Any, x: Tensor) -> Any:
    # -> constant(x)
    return constant(x)


@refused("own-kernel", '@torch.library.register_kernel("refused::elsewhere", "cpu")')
def an_operator_without_a_kernel_here(_: Any, x: Tensor) -> Any:
    # -> elsewhere(x)
    return elsewhere(x)


@refused("tensor-class", "a function of ordinary tensors")
def a_subclass(_: Any, x: Tensor) -> Any:
    # -> x.as_subclass(Tagged)
    return x.as_subclass(Tagged).tanh()


@refused("two-devices", "device=x.device")
def two_devices(_: Any, x: Tensor) -> Any:
    # -> x + torch.ones(8, device="meta")
    return x + torch.ones(8, device="meta")


@refused("model-fails", "")
def an_error_of_its_own(_: Any, x: Tensor) -> Any:
    # -> x @ torch.ones(9)
    return x @ torch.ones(9)


# Captured without changes


def a_print(_: Any, x: Tensor) -> Any:
    print(x.shape)
    return x


def a_generator(_: Any, x: Tensor) -> Any:
    def columns() -> Iterator[Tensor]:
        for column in x.unbind(1):
            yield column * 2

    return torch.stack(list(columns()), 1)


def a_context(_: Any, x: Tensor) -> Any:
    with torch.profiler.record_function("part"):
        return x * 2


def a_type_check(_: Any, x: Tensor) -> Any:
    return x if isinstance(x, torch.nn.Parameter) else x * 2


def a_number_that_flows_on(_: Any, x: Tensor) -> Any:
    return x * x.detach().sum().item()


def a_slice_by_a_number(_: Any, x: Tensor) -> Any:
    n = x.detach().abs().sum().long().item()
    return x + x[:n].sum(0, keepdim=True)


def a_selection(_: Any, x: Tensor) -> Any:
    return x + torch.nonzero(x > 0).shape[0]


def an_attribute_that_is_assigned(m: Any, x: Tensor) -> Any:
    m.cache = x * 2
    cached: Tensor = m.cache
    return cached


def a_write_in_place(_: Any, x: Tensor) -> Any:
    return x.mul(2).add_(1)


CAPTURED = (
    a_print,
    a_generator,
    a_context,
    a_type_check,
    a_number_that_flows_on,
    a_slice_by_a_number,
    a_selection,
    an_attribute_that_is_assigned,
    a_write_in_place,
)
