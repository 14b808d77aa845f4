"""A job of a transformers model trains like `transformers.Trainer`."""

from __future__ import annotations

import dataclasses
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

# imports its names lazily, which matters because every process of the suite imports this file
import transformers
from tests.huggingface.import_alone import tell_whether_transformers_is_imported
from tests.ranks import ran
from tests.shared import frozen_once
from torch import Tensor, nn

import trainload
from trainload.core.errors import JobError
from trainload.huggingface import job_of
from trainload.packaging.package import Package

ROWS, TIME, STEPS = 4, 8, 6
SMALL: dict[str, Any] = {"vocab_size": 48, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
NORM_PATTERNS = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""Patterns of transformers' Trainer.get_decay_parameter_names."""


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    sizes = {
        "n_positions": 16,
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
    model: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SMALL, **sizes))
    return model


def bert(head: str = "BertForMaskedLM") -> nn.Module:
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 16,
    }
    model: nn.Module = getattr(transformers, head)(
        transformers.BertConfig(**SMALL, **sizes, num_labels=3)
    )
    return model


def batch() -> dict[str, Tensor]:
    """Return rows with different numbers of counted labels."""
    ids = torch.randint(3, 48, (ROWS, TIME), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :6] = -100
    labels[2, 3:] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def settings(**given: Any) -> Any:
    """Return Trainer's defaults updated with arguments.

    Creating TrainingArguments itself would require accelerate.
    """
    defaults = {
        f.name: (
            f.default
            if f.default is not dataclasses.MISSING
            else f.default_factory()
            if callable(f.default_factory)
            else None
        )
        for f in dataclasses.fields(transformers.TrainingArguments)
    }
    return types.SimpleNamespace(**defaults | {"max_steps": STEPS} | given)


RUN = {
    "learning_rate": 1e-2,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
} | {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
}


def eager_losses() -> list[float]:
    """Return the losses of Trainer's loop with `RUN`.

    The loop has microbatches, each with its loss divided by the number of labels in all of them,
    clipping, AdamW and a schedule.
    """
    model = gpt2().train()
    decayed = transformers.trainer_pt_utils.get_parameter_names(
        model, [nn.LayerNorm], NORM_PATTERNS
    )
    groups = [
        {"params": [p for n, p in model.named_parameters() if n in decayed], "weight_decay": 0.1},
        {
            "params": [p for n, p in model.named_parameters() if n not in decayed],
            "weight_decay": 0.0,
        },
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 2, STEPS)
    whole = batch()
    counted = whole["labels"][:, 1:].ne(-100).sum()
    losses = []
    for _ in range(STEPS):
        total = 0.0
        for start in (0, 2):
            part = {name: value[start : start + 2] for name, value in whole.items()}
            loss = model(**part, num_items_in_batch=counted).loss
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


WORDS = ["[PAD]", "[BOS]", "[EOS]", *(f"w{i}" for i in range(45))]


def tokenizer() -> Any:
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[PAD]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", bos_token="[BOS]", eos_token="[EOS]"
    )


def gpt2_job() -> trainload.Job:
    """Build a job of a GPT-2 with tied embeddings and a tokenizer, trained with `RUN`."""
    return job_of(gpt2(), batch(), settings(**RUN), tokenizer=tokenizer())


def frozen_gpt2(factory: pytest.TempPathFactory) -> Package:
    """Return the package of `gpt2_job`, which the tests of exports use too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings raised inside transformers
        return frozen_once(factory, "gpt2", gpt2_job)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return frozen_gpt2(tmp_path_factory)


def test_the_losses_are_those_of_a_trainers_loop(package: Package, tmp_path: Path) -> None:
    columns: dict[str, Any] = {name: value.numpy() for name, value in batch().items()}
    np.savez(tmp_path / "rows.npz", **columns)
    plan = trainload.plan(package, trainload.Cluster(), "single", accumulate=2)
    losses: list[float] = []
    trainload.launch(
        package,
        plan,
        tmp_path / "rows.npz",
        run_dir=tmp_path / "run",
        backend="local",
        compile=False,
        on_event=lambda event: losses.append(event.data["loss"]) if event.kind == "step" else None,
    )
    expected = eager_losses()
    assert expected[0] - expected[-1] > 0.1
    assert losses == pytest.approx(expected, rel=1e-5)


def test_the_logits_are_a_prediction(package: Package) -> None:
    module = package.graph("predict").module(check_guards=False)
    inputs = {name: value for name, value in sorted(batch().items()) if name != "labels"}
    (found,) = module(inputs)
    torch.testing.assert_close(found, gpt2().eval()(**inputs).logits)


def test_biases_and_norms_do_not_decay() -> None:
    model = gpt2()
    factory = job_of(model, batch(), settings(weight_decay=0.3)).optimizer
    assert factory is not None
    optimizer = factory(model)
    assert isinstance(optimizer, torch.optim.Optimizer)
    decayed = transformers.trainer_pt_utils.get_parameter_names(
        model, [nn.LayerNorm], NORM_PATTERNS
    )
    expected = {id(p): 0.3 if n in decayed else 0.0 for n, p in model.named_parameters()}
    assert {
        id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    } == expected


@pytest.mark.parametrize(
    ("model", "labels", "weight"),
    [
        (gpt2, batch()["labels"], 18),
        (bert, batch()["labels"], 21),
        (lambda: bert("BertForSequenceClassification"), torch.tensor([0, 1, 2, 0]), 4),
    ],
    ids=["shifted tokens", "tokens", "rows"],
)
def test_the_weight_is_the_number_of_counted_labels(
    model: Any, labels: Tensor, weight: int
) -> None:
    given = batch() | {"labels": labels}
    job = job_of(model(), given, settings())
    assert job.loss is not None
    result = job.loss(job.model, dict(given))
    assert isinstance(result, trainload.Loss) and result.weight is not None
    assert int(result.weight) == weight


def test_labels_that_are_no_integers_count_by_rows() -> None:
    model = bert("BertForSequenceClassification")
    given = batch() | {"labels": torch.rand(ROWS, 3)}
    job = job_of(model, given, settings())
    assert job.loss is not None
    result = job.loss(model, dict(given))
    assert isinstance(result, trainload.Loss) and result.weight is None


def test_the_rows_of_an_update_are_those_of_all_microbatches() -> None:
    assert (
        job_of(
            gpt2(), batch(), settings(per_device_train_batch_size=3, gradient_accumulation_steps=5)
        ).global_batch
        == 15
    )


@pytest.mark.parametrize(
    ("given", "seed"),
    [({}, 42), ({"seed": 7}, 7), ({"seed": 7, "data_seed": 0}, 0), ({"data_seed": 3}, 3)],
)
def test_the_seed_is_that_of_the_data_where_one_is_given(given: dict[str, Any], seed: int) -> None:
    assert job_of(gpt2(), batch(), settings(**given)).seed == seed


def test_a_share_of_the_steps_may_be_warmup() -> None:
    job = job_of(
        gpt2(),
        batch(),
        settings(
            max_steps=20,
            warmup_steps=0.2,
            lr_scheduler_type="constant_with_warmup",
            learning_rate=1.0,
        ),
    )
    assert job.schedule is not None
    scheduler: Any = job.schedule(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0))  # type: ignore[arg-type]  # the schedule is a factory here
    rates = [
        scheduler.get_last_lr()[0]
        for _ in range(6)
        if scheduler.optimizer.step() is None and scheduler.step() is None
    ]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("label_smoothing_factor", 0.1),
        ("fp16", True),
        ("gradient_checkpointing", True),
        ("neftune_noise_alpha", 5.0),
        ("deepspeed", "zero3.json"),
        ("optim", "lion_8bit"),
        ("optim_args", "momentum=0.9"),
        ("lr_scheduler_type", "reduce_lr_on_plateau"),
        ("max_steps", -1),
    ],
)
def test_a_setting_that_has_no_meaning_is_refused_by_its_name(setting: str, value: object) -> None:
    with pytest.raises(JobError, match=rf"args\.{setting}"):
        job_of(gpt2(), batch(), settings(**{setting: value}))


def test_a_batch_of_lists_is_refused() -> None:
    with pytest.raises(JobError, match=r"return_tensors"):
        job_of(gpt2(), {"input_ids": [[1, 2]]}, settings())  # type: ignore[dict-item]  # deliberately wrong


def test_the_configuration_is_left_as_it_was() -> None:
    model: Any = gpt2()
    model.config.use_cache = True
    job = job_of(model, batch(), settings())
    assert job.loss is not None
    job.loss(model, batch())
    assert model.config.use_cache is True


def mixtral(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **SMALL, **sizes, num_local_experts=2, max_position_embeddings=16
        )
    ).to(dtype)


@pytest.mark.slow
def test_experts_are_computed_by_operators_that_a_package_can_hold(tmp_path: Path) -> None:
    model = mixtral()
    with pytest.warns(UserWarning, match=r"batched_mm.*copies the weights"):
        job = job_of(model, batch(), settings())
    package = trainload.freeze(job, tmp_path / "mixtral.tl")
    targets = {
        str(node.target)
        for node in package.graph("train").graph.nodes
        if node.op == "call_function"
    }
    assert not {target for target in targets if target.startswith("transformers")}
    assert "aten.bmm.default" in targets
    assert model.get_experts_implementation() == {"": "grouped_mm"}


def test_experts_in_bfloat16_keep_torchs_grouped_products() -> None:
    model = mixtral(torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job = job_of(model, batch(), settings())
    seen: list[str] = []
    assert job.loss is not None
    model.model.layers[0].mlp.register_forward_hook(
        lambda *_: seen.append(model.config._experts_implementation)
    )
    job.loss(model, batch())
    assert seen == ["grouped_mm"]


def test_importing_the_helper_imports_no_transformers(tmp_path: Path) -> None:
    assert ran(tell_whether_transformers_is_imported, cwd=tmp_path) == (0, "False\n")
