"""A run's adapters are exported in peft's format, and a run starts from such a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.launch.settings.adapters_by_hand import ADAPTERS
from tests.laws.runs import curve

import trainload
from trainload.core.errors import JobError, PackageError, RequestError, WeightsError
from trainload.launching.settings.parse import parse_settings
from trainload.packaging.package import Package

VALUES, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def launched(package: Package, rows: Path, run_dir: Path, adapters: Any, steps: int) -> Path:
    overrides = trainload.Overrides(adapters=adapters)
    plan = trainload.plan(overrides.apply(package), trainload.Cluster(), "single")
    trainload.launch(
        package,
        plan,
        rows,
        run_dir=run_dir,
        steps=steps,
        output=run_dir.with_suffix(".tl"),
        overrides=overrides,
        compile=False,
        backend="local",
    )
    return run_dir


@pytest.fixture(scope="module")
def run(package: Package, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launched(package, rows, tmp_path_factory.mktemp("peft") / "run", ADAPTERS, 2)


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    return trainload.export(run, run.with_name("exported"), to="peft").path


def test_the_exported_matrices_are_those_of_the_run(run: Path, exported: Path) -> None:
    found, own = load_file(exported / VALUES), load_file(run / "adapters.safetensors")
    assert found.keys() == own.keys()
    assert all(found[name].equal(own[name]) for name in own)


def test_a_run_starts_from_the_exported_adapters(
    package: Package, rows: Path, run: Path, exported: Path, tmp_path: Path
) -> None:
    adapters = trainload.Adapters.from_peft(exported)
    assert (adapters.rank, adapters.alpha) == (ADAPTERS.rank, ADAPTERS.alpha)
    continued = launched(package, rows, tmp_path / "run", adapters, 1)
    merged = trainload.open(run.with_suffix(".tl"))
    plan = trainload.plan(merged, trainload.Cluster(), "single")
    trainload.launch(
        merged, plan, rows, run_dir=tmp_path / "merged", steps=1, compile=False, backend="local"
    )
    assert curve(continued) == pytest.approx(curve(tmp_path / "merged"), rel=1e-6)


def test_a_text_names_the_source(exported: Path) -> None:
    parsed = parse_settings([f"adapters.source={exported}", "adapters.also=norm.*"])
    assert parsed.overrides.adapters == trainload.Adapters.from_peft(exported, also=("norm.*",))


def test_the_source_determines_the_rank(exported: Path) -> None:
    with pytest.raises(RequestError, match=r"adapters\.rank is the source's"):
        parse_settings([f"adapters.source={exported}", "adapters.rank=8"])


def test_a_source_has_the_digest_that_was_named(exported: Path) -> None:
    with pytest.raises(WeightsError, match="not the one that was named"):
        parse_settings([f"adapters.source={exported}", f"adapters.source_digest={'0' * 64}"])


def test_a_digest_needs_its_source() -> None:
    with pytest.raises(RequestError, match=r"adapters\.source must be set as well"):
        parse_settings([f"adapters.source_digest={'0' * 64}"])


def test_a_folder_without_an_adapter_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="there is no adapter of peft"):
        trainload.Adapters.from_peft(tmp_path)


def changed(exported: Path, folder: Path, **config: Any) -> Path:
    folder.mkdir()
    document = json.loads((exported / CONFIG).read_text()) | config
    (folder / CONFIG).write_text(json.dumps(document))
    (folder / VALUES).write_bytes((exported / VALUES).read_bytes())
    return folder


def test_a_setting_that_is_not_known_is_rejected(exported: Path, tmp_path: Path) -> None:
    folder = changed(exported, tmp_path / "adapter", use_something=True)
    with pytest.raises(WeightsError, match="use_something"):
        trainload.Adapters.from_peft(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lora_alpha", True),
        ("lora_alpha", "4"),
        ("lora_alpha", 10**400),
        ("lora_alpha", -1),
        ("lora_dropout", "0.1"),
        ("lora_dropout", [0.1]),
        ("lora_dropout", 2.0),
        ("use_rslora", "no"),
        ("rank_pattern", {"second": 4}),
        ("alpha_pattern", {"second": 4}),
        ("modules_to_save", ["last"]),
        ("use_dora", True),
        ("bias", "all"),
        ("fan_in_fan_out", True),
    ],
)
def test_a_setting_that_a_run_would_not_compute_is_rejected(
    exported: Path, tmp_path: Path, name: str, value: Any
) -> None:
    folder = changed(exported, tmp_path / "adapter", **{name: value})
    with pytest.raises(WeightsError, match=name):
        trainload.Adapters.from_peft(folder)


def test_a_configuration_that_is_nested_deeply_is_rejected(exported: Path, tmp_path: Path) -> None:
    folder = changed(exported, tmp_path / "adapter")
    (folder / CONFIG).write_text("[" * 200_000)
    with pytest.raises(WeightsError, match="not valid JSON"):
        trainload.Adapters.from_peft(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.to(torch.int8), r"not an A or B of a linear layer.*torch\.int8"),
        (lambda a: a[:0] if a.shape[0] < a.shape[1] else a[:, :0], "no common rank.*got 0"),
        (lambda a: a[0], r"not an A or B of a linear layer"),
    ],
)
def test_values_that_are_no_matrices_of_numbers_are_rejected(
    exported: Path, tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    folder = changed(exported, tmp_path / "adapter")
    tensors = load_file(folder / VALUES)
    save_file({k: change(v).contiguous() for k, v in tensors.items()}, folder / VALUES)
    with pytest.raises(WeightsError, match=message):
        trainload.Adapters.from_peft(folder)


def test_a_layer_that_the_package_lacks_is_named(
    package: Package, exported: Path, tmp_path: Path
) -> None:
    folder = changed(exported, tmp_path / "adapter")
    tensors = load_file(folder / VALUES)
    save_file({k.replace("second", "zeroth"): v for k, v in tensors.items()}, folder / VALUES)
    with pytest.raises(JobError, match=r"zeroth\.weight"):
        trainload.Overrides(adapters=trainload.Adapters.from_peft(folder)).apply(package)


def test_a_matrix_of_another_shape_is_rejected(
    package: Package, exported: Path, tmp_path: Path
) -> None:
    folder = changed(exported, tmp_path / "adapter")
    tensors = load_file(folder / VALUES)
    name = next(name for name in tensors if name.endswith("last.lora_A.weight"))
    save_file({**tensors, name: tensors[name][:, 1:].contiguous()}, folder / VALUES)
    adapters = trainload.Adapters.from_peft(folder)
    with pytest.raises(WeightsError, match=r"does not fit last\.weight"):
        trainload.Overrides(adapters=adapters).apply(package)


def test_the_values_of_a_source_do_not_depend_on_its_folder(
    package: Package, exported: Path, tmp_path: Path
) -> None:
    moved = trainload.Adapters.from_peft(changed(exported, tmp_path / "moved"))
    digests = {
        trainload.Overrides(adapters=each).apply(package).digest
        for each in (moved, trainload.Adapters.from_peft(exported))
    }
    assert len(digests) == 1


def test_a_run_without_adapters_has_none_to_export(
    package: Package, rows: Path, tmp_path: Path
) -> None:
    launched(package, rows, tmp_path / "run", None, 1)
    with pytest.raises(PackageError, match="the run has no adapters"):
        trainload.export(tmp_path / "run", tmp_path / "exported", to="peft")
