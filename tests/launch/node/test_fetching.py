"""Packages in stores are fetched once per node and run like any other.

They must be the package that the run was launched with.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.launch.checkpoint_places import Wire, wire_to
from tests.packaging.places import BUCKET
from tests.packaging.signers import Signers
from tests.ranks import end, start

import trainload
from trainload.autograd_trace.derivation.aot import derive
from trainload.autograd_trace.graphs import StepGraph
from trainload.capture.program import Program
from trainload.cli import main as cli
from trainload.core.errors import IntegrityError, PolicyError, RunInterrupted, StorageError
from trainload.launching.node.fetching import fetched, pinned
from trainload.launching.run.contact import Request
from trainload.launching.run.journal import Event, losses, read_events
from trainload.launching.run.opening import frozen_package
from trainload.launching.run.run_spec import read_spec
from trainload.packaging.package import Package
from trainload.packaging.signatures import policy as policies
from trainload.packaging.signatures.policy import POLICY
from trainload.packaging.stores.references import is_reference, run_name
from trainload.packaging.stores.store import blob_path
from trainload.packaging.write import with_weights
from trainload.sharding.plans import device_step_graphs as step_graphs

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty node cache."""
    monkeypatch.setenv("TRAINLOAD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def store(tiny: Package, cache: Path, tmp_path: Path) -> Path:
    """A store with one release."""
    trainload.push(tiny.path, tmp_path / "store", line="gpt")
    return tmp_path / "store"


@pytest.fixture
def newer(tiny: Package, tmp_path: Path) -> Package:
    """Another package of the same line."""
    tensors = ((name, tiny.weights.tensor(name) + 1) for name in tiny.weights.names())
    return with_weights(tiny, tmp_path / "newer.tl", tensors)


def launch(package: Package, data: Path, run_dir: Path, **options: Any) -> trainload.RunResult:
    plan = trainload.plan(package, trainload.Cluster(), "single")
    usual: dict[str, Any] = {"steps": 3, "compile": False, "backend": "local"}
    return trainload.launch(package, plan, data, run_dir=run_dir, **usual | options)


@pytest.mark.slow
def test_a_release_trains_as_the_package_that_was_pushed(
    tiny: Package, tiny_data: Path, store: Path, tmp_path: Path
) -> None:
    here = launch(tiny, tiny_data, tmp_path / "here", output=tmp_path / "here.tl")
    there = launch(
        trainload.open(f"{store}#gpt/1"),
        tiny_data,
        tmp_path / "there",
        output=tmp_path / "there.tl",
    )
    assert there.output_digest == here.output_digest
    assert losses(read_events(Path(there.run_dir))) == losses(read_events(Path(here.run_dir)))
    assert read_spec(Path(there.run_dir)).package == f"{store}#gpt/1"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", "#gpt", "#gpt/1"])
def test_the_command_line_launches_a_release_and_says_which(
    tiny: Package, tiny_data: Path, s3: str, cache: Path, tmp_path: Path, capsys: Capture, name: str
) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}"
    trainload.push(tiny.path, url, line="gpt")
    arguments = [
        "launch",
        f"{url}{name}",
        "--data",
        str(tiny_data),
        "--run-dir",
        str(tmp_path / "run"),
        "--steps",
        "2",
    ]
    assert cli.run([*arguments, "--backend", "local", "--no-compile"]) == 0, capsys.readouterr().err
    assert read_spec(tmp_path / "run").package == f"{url}#gpt/1"
    assert read_spec(tmp_path / "run").digest == tiny.digest


def test_a_run_goes_on_with_its_release_when_another_one_is_current_and_the_store_is_gone(
    tiny_data: Path, store: Path, newer: Package, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"

    def stop(event: Event) -> None:
        if event.kind == "step":
            (run_dir / Request.STOP.file).touch()

    with pytest.raises(RunInterrupted):
        launch(trainload.open(f"{store}#gpt"), tiny_data, run_dir, steps=60, on_event=stop)
    trainload.push(newer.path, store)
    assert pinned(f"{store}#gpt") == (f"{store}#gpt/2", newer.digest)
    shutil.rmtree(store)
    assert frozen_package(read_spec(run_dir)).digest == read_spec(run_dir).digest
    assert trainload.resume(run_dir, backend="local").steps == 60


def test_step_graphs_are_derived_once_for_all_releases_of_a_program(
    store: Path, newer: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainload.push(newer.path, store)
    derived: list[str] = []

    def counted(program: Program, name: str, device: torch.device, **options: bool) -> StepGraph:
        derived.append(name)
        return derive(program, name, device, **options)

    monkeypatch.setattr(step_graphs, "derive", counted)
    two = trainload.Cluster(devices_per_node=2)
    plans = [
        trainload.plan(trainload.open(f"{store}#gpt/{number}"), two, tensor_ranks=2)
        for number in (1, 2)
    ]
    assert plans[0].buckets == plans[1].buckets
    assert derived == ["train"]


@pytest.mark.slow
def test_the_processes_of_a_node_fetch_it_once(
    tiny: Package, s3: str, cache: Path, tmp_path: Path
) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}"
    trainload.push(tiny.path, url, line="gpt")
    told = [tmp_path / f"{number}.out" for number in range(3)]
    with wire_to(s3) as wire:
        ranks = [
            start(
                say_fetched,
                f"{url}#gpt/1",
                cache,
                tiny.digest,
                cwd=tmp_path,
                log=log,
                variables=os.environ,
            )
            for log in told
        ]
        for rank in ranks:
            rank.join(100)
        end(ranks)
    assert [rank.exitcode for rank in ranks] == [0, 0, 0], [log.read_text() for log in told]
    folders = {log.read_text().splitlines()[-1] for log in told}
    assert len(folders) == 1
    assert trainload.open(folders.pop()).digest == tiny.digest
    asked = gets(wire)
    assert len(asked) == len(set(asked)) > 5


def say_fetched(reference: str, cache: Path, digest: str) -> None:
    print(fetched(reference, cache, digest))


def gets(wire: Wire) -> list[str]:
    """Return the paths of the blobs that were fetched."""
    return [line.split()[1] for line in wire.seen if line.startswith("GET") and "/blobs/" in line]


def test_what_is_damaged_in_the_store_is_not_launched(
    tiny: Package, store: Path, cache: Path
) -> None:
    blob = store / blob_path(
        next(
            entry.sha256
            for path, entry in tiny.manifest.files.items()
            if path.endswith(".safetensors")
        )
    )
    blob.write_bytes(blob.read_bytes()[:-1] + b"\xff")
    with pytest.raises(IntegrityError, match="differs from the published one"):
        trainload.open(f"{store}#gpt/1")
    assert [path for path in (cache / "packages").iterdir() if path.is_dir()] == []


def test_a_package_that_was_changed_in_the_cache_is_noticed(
    tiny: Package, tiny_data: Path, store: Path, tmp_path: Path
) -> None:
    package = trainload.open(f"{store}#gpt/1")
    weights = next(package.path.rglob("model-*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    with pytest.raises(IntegrityError):
        launch(trainload.open(f"{store}#gpt/1"), tiny_data, tmp_path / "run")
    (package.path / "manifest.json").write_bytes(
        (package.path / "manifest.json").read_bytes() + b" "
    )
    with pytest.raises(IntegrityError, match="in the cache has changed"):
        trainload.open(f"{store}#gpt/1")


def test_a_release_that_is_another_package_than_the_run_s_is_not_fetched(
    store: Path, newer: Package, cache: Path
) -> None:
    with pytest.raises(IntegrityError, match="not the package that the run was launched with"):
        fetched(f"{store}#gpt/1", cache, newer.digest)


def test_every_node_holds_a_fetched_package_to_its_own_policy(
    tiny_data: Path,
    store: Path,
    cache: Path,
    signers: Signers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policies, "SYSTEM_POLICY", tmp_path / "system.toml")
    launch(trainload.open(f"{store}#gpt/1"), tiny_data, tmp_path / "run")
    shutil.rmtree(cache)  # as on another node
    (tmp_path / "policy.toml").write_text(
        f'require_signature = true\nidentities = ["{signers.alice.public}"]\n'
    )
    monkeypatch.setenv(POLICY, str(tmp_path / "policy.toml"))
    with pytest.raises(PolicyError):
        frozen_package(read_spec(tmp_path / "run"))
    assert any((cache / "packages").iterdir())


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("#gpt/7", "there is no such release"),
        ("#other", "has no current release|no such line"),
        ("#gpt/", "this does not name a release"),
        ("#/1", "this does not name a release"),
        ("x#gpt", "there is no store here"),
    ],
)
def test_a_name_that_means_nothing_is_told(store: Path, name: str, line: str) -> None:
    with pytest.raises(StorageError, match=line):
        trainload.open(f"{store}{name}")


def test_a_folder_is_no_reference_whatever_its_name(tiny: Package, tmp_path: Path) -> None:
    shutil.copytree(tiny.path, tmp_path / "gpt#2.tl")
    assert not is_reference(str(tmp_path / "gpt#2.tl"))
    assert trainload.open(str(tmp_path / "gpt#2.tl")).source is None


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("a/gpt.tl", "gpt"),
        ("s3://b/store#gpt/2", "gpt"),
        ("s3://b/store", "store"),
        ("oci://h:5000/models/gpt:v2", "gpt"),
    ],
)
def test_a_run_is_called_after_what_it_trains(package: str, name: str) -> None:
    assert run_name(package) == name
