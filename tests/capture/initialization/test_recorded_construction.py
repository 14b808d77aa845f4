"""Constructions whose first values are recorded."""

from __future__ import annotations

import copy
import ctypes
import io
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from trainload import Job, freeze
from trainload.capture.initialization.initial_graphs import Initialization
from trainload.core.errors import JobError
from trainload.freezing.initial_values import proven_values, values_like
from trainload.freezing.recorded_job import RecordedJob, recorded_job


class Holder(nn.Module):
    """A model of any modules, parameters and buffers."""

    def add(self, **values: nn.Module | Tensor) -> Holder:
        for name, value in values.items():
            if isinstance(value, nn.Module | nn.Parameter):
                setattr(self, name, value)
            else:
                self.register_buffer(name, value)
        return self


def initialised(fill: Callable[[Tensor], object]) -> Callable[[int], nn.Module]:
    """Return a constructor of a matrix that a function fills."""

    def construct(size: int) -> nn.Module:
        layer = nn.Linear(size, 2 * size)
        with torch.no_grad():
            fill(layer.weight)
        return layer

    return construct


def teacher(size: int) -> nn.Module:
    student = nn.Linear(size, size)
    return Holder().add(student=student, teacher=copy.deepcopy(student).requires_grad_(False))


def fake_mode_of(tensor: Tensor) -> object:
    assert isinstance(tensor, FakeTensor)
    return tensor.fake_mode


def dependent_rows(size: int) -> nn.Module:
    weight = torch.randn(size, 8)
    for i in range(1, size):
        weight[i] = weight[i - 1] * 0.9 + weight[i]
    return Holder().add(weight=nn.Parameter(weight))


def masked(size: int) -> nn.Module:
    numbers = torch.arange(float(size))
    return Holder().add(large=numbers[numbers > 3], where=(numbers > 3).nonzero())


def contiguous(size: int) -> nn.Module:
    values = torch.randn(size, 4).t().contiguous().view(-1)
    return Holder().add(unit=values / values.norm(), total=values.cumsum(0))


def bits(size: int) -> nn.Module:
    values = torch.randn(size, size)
    values.view(torch.int32).bitwise_and_(0x7FFFFFFF)  # the sign
    return Holder().add(values=values)


def nothing(size: int) -> nn.Module:
    values = torch.randn(size, 4)
    values[2:2] = torch.randn(0, 4)
    return Holder().add(values=values, empty=torch.randn(0, 3))


def lazy(size: int) -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(size))
    model(torch.zeros(2, size))
    return model


def copied_model(size: int) -> nn.Module:
    return copy.deepcopy(nn.Sequential(nn.Linear(size, size), nn.BatchNorm1d(size), rotary(size)))


def positions(size: int) -> nn.Module:
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(64.0), frequencies)
    table = torch.zeros(64, size)
    table[:, 0::2], table[:, 1::2] = angles.sin(), angles.cos()
    return Holder().add(table=table)


def rotary(size: int) -> nn.Module:
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size)
    return Holder().add(frequencies=frequencies, copied=frequencies.clone())


def mask(size: int) -> nn.Module:
    return Holder().add(mask=torch.tril(torch.ones(size, size, dtype=torch.bool)))


def depth_decay(size: int) -> nn.Module:
    rates = [float(x) for x in torch.linspace(0, 0.5, 4)]
    layers = [nn.Linear(size, size) for _ in rates]
    for layer, rate in zip(layers, rates, strict=True):
        layer.weight.data.mul_(1.0 - rate)
    return nn.Sequential(*layers)


def halves(size: int) -> nn.Module:
    weight = torch.empty(2 * size, size)
    weight[:size].normal_(0.0, 0.1)
    weight[size:] = 0.0
    return Holder().add(weight=nn.Parameter(weight))


def permuted(size: int) -> nn.Module:
    return Holder().add(weight=nn.Parameter(torch.randn(size, 2, size).permute(2, 0, 1)))


def copied_over(size: int) -> nn.Module:
    first, second = nn.Linear(size, size), nn.Linear(size, size)
    second.load_state_dict(first.state_dict())
    return nn.Sequential(first, second)


def tied(size: int) -> nn.Module:
    embedding, head = nn.Embedding(16, size), nn.Linear(size, 16, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, head)


def to_bfloat16(size: int) -> nn.Module:
    return nn.Linear(size, size).to(torch.bfloat16)


def default_dtype(size: int) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return Holder().add(
            layer=nn.Linear(size, size), ratio=torch.arange(size) / 4, zeros=torch.zeros(size)
        )
    finally:
        torch.set_default_dtype(before)


def own_generator(size: int) -> nn.Module:
    generator = torch.Generator().manual_seed(7)
    return Holder().add(weight=nn.Parameter(torch.randn(size, size, generator=generator)))


def scaled_embedding(size: int) -> nn.Module:
    embedding = nn.Embedding(64, size, padding_idx=3)
    nn.init.normal_(embedding.weight, std=1 / math.sqrt(size))
    embedding.weight.data[3] = 0
    return embedding


CONSTRUCTIONS: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda size: nn.Linear(size, size),
    "convolution": lambda size: nn.Conv2d(size, 4, 3),
    "normalization": lambda size: nn.BatchNorm2d(size),
    "embedding": scaled_embedding,
    "attention": lambda size: nn.MultiheadAttention(size, 2),
    "transformer": lambda size: nn.TransformerEncoderLayer(size, 2),
    "recurrent": lambda size: nn.GRU(size, size, num_layers=2),
    "bilinear": lambda size: nn.Bilinear(size, 3, 4),
    "weight norm": lambda size: nn.utils.parametrizations.weight_norm(nn.Linear(size, size)),
    "spectral norm": lambda size: nn.utils.parametrizations.spectral_norm(nn.Linear(size, size)),
    "normal": initialised(lambda w: nn.init.normal_(w, 0.5, 0.02)),
    "data": initialised(lambda w: w.data.normal_(0.0, 0.02)),
    "truncated normal": initialised(lambda w: nn.init.trunc_normal_(w, std=0.02)),
    "narrow truncated normal": initialised(lambda w: nn.init.trunc_normal_(w, 0.0, 1.0, 0.5, 1.0)),
    "xavier": initialised(nn.init.xavier_uniform_),
    "orthogonal": initialised(nn.init.orthogonal_),
    "identity": initialised(nn.init.eye_),
    "sparse": initialised(lambda w: nn.init.sparse_(w, 0.1)),
    "constant": initialised(lambda w: w.fill_(0.25)),
    "log normal": initialised(lambda w: w.log_normal_()),
    "exponential": initialised(lambda w: w.exponential_(2.0)),
    "cauchy": initialised(lambda w: w.cauchy_()),
    "geometric": initialised(lambda w: w.geometric_(0.25)),
    "bernoulli": initialised(lambda w: w.bernoulli_(0.25)),
    "normal of tensors": initialised(
        lambda w: w.copy_(torch.normal(torch.ones_like(w), torch.full_like(w, 0.5)))
    ),
    "chained calls": initialised(lambda w: [w.mul_(0.999) for _ in range(300)]),
    "rows in turn": initialised(lambda w: [row.normal_() for row in w]),
    "rows that depend on rows": dependent_rows,
    "masked": masked,
    "contiguous": contiguous,
    "bits": bits,
    "no elements": nothing,
    "copied view": lambda size: Holder().add(x=copy.deepcopy(torch.randn(2 * size, 8)[:size])),
    "lazy": lazy,
    "integers": initialised(lambda w: w.copy_(torch.randint(-3, 3, w.shape))),
    "permutation": initialised(lambda w: w.copy_(w[torch.randperm(w.shape[0])])),
    "row norm": initialised(lambda w: w.div_(w.norm(dim=1, keepdim=True))),
    "erfinv": initialised(lambda w: w.uniform_(-0.9, 0.9).erfinv_().mul_(0.02)),
    "through a transposed view": initialised(lambda w: w.t().normal_()),
    "teacher": teacher,
    "copied model": copied_model,
    "positions": positions,
    "rotary": rotary,
    "mask": mask,
    "depth decay": depth_decay,
    "halves": halves,
    "permuted": permuted,
    "copied over": copied_over,
    "tied": tied,
    "bfloat16": to_bfloat16,
    "default dtype": default_dtype,
    "generator": own_generator,
}


OTHER_CALLS = {"sparse", "rows in turn", "rows that depend on rows", "copied view", "lazy"}
"""Constructions with other calls for another size, or without values."""


def job_of(model: nn.Module) -> Job:
    return Job(model=model, batch={"x": torch.zeros(1)}, loss=lambda m, b: b["x"].sum())


def recorded(construct: Callable[[], nn.Module], *, values: bool = True) -> RecordedJob:
    return recorded_job(lambda: job_of(construct()), values=values)


def proven(construct: Callable[[], nn.Module]) -> Initialization:
    found = proven_values(recorded(construct))
    assert found is not None
    return found


@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_every_value_is_computed_again(name: str) -> None:
    found = proven(lambda: CONSTRUCTIONS[name](16))
    assert found.values
    assert found.missing == {}


@pytest.mark.parametrize("name", sorted(CONSTRUCTIONS.keys() - OTHER_CALLS))
def test_without_values_the_graphs_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reduced = proven(lambda: CONSTRUCTIONS[name](8))
    monkeypatch.setattr("trainload.capture.initialization.construction_recorder.LIMIT", 1000)
    found = values_like(recorded(lambda: CONSTRUCTIONS[name](16), values=False), reduced)
    assert found is not None
    assert found.values
    assert found.missing == {}


def missing(construct: Callable[[], nn.Module]) -> dict[str, str]:
    return dict(proven(construct).missing)


def rejecting(weight: Tensor) -> None:
    while float(weight.normal_().abs().max()) > 2.5:
        pass


def test_values_that_depend_on_a_random_value_in_python_are_missing() -> None:
    found = missing(lambda: initialised(rejecting)(4))
    assert found.keys() == {"weight"}
    assert "test_recorded_construction.py:" in found["weight"]


def test_without_values_a_random_value_in_python_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainload.capture.initialization.construction_recorder.LIMIT", 1000)
    with pytest.raises(JobError, match="reads a value that is not computed") as caught:
        recorded(lambda: initialised(rejecting)(64), values=False)
    assert "test_recorded_construction.py:" in caught.value.where


def test_small_tables_from_elsewhere_are_constants() -> None:
    found = proven(lambda: Holder().add(table=torch.from_numpy(np.ones(256, dtype=np.float32))))
    assert found.missing == {}
    assert [len(each) for each in found.constants] == [256]


ELSEWHERE = nn.Linear(4, 4)


def in_a_thread() -> nn.Module:
    models: list[nn.Module] = []
    thread = threading.Thread(target=lambda: models.append(nn.Linear(4, 4)))
    thread.start()
    thread.join()
    return models[0]


@pytest.mark.parametrize("construct", [lambda: ELSEWHERE, in_a_thread])
def test_parameters_that_were_constructed_elsewhere_are_missing(
    construct: Callable[[], nn.Module],
) -> None:
    found = missing(construct)
    assert found.keys() == {"weight", "bias"}
    assert "elsewhere" in found["weight"]


def listed(weight: Tensor) -> None:
    weight.normal_(std=torch.rand(1).tolist()[0])


def arrayed(weight: Tensor) -> None:
    weight.copy_(torch.from_numpy(torch.rand_like(weight).numpy() * 2))


def saved(weight: Tensor) -> None:
    file = io.BytesIO()
    torch.save(torch.rand_like(weight), file)
    file.seek(0)
    weight.copy_(torch.load(file))  # noqa: TID251 - what users write


@pytest.mark.parametrize("fill", [listed, arrayed, saved])
def test_values_that_depend_on_a_random_list_or_array_are_missing(
    fill: Callable[[Tensor], None],
) -> None:
    assert missing(lambda: initialised(fill)(4)).keys() == {"weight"}


def test_a_random_value_that_is_read_later_does_not_matter() -> None:
    def construct() -> nn.Module:
        layer = nn.Linear(4, 4)
        assert torch.rand(3).max().item() < 1
        functional.one_hot(torch.randint(0, 10, (8,)))
        return layer

    assert missing(construct) == {}


@pytest.mark.parametrize("read", [lambda s: s.tolist()[0], lambda s: s.numpy()[0], float])
def test_a_small_tensor_with_unknown_values_cannot_be_read(
    read: Callable[[Tensor], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainload.capture.initialization.construction_recorder.LIMIT", 1000)

    def construct() -> nn.Module:
        total = torch.zeros(1)
        total.copy_(torch.ones(64, 64).sum())
        return Holder().add(filled=torch.full((8,), read(total)))

    with pytest.raises(JobError, match="reads a value that is not computed"):
        recorded(construct, values=False)


def test_complex_draws_are_missing() -> None:
    found = missing(lambda: Holder().add(x=torch.randn(4, dtype=torch.complex64)))
    assert "complex" in found["x"]


def test_a_changed_draw_of_tensors_is_missing() -> None:
    def construct() -> nn.Module:
        values = torch.normal(torch.zeros(4, 4), torch.ones(4, 4))
        order = torch.randperm(10)
        Tensor.numpy(values)[:] *= 5
        Tensor.numpy(order)[:] = np.arange(10)
        return Holder().add(values=values, order=order)

    assert missing(construct).keys() == {"values", "order"}


def test_sparse_buffers_are_left_to_the_check_of_the_model() -> None:
    found = recorded(lambda: Holder().add(x=torch.eye(4).to_sparse()))
    assert found.tensors == {}


def test_control_flow_in_a_constructor_is_executed() -> None:
    def construct() -> nn.Module:
        x = torch.ones(3)
        return Holder().add(x=torch.cond(x.sum() > 2, lambda x: x + 1, lambda x: x - 1, (x,)))

    assert torch.equal(recorded(construct).job.model.x, torch.full((3,), 2.0))  # type: ignore[arg-type]  # a tensor


class Branch(nn.Module):
    """A model whose constructor and forward both choose by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sign", self.forward(torch.ones(3)))

    def forward(self, x: Tensor) -> Tensor:
        chosen: Tensor = torch.cond(x.sum() > 2, lambda x: x + 1, lambda x: x - 1, (x,))
        return chosen


def test_control_flow_in_a_constructor_leaves_that_of_the_model_exportable() -> None:
    model = recorded(Branch).job.model
    assert isinstance(model, nn.Module)
    program = torch.export.export(model, (torch.zeros(3),), strict=False)
    assert torch.equal(program.module()(torch.zeros(3)), torch.full((3,), -1.0))


def test_what_compiled_code_computes_is_recorded() -> None:
    fill = torch.compile(lambda x: x * 2 + 1)
    found = proven(lambda: Holder().add(x=nn.Parameter(fill(torch.randn(4, 8)))))
    assert found.missing == {}


def test_copies_keep_gradients_and_shared_memory() -> None:
    pairs: list[Any] = []

    def construct() -> nn.Module:
        x = torch.randn(4, requires_grad=True)
        x.grad = torch.ones(4)
        y = torch.zeros(4)
        pairs.append(copy.deepcopy((x, y, y.view(2, 2))))
        return nn.Linear(2, 2)

    recorded(construct)
    x, y, view = pairs[0]
    assert torch.equal(x.grad, torch.ones(4))
    assert y.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()


def test_a_model_in_place_of_a_job_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="Job"):
        freeze(nn.Linear(2, 2), tmp_path / "job.tl")


def test_large_tables_from_elsewhere_are_missing() -> None:
    table = np.ones((600, 600), dtype=np.float32)
    assert missing(lambda: Holder().add(table=torch.from_numpy(table))).keys() == {"table"}


def test_a_tensor_that_is_never_written_is_missing() -> None:
    def construct() -> nn.Module:
        weight = torch.full((64, 64), 3.0)
        del weight  # its memory, with its values, may be that of the parameter
        return Holder().add(weight=nn.Parameter(torch.empty(64, 64)))

    assert missing(construct).keys() == {"weight"}


def test_a_tensor_that_is_changed_outside_of_torch_is_missing() -> None:
    def construct() -> nn.Module:
        layer = nn.Linear(16, 16)
        ctypes.c_float.from_address(layer.weight.data_ptr() + 4 * 52).value = 7.0
        return layer

    reason = missing(construct)["weight"]
    assert "element 52" in reason
    assert "7.0" in reason


def test_what_needs_too_much_memory_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainload.freezing.initial_values.WHOLE_LIMIT", 1000)
    found = proven(lambda: initialised(nn.init.orthogonal_)(16))
    assert found.missing.keys() == {"weight"}
    assert "GiB" in found.missing["weight"]
    assert found.values.keys() == {"bias"}


@pytest.mark.parametrize("fill", [nn.init.xavier_uniform_, lambda w: w.normal_().exp_()])
def test_other_code_in_the_large_job_is_missing(fill: Callable[[Tensor], object]) -> None:
    reduced = proven(lambda: initialised(lambda w: w.normal_())(8))
    found = values_like(recorded(lambda: initialised(fill)(64), values=False), reduced)
    assert found is not None
    assert found.missing == {"weight": "it is computed otherwise than in the reduced job"}


def test_copies_have_the_draws_of_their_originals() -> None:
    values = proven(lambda: teacher(16)).values
    assert values["teacher.weight"].draws == values["student.weight"].draws
    assert values["student.weight"].draws != values["student.bias"].draws


def test_a_copy_of_a_tensor_without_values_has_its_mode() -> None:
    """A copied mode would free the mode's weak references to storages a second time."""
    model = recorded(lambda: teacher(1024), values=False).job.model
    assert isinstance(model, Holder)
    modes = {fake_mode_of(module.get_parameter("weight")) for module in model.children()}
    assert len(modes) == 1


def test_layers_of_one_shape_share_a_graph() -> None:
    found = proven(lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(8))))
    assert len(found.graphs) == 2
    assert len({value.draws for value in found.values.values()}) == 16


def test_large_models_take_no_memory() -> None:
    def construct() -> nn.Module:
        return nn.Linear(2**20, 2**20)  # 4 TiB

    found = values_like(recorded(construct, values=False), proven(lambda: nn.Linear(8, 8)))
    assert found is not None
    assert found.missing == {}


def test_the_default_device_of_the_code_remains_the_cpu() -> None:
    devices: list[torch.device] = []

    def construct() -> nn.Module:
        layer = nn.Linear(1024, 1024)
        devices.append(layer.weight.device)
        return layer

    recorded(construct, values=False)
    assert devices == [torch.device("cpu")]


def test_a_job_that_was_constructed_elsewhere_has_no_first_values() -> None:
    assert proven_values(recorded_job(job_of(nn.Linear(2, 2)), values=True)) is None
