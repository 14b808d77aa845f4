"""Tensor subclasses without behavior are captured as tensors.

Others are rejected with the name of the tensor and its class.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.capture.jobs import Model, job
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from trainload.capture.job.tensor_classes import behaviour_of
from trainload.capture.tracing.trace import capture
from trainload.core.errors import CaptureError
from trainload.core.finding import LINES

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support",
    "ignore:The PyTorch API of MaskedTensors",
    "ignore:The PyTorch API of nested",
    "ignore:.*[Qq]uantiz",
)


class Marked(Tensor):
    """Adds only a name."""


class MarkedParameter(nn.Parameter):
    """Adds only a name and an attribute."""

    note = "attention"


class Doubling(Tensor):
    """Doubles the result of a linear layer."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        base: Any = super()
        result: Any = base.__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is nn.functional.linear else result


class Renamed(Tensor):
    """Overrides a method of Tensor."""

    def relu(self) -> Tensor:
        return self * 2


class Pair(Tensor):
    """Two tensors in one, like torch's TwoTensor."""

    a: Tensor
    b: Tensor

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor) -> Any:
        make: Any = Tensor._make_wrapper_subclass
        return make(cls, a.shape, dtype=a.dtype, device=a.device, requires_grad=a.requires_grad)

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a, self.b = a, b

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: None, size: Any, stride: Any
    ) -> Pair:
        return Pair(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's stub
        def half(name: str) -> Any:
            return func(
                *(getattr(x, name) if isinstance(x, Pair) else x for x in args), **(kwargs or {})
            )

        a, b = half("a"), half("b")
        return cls(a, b) if isinstance(a, Tensor) else a


class Quantised(Pair):
    """An int8 payload and its scale."""

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor) -> Any:
        make: Any = Tensor._make_wrapper_subclass
        return make(cls, a.shape, dtype=b.dtype, device=a.device)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A device mesh with one rank."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{tmp_path_factory.mktemp('store') / 'store'}",
        rank=0,
        world_size=1,
    )
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def rows() -> Tensor:
    return torch.randn(4, 8)


def quantised(x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


def fake(x: Tensor) -> Tensor:
    from trainload.autograd_trace.derivation.aot import fake_mode

    with fake_mode():
        return torch.empty(x.shape)


KINDS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a class with a torch function": (lambda x: x.as_subclass(Doubling), "Doubling"),
    "a class that overrides a method": (lambda x: x.as_subclass(Renamed), "Renamed"),
    "a wrapper": (lambda x: Pair(x, x), "Pair"),
    "a quantised wrapper": (lambda x: Quantised(x.to(torch.int8), torch.tensor(0.1)), "Quantised"),
    "a jagged tensor": (
        lambda x: torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged),
        "NestedTensor",
    ),
    "a masked tensor": (lambda x: torch.masked.masked_tensor(x, x > 0), "MaskedTensor"),
    "a sparse tensor": (lambda x: x.to_sparse(), "torch.sparse_coo"),
    "a compressed sparse tensor": (lambda x: x.to_sparse_csr(), "torch.sparse_csr"),
    "a quantised tensor": (quantised, "quantised"),
    "a fake tensor": (fake, "FakeTensor"),
    "a meta tensor": (lambda x: x.to("meta"), "meta"),
}
every_kind = pytest.mark.parametrize(("make", "named"), KINDS.values(), ids=list(KINDS))


def refusal(model: nn.Module, **options: Any) -> CaptureError:
    with pytest.raises(CaptureError) as raised:
        capture(job(model, **options))
    text = str(raised.value)
    assert len(text.splitlines()) <= LINES
    return raised.value


# Captured


@pytest.mark.parametrize("cls", [Marked, MarkedParameter])
def test_a_parameter_of_a_class_without_behaviour_is_captured(cls: Any) -> None:
    model = Model()
    weight = model.first.weight.detach()
    model.first.weight = (
        cls(weight) if cls is MarkedParameter else nn.Parameter(weight.as_subclass(cls))
    )
    program = capture(job(model))
    assert type(program.state["first.weight"]) is Tensor
    assert torch.equal(program.state["first.weight"], weight)


def test_a_buffer_of_a_class_without_behaviour_is_captured() -> None:
    model = Model(lambda m, x: x + m.shift, shift=torch.randn(8).as_subclass(Marked))
    assert type(capture(job(model)).state["shift"]) is Tensor


def test_an_input_of_a_class_without_behaviour_is_captured() -> None:
    assert (
        capture(job(Model(), batch={"x": rows().as_subclass(Marked)}))
        .graphs["train"]
        .inputs[0]
        .name
        == "x"
    )


def test_a_branch_on_the_class_of_an_input_is_no_wrong_result() -> None:
    def marked(_: Any, x: Tensor) -> Tensor:
        return x * 2 if isinstance(x, Marked) else x

    with pytest.raises(CaptureError, match="differs from eager"):
        capture(job(Model(marked), batch={"x": rows().as_subclass(Marked)}))


def test_what_a_class_says_of_its_printing_is_no_behaviour() -> None:
    assert (
        behaviour_of(type("Shown", (Tensor,), {"__repr__": lambda self: "x", "__deepcopy__": None}))
        == ()
    )


# Rejected before tracing


@every_kind
def test_an_input_is_refused_by_name_and_class(
    make: Callable[[Tensor], Tensor], named: str
) -> None:
    error = refusal(Model(), batch={"x": make(rows())})
    assert "the input x" in str(error)
    assert named in str(error)
    assert error.findings[0].rewrite


@every_kind
def test_a_buffer_is_refused_by_name_and_class(
    make: Callable[[Tensor], Tensor], named: str
) -> None:
    error = refusal(Model(table=make(rows())))
    assert "the buffer table" in str(error)
    assert named in str(error)
    assert "model." in error.findings[0].rewrite or "model" in error.findings[0].rewrite


@pytest.mark.parametrize("make", [Doubling, Pair, "sparse", "meta", "uninitialised"], ids=str)
def test_a_parameter_is_refused_by_name(make: Any) -> None:
    model = Model()
    weight = model.first.weight.detach()
    made: dict[Any, Callable[[], Any]] = {
        Doubling: lambda: nn.Parameter(weight.as_subclass(Doubling)),
        Pair: lambda: nn.Parameter(Pair(weight, weight.clone())),
        "sparse": lambda: nn.Parameter(weight.to_sparse()),
        "meta": lambda: nn.Parameter(weight.to("meta")),
        "uninitialised": nn.UninitializedParameter,
    }
    model.first.weight = made[make]()
    assert "the parameter first.weight" in str(refusal(model))


def test_all_such_parameters_are_listed() -> None:
    with torch.device("meta"):
        model = Model()
    assert [finding.sentence.split()[2] for finding in refusal(model).findings] == [
        "first.weight",
        "first.bias",
        "last.weight",
        "last.bias",
    ]


def test_a_distributed_parameter_is_refused_with_the_tensor_in_its_place(mesh: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    model = Model()
    model.first.weight = nn.Parameter(
        distribute_tensor(model.first.weight.detach(), mesh, [Shard(0)])
    )
    assert "model.first.weight.full_tensor()" in refusal(model).findings[0].rewrite


def test_the_rewrite_of_a_wrapper_names_what_it_wraps() -> None:
    model = Model()
    model.first.weight = nn.Parameter(
        Quantised(torch.ones(8, 8, dtype=torch.int8), torch.tensor(0.1))
    )
    rewrite = refusal(model).findings[0].rewrite
    assert 'model.first.register_buffer("weight_a", wrapped.a)' in rewrite
    assert "model.first.weight_b = nn.Parameter(wrapped.b.detach())" in rewrite


def test_the_rewrite_of_an_input_can_be_pasted() -> None:
    batch: dict[str, Any] = {"x": rows().as_subclass(Doubling)}
    exec(refusal(Model(), batch=batch).findings[0].rewrite, {"torch": torch, "batch": batch})
    capture(job(Model(), batch=batch))


# Rejected where forward uses them


@pytest.mark.parametrize("kind", [k for k in KINDS if "meta" not in k and "fake" not in k])
def test_a_constant_is_refused_by_name_and_line(kind: str) -> None:
    make, _ = KINDS[kind]

    def used(m: Any, x: Tensor) -> Any:
        return x @ m.table

    model = Model(used)
    vars(model)["table"] = make(torch.randn(8, 8))
    error = refusal(model)
    assert "the constant table" in str(error)
    assert error.findings[0].place is not None
    assert error.findings[0].place.expression == "x @ m.table"


def test_a_sparse_matrix_that_forward_does_not_use_is_no_reason() -> None:
    model = Model()
    vars(model)["table"] = torch.eye(8).to_sparse()
    assert set(capture(job(model)).graphs) == {"train", "eval"}


def test_a_fake_constant_is_refused_before_the_trace() -> None:
    model = Model()
    vars(model)["table"] = fake(rows())
    assert "the constant table" in str(refusal(model))


def test_a_wrapper_that_forward_makes_is_refused_at_its_use() -> None:
    def wrapped(_: Any, x: Tensor) -> Any:
        pair: Any = Pair(x, x * 2)
        return (pair + 1).a

    error = refusal(Model(wrapped))
    assert error.findings[0].cause == "tensor-class"
    assert error.findings[0].place is not None
    assert error.findings[0].place.expression == "pair + 1"


def test_a_method_that_only_the_parameter_s_class_has_is_named() -> None:
    class Own(nn.Parameter):
        def halved(self) -> Tensor:
            return self / 2

    class Halving(Model):
        def forward(self, x: Tensor) -> Tensor:
            weight: Any = self.first.weight
            result: Tensor = x @ weight.halved()
            return result

    model = Halving()
    model.first.weight = Own(torch.randn(8, 8))
    error = refusal(model)
    assert error.findings[0].cause == "tensor-class"
    assert error.findings[0].place is not None
    assert "halved" in error.findings[0].place.expression
