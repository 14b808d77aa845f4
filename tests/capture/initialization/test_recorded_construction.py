"""Constructions whose first values are recorded."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trainload import Job
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
    "bernoulli of a tensor": initialised(lambda w: w.copy_(torch.bernoulli(torch.rand_like(w)))),
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


@pytest.mark.parametrize("name", sorted(CONSTRUCTIONS.keys() - {"sparse"}))
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


def from_numpy(size: int) -> nn.Module:
    layer = nn.Linear(size, size)
    layer.weight.data = torch.from_numpy(np.ones((size, size), dtype=np.float32))
    return layer


def test_values_that_depend_on_a_random_value_in_python_are_missing() -> None:
    found = missing(lambda: initialised(rejecting)(4))
    assert found.keys() == {"weight", "bias"}
    assert "test_recorded_construction.py:" in found["weight"]


def test_without_values_a_random_value_in_python_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainload.capture.initialization.construction_recorder.LIMIT", 1000)
    with pytest.raises(JobError, match="reads a value that is not computed") as caught:
        recorded(lambda: initialised(rejecting)(64), values=False)
    assert "test_recorded_construction.py:" in caught.value.where


def test_small_values_from_elsewhere_are_constants() -> None:
    found = proven(lambda: from_numpy(16))
    assert found.missing == {}
    assert [len(each) for each in found.constants] == [256]


def test_large_values_from_elsewhere_are_missing() -> None:
    assert missing(lambda: from_numpy(600)).keys() == {"weight"}


def test_a_tensor_that_is_never_written_is_missing() -> None:
    def construct() -> nn.Module:
        weight = torch.full((64, 64), 3.0)
        del weight  # its memory, with its values, may be that of the parameter
        return Holder().add(weight=nn.Parameter(torch.empty(64, 64)))

    assert missing(construct).keys() == {"weight"}


def test_a_tensor_that_is_changed_outside_of_torch_is_missing() -> None:
    def construct() -> nn.Module:
        layer = nn.Linear(16, 16)
        layer.weight.detach().numpy()[3, 4] = 7.0
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
