"""Launches on a GPU: training matches eager PyTorch; data and memory errors are reported.

`make gpu` runs these tests on a machine with a GPU.
"""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.launch.wide import ROWS as WIDE_ROWS
from tests.launch.wide import WIDTH as WIDE_WIDTH
from tests.launch.wide import wide_job
from torch import Tensor, nn, optim
from torch.nn import functional

import trainload
from trainload.core.errors import DataError, OutOfMemoryError
from trainload.launching.api.request import Backend
from trainload.launching.data.sampler import rows
from trainload.launching.described import described_build
from trainload.launching.described.described_gpu import is_this_machines
from trainload.launching.run.journal import Event, read_events
from trainload.launching.verification.row_limit import free_bytes
from trainload.packaging.package import Package
from trainload.sharding.planner.device import profile_of_product

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

WORDS, LENGTH, WIDTH, ROWS, STEPS, SEED = 97, 16, 32, 8, 6, 3
BAD = int(rows(SEED, ROWS * STEPS, ROWS, ROWS)[5])
"""A row of the second step."""
GIB = 2**30


class Words(nn.Module):
    """Model with attention; tokens (rows, LENGTH) -> logits (rows, LENGTH, WORDS). No dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(self.words(tokens)))
        return logits


def of_words(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    tokens = batch["tokens"]
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def in_bfloat16(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast(batch["tokens"].device.type, dtype=torch.bfloat16):
        return of_words(model, batch)


def adamw(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=3e-3)


def job(loss: Any = of_words) -> trainload.Job:
    torch.manual_seed(0)
    batch = {"tokens": torch.randint(WORDS, (4, LENGTH + 1))}
    return trainload.Job(
        Words(), batch, adamw, loss=loss, steps=STEPS, global_batch=ROWS, seed=SEED
    )


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return trainload.freeze(job(), tmp_path_factory.mktemp("words") / "job.tl")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return trainload.freeze(wide_job(), tmp_path_factory.mktemp("wide") / "job.tl")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINLOAD_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's own warnings
            ray.init(
                address="local",
                num_cpus=4,
                num_gpus=1,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        yield
        ray.shutdown()


@pytest.fixture(params=["local", "ray"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Backend of a run: the driver's own process, and Ray."""
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    found: Backend = request.param
    return found


def tokens(folder: Path, bad: int | None = None) -> Path:
    values = np.random.default_rng(0).integers(0, WORDS, (ROWS * STEPS, LENGTH + 1))
    if bad is not None:
        values[BAD, 3] = bad
    np.savez(folder / "rows.npz", tokens=values)
    return folder / "rows.npz"


def launched(
    package: Package,
    data: Path,
    folder: Path,
    backend: Backend,
    offload: float = 0.0,
    **options: Any,
) -> list[Event]:
    cluster = trainload.Cluster(device="cuda")
    plan = trainload.plan(package, cluster, "single", offload=offload)
    trainload.launch(package, plan, data, run_dir=folder / "run", backend=backend, **options)
    return list(read_events(folder / "run"))


def losses(events: list[Event]) -> Tensor:
    return torch.tensor([event.data["loss"] for event in events if event.kind == "step"])


def eager(of: trainload.Job, data: Path) -> Tensor:
    """Return the losses of a plain loop in float32 on the GPU."""
    model, values = copy.deepcopy(of.model).cuda(), torch.from_numpy(np.load(data)["tokens"]).cuda()
    optimizer, found = adamw(model), []
    for step in range(STEPS):
        optimizer.zero_grad()
        chosen = torch.as_tensor(rows(SEED, len(values), step * ROWS, ROWS))
        loss = of_words(model, {"tokens": values[chosen]})
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
        found.append(float(loss.detach()))
    return torch.tensor(found)


def warned(events: list[Event]) -> list[str]:
    return [event.data["message"] for event in events if event.kind == "warning"]


def test_a_run_trains_as_eager_and_no_graph_runs_interpreted(
    package: Package, tmp_path: Path, backend: Backend
) -> None:
    events = launched(package, tokens(tmp_path), tmp_path, backend)
    torch.testing.assert_close(
        losses(events), eager(job(), tmp_path / "rows.npz"), rtol=1e-4, atol=0
    )
    assert warned(events) == []


def test_in_bfloat16_too(tmp_path: Path) -> None:
    events = launched(
        trainload.freeze(job(in_bfloat16), tmp_path / "job.tl"), tokens(tmp_path), tmp_path, "local"
    )
    torch.testing.assert_close(
        losses(events), eager(job(), tmp_path / "rows.npz"), rtol=2e-2, atol=0
    )
    assert warned(events) == []


def test_a_resumed_run_is_the_same(package: Package, tmp_path: Path, backend: Backend) -> None:
    (tmp_path / "whole").mkdir()
    whole = losses(launched(package, tokens(tmp_path), tmp_path / "whole", backend))
    launched(package, tmp_path / "rows.npz", tmp_path, backend, steps=3, checkpoint_every=2)
    trainload.resume(tmp_path / "run", steps=STEPS, backend=backend)
    assert torch.equal(losses(list(read_events(tmp_path / "run"))), whole)


@pytest.mark.parametrize("options", [{"cuda_graphs": True}, {"offload": 1.0}, {"offload": 0.5}])
def test_neither_cuda_graphs_nor_offload_change_a_bit(
    package: Package, tmp_path: Path, options: dict[str, Any]
) -> None:
    (tmp_path / "whole").mkdir()
    whole = losses(launched(package, tokens(tmp_path), tmp_path / "whole", "local"))
    found = launched(package, tmp_path / "rows.npz", tmp_path, "local", **options)
    assert torch.equal(losses(found), whole)


@pytest.mark.parametrize("compiled", [False, True], ids=["interpreted", "compiled"])
def test_a_token_out_of_range_is_told_with_its_row(
    package: Package, tmp_path: Path, ray_cluster: None, compiled: bool
) -> None:
    # only on Ray: after a kernel's assertion, the process can no longer use its GPU
    with pytest.raises(DataError) as caught:
        launched(package, tokens(tmp_path, WORDS), tmp_path, "ray", compile=compiled)
    assert caught.value.where.startswith(f"step 2, row {BAD} of ")
    assert f"the value {WORDS} of input 'tokens' is out of range" in caught.value.problem
    assert [event.kind for event in read_events(tmp_path / "run")].count("start") == 1


def but(room: int) -> Tensor:
    """Allocate all of the GPU's memory except for `room` bytes."""
    torch.cuda.empty_cache()
    return torch.empty(free_bytes(torch.device("cuda", 0)) - room, dtype=torch.uint8, device="cuda")


def test_the_error_says_what_was_held_and_which_plan_needs_less(
    wide: Package, tmp_path: Path
) -> None:
    np.savez(tmp_path / "rows.npz", x=np.zeros((WIDE_ROWS, WIDE_WIDTH), np.float32))
    held = but(GIB // 2)
    with pytest.raises(OutOfMemoryError) as caught:
        launched(wide, tmp_path / "rows.npz", tmp_path, "local", compile=False)
    del held
    assert "rank 0 ran out of memory" in str(caught.value)
    assert re.search(
        r"A plan with --strategy single .*--accumulate \d+ was estimated to need", str(caught.value)
    )


def test_graphs_are_compared_on_fewer_rows_where_memory_is_short(
    wide: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(
        tmp_path / "rows.npz",
        x=np.random.default_rng(0).standard_normal((WIDE_ROWS, WIDE_WIDTH), np.float32),
    )
    for number in range(2):  # the second run compares nothing, so its peak is that of training
        torch.cuda.reset_peak_memory_stats()
        launched(wide, tmp_path / "rows.npz", tmp_path / f"free-{number}", "local")
    room = int(1.25 * torch.cuda.max_memory_allocated()) + 2**27
    monkeypatch.setenv("TRAINLOAD_CACHE_DIR", str(tmp_path / "cache"))  # graphs are compared again
    held = but(room)
    events = launched(wide, tmp_path / "rows.npz", tmp_path, "local")
    assert warned(events) == [] and len(losses(events)) == 2
    assert any(
        event.kind == "stage" and event.data["name"] == "compare compiled graphs"
        for event in events
    )
    # interpreted, all rows need more memory; the exception keeps computed tensors alive
    with pytest.raises(OutOfMemoryError):
        launched(wide, tmp_path / "rows.npz", tmp_path / "interpreted", "local", compile=False)
    del held


def test_this_gpu_is_as_its_profile_describes_it() -> None:
    """`trainload build --device` tells torch this on a machine without the GPU."""
    profile = profile_of_product(torch.cuda.get_device_name())
    if profile is None or profile.architecture is None:
        pytest.skip("there is no description of this GPU")
    told, found = profile.architecture, torch.cuda.get_device_properties(0)
    assert is_this_machines(profile)
    assert (told.threads, told.l2_bytes) == (
        found.max_threads_per_multi_processor,
        found.L2_cache_size,
    )


def test_a_build_for_this_gpu_is_verified_by_it(package: Package, tmp_path: Path) -> None:
    profile = profile_of_product(torch.cuda.get_device_name())
    if profile is None or profile.architecture is None:
        pytest.skip("there is no description of this GPU")
    plan = trainload.plan(package, trainload.Cluster(device="cuda"), "single")
    described_build.build_in_child(
        package, plan, tmp_path / "made.build", profile, lambda *_: None, is_deterministic=True
    )
    report = trainload.verify_build(
        tmp_path / "made.build", package, plan, tmp_path / "verified.build"
    )
    assert (report.unverified, report.interpreted) == ((), ())
