"""Models that torch.export silently gets wrong are rejected with the name of the module."""

from __future__ import annotations

import inspect
import itertools
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.capture.jobs import Batch, Function, Model, job, mean_square
from tests.trained import assert_trains_as_eager
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

from trainload.capture.job.definition import Loss
from trainload.capture.tracing.trace import capture
from trainload.core.errors import CaptureError, JobError


def doubled(_: Any, x: Tensor) -> Tensor:
    x = x * 1
    if x.grad_fn is not None:
        # This is below torch's functions, where a capture does not see it.
        x.grad_fn.register_prehook(lambda gradients: (2 * gradients[0],))
    return x


def counting(module: Any, x: Tensor) -> Tensor:
    module.calls = getattr(module, "calls", 0) + 1
    scaled: Tensor = x * module.calls
    return scaled


def under_autocast(model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return mean_square(model, batch)


def odd(name: str, function: Callable[[Any, Tensor], Tensor]) -> Model:
    return Model(lambda m, x: getattr(m, name)(x), **{name: Function(function)})


@pytest.mark.parametrize("function", [doubled, counting])
def test_a_silent_mis_capture_is_refused_and_its_module_named(
    function: Callable[[Any, Tensor], Tensor],
) -> None:
    with pytest.raises(CaptureError, match=r"module odd\b"):
        capture(job(odd("odd", function)))


def test_a_counter_is_refused_where_the_batch_size_is_fixed() -> None:
    with pytest.raises(CaptureError, match=r"module odd\b"):
        capture(job(odd("odd", counting), dynamic={"x": {0: Dim.STATIC}}))


def test_a_counter_that_does_not_show_yet_is_refused() -> None:
    def warm_up(module: Any, x: Tensor) -> Tensor:
        module.calls = getattr(module, "calls", 0) + 1
        return x * 2 if module.calls > 1000 else x

    with pytest.raises(CaptureError, match=r"module odd\b.*the Python number odd\.calls"):
        capture(job(odd("odd", warm_up)))


COUNTED = [0]
NOISE = np.random.default_rng(0)


def counted_in_a_closure() -> Callable[[Any, Tensor], Tensor]:
    counts = {"calls": 0}

    def forward(_: Any, x: Tensor) -> Tensor:
        counts["calls"] += 1
        return x * 2 if counts["calls"] > 1000 else x

    return forward


def counted_in_a_global(_: Any, x: Tensor) -> Tensor:
    COUNTED[0] += 1
    return x * 2 if COUNTED[0] > 1000 else x


def counted_by_a_helper(_: Any, x: Tensor) -> Tensor:
    return counted_in_a_global(None, x)


def counted_in_a_default(_: Any, x: Tensor, counts: list[int] = [0]) -> Tensor:  # noqa: B006  # that is what is tested
    counts[0] += 1
    return x * 2 if counts[0] > 1000 else x


def counted_in_an_attribute(_: Any, x: Tensor) -> Tensor:
    counted_in_an_attribute.calls = getattr(counted_in_an_attribute, "calls", 0) + 1  # type: ignore[attr-defined]  # as users write it
    return x * 2 if counted_in_an_attribute.calls > 1000 else x  # type: ignore[attr-defined]


class Counts:
    calls = 0


def counted_in_a_class(_: Any, x: Tensor) -> Tensor:
    Counts.calls += 1
    return x * 2 if Counts.calls > 1000 else x


def counting_up() -> Iterator[int]:
    number = 0
    while True:
        number += 1
        yield number


UP, NUMBERS = counting_up(), itertools.count()


def counted_by_a_generator(_: Any, x: Tensor) -> Tensor:
    return x * 2 if next(UP) > 1000 else x


def counted_by_itertools(_: Any, x: Tensor) -> Tensor:
    return x * 2 if next(NUMBERS) > 1000 else x


def drawn_of_a_generator(_: Any, x: Tensor) -> Tensor:
    return x * 2 if NOISE.random() > 1 else x


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (counted_in_a_closure(), "counts['calls']"),
        (counted_in_a_global, "COUNTED[0]"),
        (counted_by_a_helper, "COUNTED[0]"),
        (counted_in_a_default, "counted_in_a_default.__defaults__[0][0]"),
        (counted_in_an_attribute, "counted_in_an_attribute.calls"),
        (counted_in_a_class, "Counts.calls"),
        (counted_by_a_generator, "UP.number"),
        (counted_by_itertools, "NUMBERS"),
        (drawn_of_a_generator, "NOISE"),
    ],
)
def test_a_number_that_a_function_keeps_is_refused_before_it_shows(
    function: Callable[[Any, Tensor], Tensor], name: str
) -> None:
    with pytest.raises(CaptureError, match=rf"the Python number {re.escape(name)},"):
        capture(job(Model(function)))


def test_a_number_that_the_loss_keeps_is_refused_before_it_shows() -> None:
    calls = [0]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        calls[0] += 1
        return mean_square(model, batch) * (2 if calls[0] > 1000 else 1)

    with pytest.raises(
        CaptureError,
        match=r"(?s)^Job: forward changes the Python number calls\[0\],.*    calls\[0\] \+= 1\n",
    ):
        capture(job(Model(), loss=loss))


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["random", "numpy"])
def test_a_draw_of_pythons_is_refused_before_it_shows(draw: Callable[[], float]) -> None:
    with pytest.raises(CaptureError, match=r"forward draws from (numpy\.)?random, .*"):
        capture(job(Model(lambda _, x: x * 2 if draw() > 1 else x)))


def test_what_a_container_gets_is_no_change() -> None:
    sizes = []

    def noting(_: Any, x: Tensor) -> Tensor:
        sizes.append(x.ndim)
        return x

    capture(job(Model(noting)))


def test_an_attribute_that_holds_the_number_of_rows_is_fine() -> None:
    def noting(module: Any, x: Tensor) -> Tensor:
        module.rows = x.shape[0]
        return x

    capture(job(odd("noting", noting)))


def test_a_buffer_that_is_assigned_in_another_shape_is_refused() -> None:
    def assign(module: Any, x: Tensor) -> Tensor:
        module.seen = module.seen + torch.ones(2)
        return x

    with pytest.raises(CaptureError, match="buffer seen"):
        capture(job(Model(assign, seen=torch.zeros(()))))


def test_a_buffer_that_forward_registers_is_refused() -> None:
    def register(module: Any, x: Tensor) -> Tensor:
        module.register_buffer("fresh", torch.zeros(8))
        shifted: Tensor = x + module.fresh
        return shifted

    with pytest.raises(CaptureError, match="buffer fresh: forward registers a buffer"):
        capture(job(Model(register)))


def test_the_replay_keeps_to_the_sizes_that_were_declared() -> None:
    def small_only(_: Any, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 4 else x

    program = capture(job(Model(small_only), dynamic={"x": {0: Dim("batch", max=4)}}))
    assert program.graphs["train"].inputs[0].shape == ("batch", 8)


def test_a_gradient_into_a_buffer_is_refused() -> None:
    def track(module: Any, x: Tensor) -> Tensor:
        module.mean.mul_(0.9).add_(x.mean())
        return x

    with pytest.raises(CaptureError, match=r"buffer mean.*requires a gradient"):
        capture(job(Model(track, mean=torch.zeros(()))))


def test_a_write_to_a_parameter_is_refused() -> None:
    def clamp(module: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            module.gain.clamp_(-1, 1)
        clamped: Tensor = x * module.gain
        return clamped

    with pytest.raises(CaptureError, match=r"gain: the train graph writes to a parameter"):
        capture(job(Model(clamp, gain=nn.Parameter(torch.ones(8)))))


def test_a_write_to_a_tensor_that_is_no_buffer_is_refused() -> None:
    held = torch.zeros(8)

    def write(_: Any, x: Tensor) -> Tensor:
        held.add_(1)
        return x + held

    with pytest.raises(CaptureError, match="not a buffer"):
        capture(job(Model(write)))


def test_a_model_that_fails_on_another_size_is_refused_with_its_line() -> None:
    def picky(_: Any, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and x.shape[0] != 4:
            raise ValueError("four only")
        return x

    with pytest.raises(
        CaptureError, match=rf"(?s)test_parity\.py:{_line('four only')}.*5 rows.*four only"
    ):
        capture(job(Model(picky)))


def test_a_graph_that_fails_on_any_size_is_not_said_to_fail_on_another_size() -> None:
    def ensemble(m: Any, x: Tensor) -> Any:
        weights, biases = m.first.weight.expand(3, 8, 8), m.first.bias.expand(3, 8)
        # Under autocast, vmap of a linear layer gives float32, and the layer alone bfloat16.
        return (
            torch.func.vmap(lambda weight, bias: functional.linear(x, weight, bias))(
                weights, biases
            )
            .mean(0)
            .float()
        )

    with pytest.raises(
        CaptureError,
        match="fails on the example batch, but the model does not: RuntimeError: Tensor dtype",
    ) as caught:
        capture(job(Model(ensemble), loss=under_autocast))
    assert [finding.cause for finding in caught.value.findings] == ["differs-from-eager"]


@pytest.mark.slow  # test_errors.py covers this cause
def test_a_branch_on_data_names_file_line_and_cure() -> None:
    def branch(_: Any, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x

    line = _line("return x if x.sum() > 0")
    with pytest.raises(CaptureError, match=rf"(?s)test_parity\.py:{line}.*torch\.cond"):
        capture(job(Model(branch)))


@pytest.mark.slow  # test_errors.py covers this cause
def test_a_size_that_must_be_fixed_is_named_as_such() -> None:
    def fixed(_: Any, x: Tensor) -> Tensor:
        return x.view(4, 8)

    with pytest.raises(CaptureError, match="declared dynamic can have only one size"):
        capture(job(Model(fixed)))


def test_an_error_of_the_model_itself_names_file_and_line() -> None:
    def broken(_: Any, x: Tensor) -> Tensor:
        raise KeyError("not here")

    with pytest.raises(CaptureError, match=rf"test_parity\.py:{_line('raise KeyError')}"):
        capture(job(Model(broken)))


def test_a_trained_tensor_outside_of_the_model_is_refused() -> None:
    outside = torch.ones(8, requires_grad=True)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return mean_square(model, batch) + outside.sum()

    with pytest.raises(CaptureError, match="not part of the model"):
        capture(job(Model(), loss=loss))


def _line(text: str) -> int:
    """Return the number of the first line of this file that contains `text`."""
    lines = inspect.getsource(inspect.getmodule(_line)).splitlines()  # type: ignore[arg-type]
    return next(i for i, line in enumerate(lines, 1) if re.search(re.escape(text), line))


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_an_example_whose_loss_is_no_number_is_warned_of(value: str) -> None:
    batch = {"x": torch.full((4, 8), float(value))}
    with pytest.warns(
        UserWarning,
        match=r"loss of Job.batch is (nan|inf) in the train graph.*could not be compared",
    ):
        capture(job(Model(lambda _, x: x.relu()), batch=batch))
    with pytest.warns(
        UserWarning,
        match=r"There are NaNs in the input x\." if value == "nan" else r"with a finite loss\.$",
    ):
        capture(job(Model(lambda _, x: x.relu()), batch=batch))


def test_a_parameter_that_is_no_number_is_named() -> None:
    model = Model()
    nn.init.constant_(model.last.bias, float("nan"))
    with pytest.warns(UserWarning, match=r"There are NaNs in the parameter last\.bias\."):
        capture(job(model))


@pytest.mark.parametrize("weight", [-1.0, float("inf"), float("nan")])
def test_a_weight_that_no_mean_can_be_taken_over_is_refused(weight: float) -> None:
    def loss(model: nn.Module, batch: Batch) -> Loss:
        return Loss(mean_square(model, batch), batch["x"].sum() * 0 + weight)

    with pytest.raises(
        JobError, match=rf"the weight of the batch cannot be used .*got {weight:g}\)"
    ):
        capture(job(Model(), loss=loss))


def test_a_buffer_that_is_written_the_same_at_every_call_trains_as_eager(tmp_path: Path) -> None:
    def follows(m: Any, x: Tensor) -> Tensor:
        m.target.copy_(m.last.weight.detach().mean(0))
        moved: Tensor = x + m.target
        return moved

    rows = torch.randn(16, 8)
    assert_trains_as_eager(
        job(Model(follows, target=torch.zeros(8)), batch={"x": rows[:4]}), {"x": rows}, tmp_path
    )
