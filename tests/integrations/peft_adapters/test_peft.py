"""Adapters go to peft and come from it: the real library opens and makes them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.capture.jobs import job
from tests.huggingface.test_job_of import settings
from tests.laws.runs import curve
from torch import Tensor, nn

import trainload
from trainload.cli import main as cli
from trainload.core.errors import JobError, PackageError, RequestError, WeightsError
from trainload.huggingface import assets_of, job_of
from trainload.packaging.package import Package

peft = pytest.importorskip("peft", reason="peft is not installed: make integrations")
# peft's own: it reads a property that transformers has renamed
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")

RANK, ALPHA, STEPS, ROWS, RATE = 4, 6.0, 5, 4, 0.05
LAYERS = ("*.q_proj.weight", "*.v_proj.weight")


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=32, **sizes, **heads, **options)
    return transformers.LlamaForCausalLM(config)


def rows() -> dict[str, Tensor]:
    ids = torch.randint(0, 32, (ROWS, 8), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "labels": ids.clone()}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package llama.tl and rows.npz."""
    return frozen(llama(), tmp_path_factory.mktemp("llama"))


def frozen(model: Any, folder: Path) -> Path:
    """Write the package llama.tl of a model, and rows.npz, into a folder; return the folder."""
    columns: dict[str, Any] = {name: value.numpy() for name, value in rows().items()}
    np.savez(folder / "rows.npz", **columns)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from transformers
        made = job_of(
            model,
            rows(),
            settings(max_steps=STEPS, per_device_train_batch_size=ROWS),
            optimizer=sgd,
            schedule=None,
            clip_norm=None,
        )
        trainload.freeze(made, folder / "llama.tl")
    return folder


@pytest.fixture(scope="module")
def package(folder: Path) -> Package:
    return trainload.open(folder / "llama.tl")


def launched(folder: Path, run_dir: Path, adapters: trainload.Adapters, **options: Any) -> Path:
    package = trainload.open(folder / "llama.tl")
    overrides = trainload.Overrides(adapters=adapters)
    trainload.launch(
        package,
        trainload.plan(overrides.apply(package), trainload.Cluster(), "single"),
        folder / "rows.npz",
        run_dir=run_dir,
        output=run_dir.with_suffix(".tl"),
        compile=False,
        backend="local",
        overrides=overrides,
        checkpoint_every=2,
        keep=9,
        **options,
    )
    return run_dir


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """A run with adapters, with checkpoints after 2, 4 and 5 steps."""
    return launched(
        folder, folder / "run", trainload.Adapters(rank=RANK, layers=LAYERS, alpha=ALPHA)
    )


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    return trainload.export(run, run.with_name("exported"), to="peft").path


def wrapped(folder: Path) -> Any:
    """Return the frozen transformers model with an adapter, opened by peft."""
    return peft.PeftModel.from_pretrained(llama(), folder)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=rows()["input_ids"]).logits
    return found


def predicted(package: Package) -> Tensor:
    with torch.no_grad():
        found: Tensor = package.graph("predict").module()({"input_ids": rows()["input_ids"]})[0]
    return found


def test_peft_computes_with_the_adapters_of_a_run_what_the_trained_package_does(
    run: Path, exported: Path
) -> None:
    after = predicted(trainload.open(run.with_suffix(".tl")))
    torch.testing.assert_close(logits(wrapped(exported)), after, rtol=1e-4, atol=1e-5)
    assert (logits(llama()) - after).abs().max() > 1e-3


def test_peft_reads_every_tensor_of_the_folder(exported: Path) -> None:
    # peft would warn about missing and unknown keys
    model = wrapped(exported)
    state = peft.get_peft_model_state_dict(model)
    assert len(state) == 2 * 2 * 2
    assert all(value.abs().max() > 0 for value in state.values())


def test_the_configuration_selects_layers_by_their_short_names(exported: Path) -> None:
    config = peft.PeftConfig.from_pretrained(exported)
    assert isinstance(config, peft.LoraConfig)
    assert config.target_modules == {"q_proj", "v_proj"}
    assert (config.r, config.lora_alpha, config.task_type) == (RANK, 6, "CAUSAL_LM")


def test_some_of_the_layers_of_one_name_are_selected_by_their_whole_names(
    folder: Path, tmp_path: Path
) -> None:
    one = launched(
        folder,
        tmp_path / "one",
        trainload.Adapters(rank=2, layers=("model.layers.1.self_attn.q_proj.weight",)),
    )
    path = trainload.export(one, tmp_path / "exported", to="peft").path
    after = predicted(trainload.open(one.with_suffix(".tl")))
    torch.testing.assert_close(logits(wrapped(path)), after, rtol=1e-4, atol=1e-5)


def test_modules_that_are_trained_beside_the_adapters_are_saved_whole(
    folder: Path, tmp_path: Path
) -> None:
    beside = launched(
        folder,
        tmp_path / "beside",
        trainload.Adapters(rank=2, layers=LAYERS, also=("model.norm.weight", "lm_head.*")),
    )
    path = trainload.export(beside, tmp_path / "exported", to="peft").path
    after = predicted(trainload.open(beside.with_suffix(".tl")))
    torch.testing.assert_close(logits(wrapped(path)), after, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True.")
def test_a_tied_parameter_that_is_trained_beside_the_adapters_is_saved_in_each_module(
    tmp_path: Path,
) -> None:
    folder = frozen(llama(tie_word_embeddings=True), tmp_path)
    adapters = trainload.Adapters(rank=2, layers=LAYERS, also=("*embed_tokens.weight",))
    beside = launched(folder, tmp_path / "beside", adapters)
    path = trainload.export(beside, tmp_path / "exported", to="peft").path
    after = predicted(trainload.open(beside.with_suffix(".tl")))
    opened = peft.PeftModel.from_pretrained(llama(tie_word_embeddings=True), path)
    torch.testing.assert_close(logits(opened), after, rtol=1e-4, atol=1e-5)


def test_the_command_exports_the_adapters_of_any_checkpoint(run: Path, tmp_path: Path) -> None:
    made = tmp_path / "early"
    assert cli.run(["export", f"{run}@2", "--to", "peft", "--output", str(made)]) == 0
    early = trainload.export(run, tmp_path / "again", to="peft", step=2)
    assert (made / "adapter_model.safetensors").read_bytes() == (
        early.path / "adapter_model.safetensors"
    ).read_bytes()
    assert json.loads((made / "trainload.json").read_text())["step"] == 2


def peft_model(**options: Any) -> Any:
    """Return the frozen model with an adapter of peft whose B is not zero."""
    config = peft.LoraConfig(
        **{
            "r": RANK,
            "lora_alpha": 7,
            "target_modules": ["q_proj", "v_proj"],
            "task_type": "CAUSAL_LM",
            **options,
        }
    )
    model = peft.get_peft_model(llama(), config)
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def trained(model: Any) -> list[float]:
    """Train a model of peft on the rows of a run, with the run's optimizer; return the losses."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    losses = []
    for _ in range(STEPS):
        loss = model.train()(**rows()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}], ids=["plain", "rslora"])
def test_a_run_continues_an_adapter_of_peft_as_peft_does(
    folder: Path, tmp_path: Path, options: Mapping[str, Any]
) -> None:
    model = peft_model(**options)
    model.save_pretrained(tmp_path / "adapter")
    source = trainload.Adapters.from_peft(tmp_path / "adapter")
    continued = launched(folder, tmp_path / "run", source)
    expected = trained(model)
    assert curve(continued) == pytest.approx(expected, rel=1e-5)
    path = trainload.export(continued, tmp_path / "back", to="peft").path
    torch.testing.assert_close(logits(wrapped(path)), logits(model), rtol=1e-4, atol=1e-5)


def test_the_command_line_names_an_adapter_of_peft(folder: Path, tmp_path: Path) -> None:
    peft_model().save_pretrained(tmp_path / "adapter")
    words = ["launch", str(folder / "llama.tl"), "--data", str(folder / "rows.npz")]
    words += ["--run-dir", str(tmp_path / "run"), "--no-compile", "--backend", "local"]
    assert cli.run([*words, "--set", f"adapters.source={tmp_path / 'adapter'}"]) == 0
    with torch.no_grad():
        expected = peft_model().train()(**rows()).loss.item()
    assert curve(tmp_path / "run")[0] == pytest.approx(expected, rel=1e-5)


def test_an_adapter_of_a_module_of_the_jobs_model_is_found(tmp_path: Path) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = llama()

        def forward(self, ids: Tensor) -> Tensor:
            found: Tensor = self.student(input_ids=ids, use_cache=False).logits
            return found

    peft_model().save_pretrained(tmp_path / "adapter")
    pair = Pair()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from transformers
        package = trainload.freeze(
            job(
                pair,
                batch={"ids": rows()["input_ids"]},
                loss=lambda model, batch: model(batch["ids"]).square().mean(),
                assets=assets_of(pair.student, within=pair),
            ),
            tmp_path / "pair.tl",
        )
    overrides = trainload.Overrides(adapters=trainload.Adapters.from_peft(tmp_path / "adapter"))
    weights = overrides.apply(package).weights
    own = dict(peft_model().named_parameters())
    torch.testing.assert_close(
        weights.tensor("student.model.layers.1.self_attn.v_proj.lora_B.weight"),
        own["base_model.model.model.layers.1.self_attn.v_proj.lora_B.default.weight"].detach(),
        rtol=0,
        atol=0,
    )


def test_a_changed_adapter_is_rejected(package: Package, tmp_path: Path) -> None:
    # no other test adds an adapter with this alpha, so the node's cache has no package with it
    peft_model(lora_alpha=5).save_pretrained(tmp_path / "adapter")
    adapters = trainload.Adapters.from_peft(tmp_path / "adapter")
    other = peft_model(lora_alpha=5)
    for parameter in other.parameters():
        parameter.data = parameter.data + 1
    other.save_pretrained(tmp_path / "adapter")
    with pytest.raises(WeightsError, match="not the one that was named"):
        trainload.Overrides(adapters=adapters).apply(package)


UNSUPPORTED: Mapping[str, Mapping[str, Any]] = {
    "use_dora": {"use_dora": True},
    "bias": {"bias": "lora_only"},
    "rank_pattern": {"rank_pattern": {"v_proj": 2}},
    "alpha_pattern": {"alpha_pattern": {"v_proj": 2}},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "init_lora_weights": {"init_lora_weights": "pissa"},
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_adapter_that_computes_otherwise_is_rejected(name: str, tmp_path: Path) -> None:
    peft_model(**UNSUPPORTED[name]).save_pretrained(tmp_path / "adapter")
    with pytest.raises(WeightsError, match="in a way that runs do not support") as caught:
        trainload.Adapters.from_peft(tmp_path / "adapter")
    assert name in str(caught.value)


def test_an_adapter_of_another_kind_is_rejected(tmp_path: Path) -> None:
    config = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    peft.get_peft_model(llama(), config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(WeightsError):
        trainload.Adapters.from_peft(tmp_path / "adapter")


def test_every_setting_of_peft_has_a_meaning_or_must_have_no_value(tmp_path: Path) -> None:
    model = peft_model()
    model.save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"new_in_peft": 3}))
    with pytest.raises(WeightsError, match="new_in_peft"):
        trainload.Adapters.from_peft(tmp_path / "adapter")


def test_an_adapter_of_another_model_is_rejected(package: Package, tmp_path: Path) -> None:
    peft_model(target_modules=["down_proj"]).save_pretrained(tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_model.safetensors"
    from safetensors.torch import load_file, save_file

    save_file(
        {name.replace("down_proj", "w2"): value for name, value in load_file(config).items()},
        config,
    )
    adapters = trainload.Adapters.from_peft(tmp_path / "adapter")
    with pytest.raises(JobError, match="no parameter of this layer"):
        trainload.Overrides(adapters=adapters).apply(package)


def test_the_dropout_of_pefts_training_is_mentioned(tmp_path: Path) -> None:
    peft_model(lora_dropout=0.1).save_pretrained(tmp_path / "adapter")
    with pytest.warns(UserWarning, match=r"a dropout of 0\.1"):
        trainload.Adapters.from_peft(tmp_path / "adapter")


def test_a_source_has_its_own_rank(tmp_path: Path) -> None:
    from trainload.launching.settings.parse import parse_settings

    with pytest.raises(RequestError, match=r"adapters\.rank is the source's"):
        parse_settings([f"adapters.source={tmp_path}", "adapters.rank=8"])


def test_a_trained_package_has_no_adapters_to_export(run: Path, tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="are merged into its output"):
        trainload.export(trainload.open(run.with_suffix(".tl")), tmp_path / "x", to="peft")
