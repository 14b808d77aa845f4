"""Bad input results in one clear line, exit status 2, and no leftover files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import ray
from tests.launch.commands import contents, refused, refused_process
from tests.launch.forked import done, let_no_file_grow, refused_apart
from tests.laws.gpt import CONTEXT, ROWS
from tests.packaging.tampering import edit_manifest

import trainload
from trainload.cli import main as cli
from trainload.packaging.package import Package

Capture = pytest.CaptureFixture[str]
UNCOMPILED = ["--backend", "local", "--no-compile"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory. `sys.path` is restored after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


# Freezing

BRANCHING = """
import torch
import trainload


class Branching(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        if x.sum() > 0:
            x = -x
        return self.layer(x)


def loss(model, batch):
    return model(batch["x"]).square().mean()


def job():
    optimizer = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)
    batch = {"x": torch.ones(4, 4)}
    options = {"loss": loss, "optimizer": optimizer, "steps": 1, "global_batch": 4}
    return trainload.Job(model=Branching(), batch=batch, **options)
"""
SOUND = BRANCHING.replace("        if x.sum() > 0:\n            x = -x\n", "")


def test_a_spec_that_does_not_import(here: Path, capsys: Capture) -> None:
    (here / "broken_spec.py").write_text("import trainload\nimport no_such_library\n")
    line = refused(["freeze", "broken_spec.py:job", "-o", "out.tl"], here, capsys)
    assert (
        "broken_spec.py:2: the import failed: ModuleNotFoundError: No module named"
        " 'no_such_library'" in line
    )


def test_a_spec_that_returns_no_job(here: Path, capsys: Capture) -> None:
    (here / "jobless_spec.py").write_text("def job():\n    return 3\n")
    line = refused(["freeze", "jobless_spec.py:job", "-o", "out.tl"], here, capsys)
    assert "jobless_spec.py:job(): this is not a job" in line
    assert "got int" in line


def test_a_model_that_cannot_be_captured_is_blamed_by_file_and_line(
    here: Path, capsys: Capture
) -> None:
    (here / "branching_spec.py").write_text(BRANCHING)
    assert cli.run(["freeze", "branching_spec.py:job", "-o", "out.tl"]) == 2
    line, *page = capsys.readouterr().err.splitlines()
    cause = next(
        number for number, text in enumerate(BRANCHING.splitlines(), 1) if "x.sum() > 0" in text
    )
    assert f"branching_spec.py:{cause}" in line
    assert "       ^^^^^^^^^^^" in page
    assert contents(here) == ["branching_spec.py"]


def test_a_model_that_cannot_be_captured_is_explained_in_json(here: Path, capsys: Capture) -> None:
    (here / "json_spec.py").write_text(BRANCHING)
    assert cli.run(["freeze", "json_spec.py:job", "-o", "out.tl", "--json"]) == 2
    (finding,) = json.loads(capsys.readouterr().out)["error"]["findings"]
    assert (finding["cause"], finding["expression"]) == ("data-dependent-branch", "x.sum() > 0")
    assert finding["rewrite"] == "x = torch.where(x.sum() > 0, -x, x)"


def test_an_output_that_exists(here: Path, capsys: Capture) -> None:
    (here / "out.tl").mkdir()
    assert "out.tl: it exists already" in refused(
        ["freeze", "any.py:job", "-o", "out.tl"], here, capsys
    )


def test_freezing_where_files_cannot_grow(here: Path) -> None:
    (here / "job.py").write_text(SOUND)
    line = refused_apart(["freeze", "job.py:job", "-o", "out.tl"], here, let_no_file_grow)
    assert "out.tl: the disk is full" in line


# Disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        os.getuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk],
            capture_output=True,
            check=False,
        ).returncode
    ):
        pytest.skip("mounting a small disk needs root")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_freezing_onto_a_full_disk(here: Path, small_disk: Path, capsys: Capture) -> None:
    (here / "sound_spec.py").write_text(SOUND)
    (small_disk / "filling").write_bytes(bytes(60_000))
    line = refused(["freeze", "sound_spec.py:job", "-o", small_disk / "out.tl"], here, capsys)
    assert "out.tl: the disk is full" in line


def test_launching_where_no_checkpoint_fits(
    gpt: Package, gpt_data: Path, here: Path, small_disk: Path, capsys: Capture
) -> None:
    line = refused(
        ["launch", gpt.path, "--data", gpt_data, "--run-dir", small_disk / "run", *UNCOMPILED],
        here,
        capsys,
    )
    assert "there is not enough disk space for the run's checkpoints" in line
    assert "bytes free" in line


def test_launching_onto_a_full_disk(
    gpt: Package,
    gpt_data: Path,
    here: Path,
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "filling").write_bytes(bytes(70_000))
    # as if the disk had filled up after the check of its free space
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**40, 0, 2**40)
    )
    line = refused(
        [
            "launch",
            gpt.path,
            "--data",
            gpt_data,
            "--run-dir",
            small_disk / "runs" / "run",
            *UNCOMPILED,
        ],
        here,
        capsys,
    )
    assert "the run's folder cannot be written" in line
    assert "got No space left on device" in line


# Launching


def launch(package: Package | Path, data: Path, *options: str | Path) -> list[str | Path]:
    return [
        "launch",
        package.path if isinstance(package, Package) else package,
        "--data",
        data,
        "--run-dir",
        "run",
        *options,
    ]


def rows(path: Path, **columns: npt.NDArray[Any]) -> Path:
    np.savez(path, **columns)  # type: ignore[arg-type]  # numpy's stub treats one as allow_pickle
    return path


TOKENS = np.ones((32, CONTEXT + 1), np.uint8)
BAD_DATA: dict[str, tuple[dict[str, npt.NDArray[Any]], list[str]]] = {
    "missing column": ({"words": TOKENS}, ["tokens"]),
    "extra column": ({"tokens": TOKENS, "labels": TOKENS}, ["labels", "expected tokens"]),
    "another dtype": (
        {"tokens": TOKENS.astype(np.float32)},
        ["tokens", "expected uint8", "got float32"],
    ),
    "another shape": ({"tokens": TOKENS[:, :-1]}, ["tokens", str(CONTEXT + 1), str(CONTEXT)]),
    "no rows": ({"tokens": TOKENS[:0]}, ["expected at least one row", "got 0 rows"]),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_data_that_does_not_fit(case: str, gpt: Package, here: Path, capsys: Capture) -> None:
    columns, words = BAD_DATA[case]
    line = refused(launch(gpt, rows(here / "data.npz", **columns)), here, capsys)
    assert [word for word in ("data.npz", *words) if word not in line] == [], line


def test_held_out_data_that_does_not_fit(
    gpt: Package, gpt_data: Path, here: Path, capsys: Capture
) -> None:
    held_out = rows(here / "held-out.npz", words=TOKENS)
    assert "held-out.npz" in refused(launch(gpt, gpt_data, "--eval-data", held_out), here, capsys)


def test_data_that_is_missing(gpt: Package, here: Path, capsys: Capture) -> None:
    assert "none.parquet: no data was found" in refused(
        launch(gpt, Path("none.parquet")), here, capsys
    )


def test_a_global_batch_that_does_not_divide(
    gpt: Package, gpt_data: Path, here: Path, capsys: Capture
) -> None:
    line = refused(launch(gpt, gpt_data, "--workers", "3"), here, capsys)
    assert [word for word in (str(ROWS), "3") if word not in line] == [], line


@pytest.mark.usefixtures("ray_cluster")
def test_more_workers_than_the_cluster_has(
    gpt: Package, gpt_data: Path, here: Path, capsys: Capture
) -> None:
    line = refused(launch(gpt, gpt_data, "--workers", "4"), here, capsys)
    assert (
        "the cluster is too small for the plan (expected 4 CPUs for 4 workers, got 2 CPUs)" in line
    )


@pytest.mark.usefixtures("ray_cluster")
def test_a_dry_run_for_more_workers_than_the_cluster_has(
    gpt: Package, gpt_data: Path, here: Path, capsys: Capture
) -> None:
    assert "got 2 CPUs" in refused(
        launch(gpt, gpt_data, "--workers", "4", "--dry-run"), here, capsys
    )


@pytest.mark.usefixtures("ray_cluster")
def test_a_dry_run_where_somebody_uses_the_devices_says_so_at_once(
    gpt: Package, gpt_data: Path, here: Path, capsys: Capture
) -> None:
    class Busy:
        def here(self) -> bool:
            return True

    actor: Any = ray.remote(num_cpus=2)(Busy)
    busy = actor.remote()
    try:
        assert ray.get(busy.here.remote(), timeout=60)
        arguments: list[str | Path] = [
            "launch",
            gpt.path,
            "--data",
            gpt_data,
            "--no-compile",
            "--set",
            "start_timeout=60",
            "--dry-run",
        ]
        assert (
            "a trial step cannot run: all devices are in use (expected 1 free CPU, got"
            in refused(arguments, here, capsys)
        )
    finally:
        ray.kill(busy)


@pytest.mark.slow
def test_a_cluster_that_does_not_answer(
    gpt: Package, gpt_data: Path, here: Path, capfd: Capture
) -> None:
    line = refused(launch(gpt, gpt_data, "--address", "127.0.0.1:1"), here, capfd)
    assert "address 127.0.0.1:1: no Ray cluster responds" in line


def test_a_package_of_a_newer_format(
    gpt: Package, gpt_data: Path, here: Path, capsys: Capture
) -> None:
    shutil.copytree(gpt.path, here / "newer.tl")
    edit_manifest(here / "newer.tl", lambda manifest: manifest.update(format_version=3))
    line = refused(launch(here / "newer.tl", gpt_data), here, capsys)
    assert "newer format" in line
    assert "expected format 1" in line
    assert "got format 3" in line


def test_a_run_that_exists(gpt: Package, gpt_data: Path, here: Path, capsys: Capture) -> None:
    (here / "run").mkdir()
    (here / "run" / "run.json").write_text("{}")
    line = refused(launch(gpt, gpt_data), here, capsys)
    assert "a run already exists here" in line
    assert "trainload resume" in line


def test_a_run_folder_that_cannot_be_made(
    gpt: Package, gpt_data: Path, here: Path, capsys: Capture
) -> None:
    (here / "run").write_text("a file")
    assert "the run's folder cannot be written" in refused(launch(gpt, gpt_data), here, capsys)


def test_a_trained_package_that_exists(
    gpt: Package, gpt_data: Path, here: Path, capsys: Capture
) -> None:
    (here / "trained.tl").mkdir()
    assert "trained.tl: it exists already" in refused(
        launch(gpt, gpt_data, "--output", "trained.tl"), here, capsys
    )


@pytest.mark.parametrize("text", ["", "{}", '{"version":1}'])
def test_resuming_a_run_whose_description_is_damaged(
    text: str, here: Path, capsys: Capture
) -> None:
    (here / "run").mkdir()
    (here / "run" / "run.json").write_text(text)
    assert "run.json: the run's description cannot be read" in refused(
        ["resume", "run"], here, capsys
    )


# Environments


@pytest.mark.matrix("freeze-2.10.1", "resume-2.16.0+cpu")
@pytest.mark.parametrize("version", ["2.10.1", "2.16.0+cpu"])
@pytest.mark.parametrize(
    "command",
    [["freeze", "job.py:job", "-o", "out.tl"], ["inspect", "."], ["verify", "."], ["resume", "."]],
    ids=lambda c: c[0],
)
def test_a_torch_outside_the_supported_range(
    version: str, command: list[str | Path], here: Path
) -> None:
    metadata = here / "libraries" / f"torch-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    line = refused_process(command, here, {"PYTHONPATH": str(metadata.parent)})
    assert (
        f"this version of torch is not supported (expected torch >=2.11,<2.16, got {version})"
        in line
    )
    assert "pip install" in line


def test_the_supported_range_is_the_one_that_is_installed_by() -> None:
    import tomllib

    from trainload.core.versions import BEYOND, OLDEST

    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    (wanted,) = (entry for entry in project["dependencies"] if entry.startswith("torch"))
    assert wanted == f"torch>={OLDEST[0]}.{OLDEST[1]},<{BEYOND[0]}.{BEYOND[1]}"


def test_without_a_compiler_the_graphs_run_uncompiled(
    tiny: Package, tiny_data: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "bin").mkdir()
    monkeypatch.delenv("CXX", raising=False)
    status, _, err = done(
        *launch(tiny, tiny_data, "--steps", "2", "--backend", "local"),
        cwd=here,
        PATH=str(here / "bin"),
    )
    assert status == 0, err
    assert "warning" in err
    assert "no C++ compiler was found: the graphs run uncompiled" in err
    assert (
        "compiled" not in contents(Path(os.environ["TRAINLOAD_CACHE_DIR"])) or "compiled no" in err
    )


def test_an_error_with_json_is_one_object(gpt: Package, here: Path, capsys: Capture) -> None:
    assert cli.run(["launch", str(gpt.path), "--data", "none.npz", "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.err == ""
    error = json.loads(printed.out)["error"]
    assert (error["kind"], error["exit"], error["where"]) == (
        "MissingDataError",
        2,
        str(here / "none.npz"),
    )
    assert issubclass(getattr(trainload, error["kind"]), trainload.RequestError)
