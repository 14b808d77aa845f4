"""PyTorch's global settings in the caller of a freeze or launch do not change the results."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.laws.runs import curve
from torch import Tensor, nn, optim
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import trainload
from trainload import CaptureError, Job, RequestError
from trainload.capture.job.ambient import neutral
from trainload.packaging.package import Package


class Model(nn.Module):
    """Model with operations that the settings affect: matrix products, attention, a factory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(8, 8)
        self.second = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden, _ = self.second(hidden, hidden, hidden, need_weights=False)
        loss: Tensor = (hidden * torch.ones(8, dtype=hidden.dtype)).square().mean()
        return loss


class Divides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = ((x.long() / 3) * self.weight).mean()
        return loss


def seeded(model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return model()


def job() -> Job:
    return Job(
        seeded(Model),
        {"x": torch.arange(24).reshape(4, 6) % 8},
        lambda m: optim.AdamW(m.parameters(), lr=0.01),
    )


@contextlib.contextmanager
def put(setter: Callable[..., object], value: object, back: object) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(back)


@contextlib.contextmanager
def everything() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, setting in SETTINGS.items():
            if name != EVERYTHING:
                stack.enter_context(setting())
        yield


EVERYTHING = "everything"
SETTINGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    EVERYTHING: everything,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "default dtype": lambda: put(torch.set_default_dtype, torch.float64, torch.float32),
    "default device": lambda: torch.device("meta"),
    "matmul precision": lambda: put(torch.set_float32_matmul_precision, "medium", "highest"),
    "deterministic": lambda: put(torch.use_deterministic_algorithms, True, False),
    "anomaly detection": lambda: put(torch.autograd.set_detect_anomaly, True, False),
    "attention": lambda: torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return trainload.freeze(job(), tmp_path_factory.mktemp("plain") / "job.tl")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.npz"
    np.savez(path, x=np.arange(96).reshape(16, 6) % 8)
    return path


@pytest.fixture(scope="module")
def expected(plain: Package, data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return launched(plain, data, tmp_path_factory.mktemp("run"))


def launched(package: Package, data: Path, folder: Path) -> list[float]:
    plan = trainload.plan(package, trainload.Cluster(), "single")
    result = trainload.launch(
        package, plan, data, run_dir=folder / "run", backend="local", compile=False, steps=3
    )
    return curve(Path(result.run_dir))


@pytest.mark.matrix(EVERYTHING)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_freeze_gives_the_same_package_and_warns_of_autocast(
    name: str, plain: Package, tmp_path: Path
) -> None:
    given, warned = job(), name in (EVERYTHING, "autocast")
    told = (
        pytest.warns(UserWarning, match=r"freeze was called under torch\.autocast\('cpu'\)")
        if warned
        else contextlib.nullcontext()
    )
    with SETTINGS[name](), told:
        package = trainload.freeze(given, tmp_path / "job.tl")
    assert package.digest == plain.digest


@pytest.mark.matrix(EVERYTHING)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_has_the_same_losses(
    name: str, plain: Package, data: Path, expected: list[float], tmp_path: Path
) -> None:
    with SETTINGS[name]():
        assert launched(plain, data, tmp_path) == expected


@pytest.mark.parametrize("name", SETTINGS)
def test_what_was_set_is_set_again_afterwards(name: str) -> None:
    with SETTINGS[name]():
        before = settings()
        with neutral():
            assert settings() == FRESH
        assert settings() == before


def settings() -> tuple[object, ...]:
    sdp: Any = torch.backends.cuda
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        sdp.flash_sdp_enabled(),
        sdp.mem_efficient_sdp_enabled(),
        sdp.math_sdp_enabled(),
        torch.is_anomaly_enabled(),
    )


FRESH = (
    True,
    False,
    False,
    torch.float32,
    torch.device("cpu"),
    "highest",
    False,
    True,
    True,
    True,
    False,
)


class Doubles(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return func(*args, **(kwargs or {})) * (2 if func is torch.Tensor.mean else 1)


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "Doubles": Doubles,
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "FakeTensorMode": FakeTensorMode,
    "torch.autograd.graph.saved_tensors_hooks": torch.autograd.graph.save_on_cpu,
}


@pytest.mark.parametrize("name", MODES)
def test_a_mode_around_a_freeze_is_refused_by_name(name: str, tmp_path: Path) -> None:
    given = job()
    with (
        MODES[name](),
        pytest.raises(RequestError, match=rf"not part of the job.*got {re.escape(name)}\)"),
    ):
        trainload.freeze(given, tmp_path / "job.tl")


@pytest.mark.parametrize("name", MODES)
def test_a_mode_around_a_launch_is_refused_by_name(
    name: str, plain: Package, data: Path, tmp_path: Path
) -> None:
    with (
        MODES[name](),
        pytest.raises(RequestError, match=rf"not part of the job.*got {re.escape(name)}\)"),
    ):
        launched(plain, data, tmp_path)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.functionalize])
def test_a_transform_around_a_freeze_is_refused_by_name(
    transform: Callable[..., Any], tmp_path: Path
) -> None:
    given = job()

    def frozen(x: Tensor) -> Tensor:
        trainload.freeze(given, tmp_path / "job.tl")
        return x.sum()

    with pytest.raises(
        RequestError, match=rf"not part of the job.*got torch\.func\.{transform.__name__}\)"
    ):
        transform(frozen)(torch.ones(2))


def test_a_matmul_precision_of_the_new_kind_is_put_back() -> None:
    backend = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # created at run time
    before = backend.fp32_precision
    try:
        backend.fp32_precision = "bf16"
        with neutral():
            assert backend.fp32_precision == "ieee"
        assert backend.fp32_precision == "bf16"
    finally:
        torch.set_float32_matmul_precision("highest")
        backend.fp32_precision = before


def test_a_loss_that_a_default_dtype_changes_is_refused(tmp_path: Path) -> None:
    given = Job(
        seeded(Divides), {"x": torch.ones(4, 4)}, lambda m: optim.SGD(m.parameters(), lr=0.1)
    )
    with (
        SETTINGS["default dtype"](),
        pytest.raises(
            CaptureError,
            match=r"(?s)differs from eager mode in its loss.*set_default_dtype\(torch\.float64\)",
        ),
    ):
        trainload.freeze(given, tmp_path / "job.tl")


@pytest.mark.parametrize("name", ["second.in_proj_weight", "mask"])
def test_a_model_that_was_made_in_inference_mode_is_refused_by_its_tensor(
    name: str, tmp_path: Path
) -> None:
    given = job()
    module = given.model.get_submodule(name.rpartition(".")[0])
    with torch.inference_mode():
        if name == "mask":
            module.register_buffer(name, torch.ones(8))
        else:
            module.in_proj_weight = nn.Parameter(torch.ones(24, 8))
    with pytest.raises(
        trainload.JobError, match=f"{name}: the (parameter|buffer) was created in inference mode"
    ):
        trainload.freeze(given, tmp_path / "job.tl")
