"""No argument of Trainer that changes the training is dropped without a word."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from tests.house.trainer_page import PAGE, with_table
from transformers.trainer_pt_utils import AcceleratorConfig

from trainload.core.errors import JobError
from trainload.trainer_arguments import ACCELERATOR, ARGUMENTS, check_arguments_of_trainer

REJECTED = {
    "activation_checkpointing": True,
    "average_tokens_across_devices": False,
    "dataloader_drop_last": True,
    "deepspeed": "zero3.json",
    "fp16": True,
    "fsdp": "full_shard",
    "gradient_checkpointing": True,
    "group_by_length": True,
    "label_names": ["answers"],
    "label_smoothing_factor": 0.1,
    "neftune_noise_alpha": 5.0,
    "optim_args": "momentum=0.9",
    "optim_target_modules": "all-linear",
    "parallelism_config": "tp",
    "train_sampling_strategy": "group_by_length",
}
"""A value with an effect for each rejected argument."""


def test_every_argument_of_the_installed_transformers_is_in_the_table() -> None:
    fields = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert fields <= ARGUMENTS.keys()


def test_every_field_of_accelerates_settings_is_in_the_table() -> None:
    fields = {field.name for field in dataclasses.fields(AcceleratorConfig)}
    assert fields == ACCELERATOR.keys()


def test_the_page_has_the_table() -> None:
    assert PAGE.read_text() == with_table(PAGE.read_text()), (
        "run: python -m tests.house.trainer_page"
    )


def test_the_defaults_of_transformers_are_accepted(tmp_path: Path) -> None:
    check_arguments_of_trainer(transformers.TrainingArguments(output_dir=str(tmp_path)))


def test_what_a_job_takes_or_ignores_may_have_any_value(tmp_path: Path) -> None:
    made = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        learning_rate=0.1,
        max_steps=7,
        logging_steps=3,
        save_steps=9,
        dataloader_num_workers=2,
        label_names=["labels"],
    )
    check_arguments_of_trainer(made)


def test_every_rejected_argument_has_a_case() -> None:
    rejected = {name for name, each in ARGUMENTS.items() if each.treatment == "rejected"}
    assert rejected == REJECTED.keys()


@pytest.mark.parametrize("name", REJECTED)
def test_a_rejected_argument_is_named_with_a_hint(name: str) -> None:
    with pytest.raises(JobError, match=rf"args\.{name}: this setting is not supported") as caught:
        check_arguments_of_trainer(SimpleNamespace(**{name: REJECTED[name]}))
    assert ARGUMENTS[name].hint in str(caught.value)


@dataclasses.dataclass
class LaterArguments(transformers.TrainingArguments):  # type: ignore[misc]  # transformers has no types
    """Arguments of a later version of transformers, or of another trainer."""

    weight_noise: float = 0.5


def test_a_new_argument_with_its_default_is_accepted(tmp_path: Path) -> None:
    check_arguments_of_trainer(LaterArguments(output_dir=str(tmp_path)))


def test_a_new_argument_with_another_value_is_rejected(tmp_path: Path) -> None:
    made = LaterArguments(output_dir=str(tmp_path), weight_noise=0.1)
    with pytest.raises(JobError, match=r"args\.weight_noise: this argument is not known here"):
        check_arguments_of_trainer(made)


def test_arguments_of_other_trainers_are_rejected_where_they_deviate(tmp_path: Path) -> None:
    made = transformers.Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), predict_with_generate=True
    )
    with pytest.raises(JobError, match="predict_with_generate"):
        check_arguments_of_trainer(made)


def test_an_unknown_attribute_of_any_object_is_rejected() -> None:
    with pytest.raises(JobError, match="batch_growth"):
        check_arguments_of_trainer(SimpleNamespace(max_steps=3, batch_growth=2))


def test_accelerates_settings_are_checked_too(tmp_path: Path) -> None:
    made = transformers.TrainingArguments(
        output_dir=str(tmp_path), accelerator_config={"split_batches": True}
    )
    with pytest.raises(JobError, match=r"args\.accelerator_config\.split_batches"):
        check_arguments_of_trainer(made)
