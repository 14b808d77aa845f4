"""`trainload.export(to="huggingface")`: folders that safetensors and from_pretrained can read."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file
from tests.capture.jobs import Model, job
from tests.export.jobs import Small, model_of, own_results
from tests.huggingface.test_job_of import WORDS, batch, bert, frozen_gpt2, gpt2, mixtral, settings
from tests.laws.isolated import Environment
from tests.selection import selected
from torch import Tensor, nn

import trainload
from trainload.core.errors import JobError, PackageError
from trainload.exporting.weights_folder import contents_of, write_folder
from trainload.huggingface import assets_of, job_of
from trainload.packaging.package import Package
from trainload.packaging.write import with_weights


def frozen(model: nn.Module, path: Path, **options: Any) -> Package:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from transformers
        return trainload.freeze(job_of(model, batch(), settings(), **options), path)


def moved(package: Package, path: Path) -> Package:
    """Write the package with other parameters, as after training."""
    generator = torch.Generator().manual_seed(5)
    own = {
        spec.name: package.weights.tensor(spec.name)
        for spec in package.parameters
        if spec.alias_of is None
    }
    return with_weights(
        package,
        path,
        [
            (name, value + 0.1 * torch.randn(value.shape, generator=generator))
            for name, value in own.items()
        ],
    )


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """A GPT-2 with tied embeddings and a tokenizer, after training."""
    return moved(frozen_gpt2(tmp_path_factory), tmp_path_factory.mktemp("gpt") / "trained.tl")


@pytest.fixture(scope="module")
def folder(gpt: Package, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trainload.export(gpt, tmp_path_factory.mktemp("out") / "gpt", to="huggingface").path


_CHILD = """
import importlib.util, json, os, sys
import torch, transformers
from safetensors.torch import load_file, save_file

assert importlib.util.find_spec("trainload") is None
for folder in sys.argv[1:]:
    kind = getattr(transformers, json.load(open(f"{folder}/config.json"))["architectures"][0])
    model, told = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(told.values()), (folder, told)
    with torch.no_grad():
        logits = model.eval()(**load_file(f"{folder}.rows")).logits
        save_file({"logits": logits.contiguous()}, f"{folder}.logits")
    if os.path.exists(f"{folder}/tokenizer.json"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        print(json.dumps(tokenizer("w3 w7 w1")["input_ids"]))
"""


def inputs_of(package: Package) -> dict[str, Tensor]:
    names = {entry.name for entry in package.manifest.graphs["predict"].inputs}
    return {name: value for name, value in sorted(batch().items()) if name in names}


class Pair(nn.Module):
    """A transformers model next to another module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 1, bias=False)
        self.student: Any = gpt2()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        found = self.student(
            input_ids=input_ids, attention_mask=attention_mask, labels=labels, use_cache=False
        )
        loss: Tensor = found.loss + self.scale.weight.square().sum()
        return loss


def frozen_pair(path: Path) -> Package:
    pair = Pair()
    whole = job(
        pair,
        batch=batch(),
        loss=None,
        predict=lambda model, given: {"logits": model.student(**given, use_cache=False).logits},
        predict_inputs=["input_ids", "attention_mask"],
        assets=assets_of(pair.student, within=pair),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from transformers
        return trainload.freeze(whole, path)


@dataclass(frozen=True)
class Elsewhere:
    """Results of from_pretrained in a process that cannot import trainload.

    They are package and logits by case, and the ids of three words.
    """

    packages: dict[str, Package]
    logits: dict[str, Tensor]
    ids: list[int]


def test_a_folder_holds_what_it_should_and_no_path_of_this_machine(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "README.md",
        "trainload.json",
    }
    assert "huggingface.json" not in names
    text = "".join(path.read_text() for path in folder.iterdir() if path.suffix in (".json", ".md"))
    assert "/tmp" not in text and str(Path.home()) not in text


def test_tied_weights_are_written_once_and_named(folder: Path) -> None:
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert json.loads((folder / "trainload.json").read_bytes())["aliases"] == {
        "lm_head.weight": "transformer.wte.weight"
    }


@pytest.fixture(scope="module")
def elsewhere(
    gpt: Package,
    folder: Path,
    outside: Environment,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Elsewhere:
    scratch = tmp_path_factory.mktemp("elsewhere")
    made: dict[str, Callable[[], Package]] = {
        "gpt": lambda: gpt,
        "tied decoder": lambda: moved(
            frozen(bert(), scratch / "bert.tl"), scratch / "bert-trained.tl"
        ),
        "experts": lambda: moved(
            frozen(mixtral(), scratch / "mixtral.tl"), scratch / "mixtral-trained.tl"
        ),
        "within another": lambda: moved(
            frozen_pair(scratch / "pair.tl"), scratch / "pair-trained.tl"
        ),
    }
    needed = {"gpt", *selected(request, "name")}
    packages = {name: make() for name, make in made.items() if name in needed}
    folders = {
        name: folder if name == "gpt" else scratch / name.replace(" ", "-") for name in packages
    }
    for name, package in packages.items():
        if name != "gpt":
            trainload.export(package, folders[name], to="huggingface")
        save_file(inputs_of(package), f"{folders[name]}.rows")
    printed = outside.run(_CHILD, scratch, *folders.values())
    logits = {name: load_file(f"{folders[name]}.logits")["logits"] for name in packages}
    return Elsewhere(packages, logits, json.loads(printed))


@pytest.mark.matrix("gpt")
@pytest.mark.parametrize("name", ["gpt", "tied decoder", "experts", "within another"])
def test_from_pretrained_gives_the_packages_logits(name: str, elsewhere: Elsewhere) -> None:
    package = elsewhere.packages[name]
    expected = own_results(package, "predict", inputs_of(package))[0]["logits"]
    torch.testing.assert_close(elsewhere.logits[name], expected, rtol=1e-5, atol=1e-5)


def test_from_pretrained_gives_the_trained_eager_models_logits(
    gpt: Package, elsewhere: Elsewhere
) -> None:
    model: Any = model_of(gpt, gpt2())
    with torch.no_grad():
        torch.testing.assert_close(elsewhere.logits["gpt"], model(**inputs_of(gpt)).logits)


def test_the_tokenizer_is_where_transformers_looks_for_it(elsewhere: Elsewhere) -> None:
    assert elsewhere.ids == [WORDS.index(word) for word in ("w3", "w7", "w1")]


@pytest.mark.slow  # the next test exports a part of the model itself
def test_a_configuration_does_not_go_with_the_weights_of_another_module(tmp_path: Path) -> None:
    folder = trainload.export(
        frozen_pair(tmp_path / "pair.tl"), tmp_path / "scale", to="huggingface", part="scale"
    ).path
    assert {path.name for path in folder.iterdir()} == {
        "model.safetensors",
        "README.md",
        "trainload.json",
    }


def test_a_configuration_does_not_go_with_the_weights_of_a_part(
    gpt: Package, tmp_path: Path
) -> None:
    folder = trainload.export(gpt, tmp_path / "part", to="huggingface", part="transformer").path
    assert not {"config.json", "generation_config.json"} & {path.name for path in folder.iterdir()}


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    package = trainload.freeze(
        job(Model(), assets={"tokenizer/vocab.txt": b"", "vocab.txt": b""}), tmp_path / "a.tl"
    )
    with pytest.raises(
        PackageError, match=r"assets/vocab\.txt: two files of the folder have the same name"
    ):
        trainload.export(package, tmp_path / "folder", to="huggingface")
    assert [path.name for path in tmp_path.iterdir()] == ["a.tl"]


def test_a_model_that_is_not_within_the_other_is_refused() -> None:
    with pytest.raises(JobError, match="does not contain the transformers model"):
        assets_of(gpt2(), within=Pair())


def test_what_is_no_transformers_model_is_refused() -> None:
    with pytest.raises(JobError, match="no configuration"):
        assets_of(nn.Linear(1, 1))


def test_assets_of_the_job_take_the_place_of_those_that_are_made() -> None:
    made = job_of(gpt2(), batch(), settings(), assets={"config.json": b"{}", "LICENSE": b"mine"})
    assert made.assets["config.json"] == b"{}"
    assert {"LICENSE", "huggingface.json"} <= made.assets.keys()


@pytest.mark.slow
def test_a_model_of_ones_own_loads_it_by_safetensors(trained: Package, tmp_path: Path) -> None:
    made = trainload.export(trained, tmp_path / "small", to="huggingface")
    model = Small()
    load_model(model, made.path / "model.safetensors")
    for name, value in model_of(trained, Small()).state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.slow
def test_buffers_outside_the_state_dict_stay_out(trained: Package, tmp_path: Path) -> None:
    made = trainload.export(trained, tmp_path / "small", to="huggingface")
    tensors = load_file(made.path / "model.safetensors")
    assert "offset" not in tensors
    assert {"calls", "norm.running_mean"} <= tensors.keys()


def test_assets_go_along_and_a_card_is_written_where_there_is_none(
    trained: Package, tmp_path: Path
) -> None:
    made = trainload.export(trained, tmp_path / "small", to="huggingface")
    assert (made.path / "notes/run.log").read_bytes() == b"first\n"
    assert trained.digest in (made.path / "README.md").read_text()


def test_shards_have_an_index(trained: Package, tmp_path: Path) -> None:
    contents = contents_of(trained.manifest, "")
    (tmp_path / "out").mkdir()
    write_folder(tmp_path / "out", trained, contents, {}, max_shard=256)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_bytes())
    assert len(set(index["weight_map"].values())) > 1
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], trained.weights.tensor(name))
    assert {stored.name for stored in contents.tensors} == index["weight_map"].keys()


def test_a_part_has_its_own_names_and_an_alias_whose_owner_is_elsewhere(
    trained: Package, tmp_path: Path
) -> None:
    made = trainload.export(trained, tmp_path / "last", to="huggingface", part="last")
    tensors = load_file(made.path / "model.safetensors")
    assert tensors.keys() == {"weight", "bias"}
    assert torch.equal(tensors["weight"], trained.weights.tensor("first.weight"))


def test_a_part_that_there_is_not_is_refused_with_those_that_there_are(
    trained: Package, tmp_path: Path
) -> None:
    with pytest.raises(
        PackageError,
        match=r"no module of this name with weights.*Modules with weights: first, last, norm",
    ):
        trainload.export(trained, tmp_path / "a", to="huggingface", part="second")


@pytest.mark.parametrize(
    "option",
    [{"graph": "eval"}, {"variant": "long"}, {"device": "cpu"}],
    ids=lambda option: next(iter(option)),
)
def test_an_option_without_a_meaning_is_refused(
    trained: Package, option: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(
        PackageError, match=f"{next(iter(option))}: an export of weights contains no graph"
    ):
        trainload.export(trained, tmp_path / "a", to="huggingface", **option)


def test_a_tensor_that_was_written_wrongly_is_noticed(
    trained: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainload.packaging.tensors.safetensors_file import TensorFileWriter

    add = TensorFileWriter.add
    monkeypatch.setattr(
        TensorFileWriter,
        "add",
        lambda self, name, tensor: add(self, name, tensor + 1 if name == "last.bias" else tensor),
    )
    with pytest.raises(
        PackageError,
        match=r"model\.safetensors, last\.bias: a written tensor differs from the package's",
    ):
        trainload.export(trained, tmp_path / "a", to="huggingface")
    assert list(tmp_path.iterdir()) == []
