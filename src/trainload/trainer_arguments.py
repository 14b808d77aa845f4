"""The arguments of transformers' Trainer, and what `trainload.huggingface.job_of` does with each.

The table of docs/guides/transformers.md is generated from `ARGUMENTS`. An argument that is not in
it, such as one of a later version of transformers, must have its default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trainload.core.errors import JobError

Treatment = Literal["taken", "rejected", "ignored"]
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
"""Values of a rejected argument that always mean that it is not used."""


@dataclass(frozen=True, slots=True)
class Argument:
    """Treatment of an argument by a job.

    Attributes:
        treatment: "taken": part of the job. "rejected": an error, unless the value is `idle` or
            empty. "ignored": not part of a job.
        reason: why, or where it goes.
        idle: for "rejected", the value without effect.
        hint: for "rejected", what to do instead.
    """

    treatment: Treatment
    reason: str
    idle: Any = None
    hint: str = ""


def _taken(reason: str, *names: str) -> dict[str, Argument]:
    return dict.fromkeys(names, Argument("taken", reason))


def _ignored(reason: str, *names: str) -> dict[str, Argument]:
    return dict.fromkeys(names, Argument("ignored", reason))


def _rejected(reason: str, hint: str, idle: Any, *names: str) -> dict[str, Argument]:
    return dict.fromkeys(names, Argument("rejected", reason, idle, hint))


_OPTIMIZER = "Set the optimizer with dataclasses.replace(job, optimizer=...)."
_STRATEGY = "Omit it: the strategy is chosen by trainload.plan."
ARGUMENTS: Mapping[str, Argument] = {
    **_taken("length of the run; 1 or more", "max_steps"),
    **_taken("optimizer", "optim", "learning_rate", "weight_decay"),
    **_taken("optimizer", "adam_beta1", "adam_beta2", "adam_epsilon"),
    **_taken("schedule", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
    **_taken("schedule, in earlier versions", "warmup_ratio"),
    **_taken("rows of an update", "per_device_train_batch_size", "gradient_accumulation_steps"),
    **_taken("clipping", "max_grad_norm"),
    **_taken("precision", "bf16"),
    **_taken("seed", "seed", "data_seed"),
    **_rejected(
        "changes the loss",
        "Pass a loss with label smoothing: Job(loss=...).",
        0,
        "label_smoothing_factor",
    ),
    **_rejected("needs loss scaling", "Use bf16, which needs no loss scaling.", False, "fp16"),
    **_rejected(
        "the plan decides it",
        "Leave it off: the plan decides which activations are recomputed.",
        False,
        "gradient_checkpointing",
        "activation_checkpointing",
    ),
    **_rejected(
        "changes the model", "Add the noise in the model's embedding.", None, "neftune_noise_alpha"
    ),
    **_rejected("other optimizers only", _OPTIMIZER, None, "optim_args", "optim_target_modules"),
    **_rejected("the plan decides it", _STRATEGY, None, "deepspeed", "fsdp", "parallelism_config"),
    **_rejected(
        "the mean is always over the labels of all workers",
        "Omit it: a job's loss is the mean over all labels of an update.",
        True,
        "average_tokens_across_devices",
    ),
    **_rejected(
        "a run draws rows at random, and drops none",
        "Omit it: rows are drawn at random, by the seed.",
        "random",
        "train_sampling_strategy",
    ),
    **_rejected(
        "a run drops no rows",
        "Omit it: the last rows of an epoch are in one update with the first of the next.",
        False,
        "dataloader_drop_last",
    ),
    **_rejected(
        "the same, in earlier versions",
        "Omit it: rows are drawn at random, by the seed.",
        False,
        "group_by_length",
    ),
    **_rejected(
        "labels are found by their usual names",
        "Omit it, and name what predict reads: job_of(..., predict_inputs=[...]).",
        ["labels"],
        "label_names",
    ),
    **_ignored("`max_steps` counts instead", "num_train_epochs"),
    **_ignored("of a rejected argument", "activation_checkpointing_kwargs"),
    **_ignored("of a rejected argument", "gradient_checkpointing_kwargs"),
    **_ignored("of a rejected argument", "fsdp_config", "length_column_name"),
    **_ignored(
        "each of its own fields is checked, see below",
        "accelerator_config",
    ),
    **_ignored(
        "options of `launch`: where, with which hardware and kernels",
        "output_dir",
        "use_cpu",
        "tf32",
        "torch_compile",
        "torch_compile_backend",
        "torch_compile_mode",
        "use_liger_kernel",
        "liger_kernel_config",
        "torch_empty_cache_steps",
        "auto_find_batch_size",
        "full_determinism",
        "debug",
        "local_rank",
        "ddp_find_unused_parameters",
        "ddp_bucket_cap_mb",
        "ddp_broadcast_buffers",
        "ddp_static_graph",
        "ddp_backend",
        "ddp_timeout",
    ),
    **_ignored("training has no key-value cache", "use_cache"),
    **_ignored(
        "options of `launch` and sinks: logs and metrics",
        "logging_strategy",
        "logging_steps",
        "logging_first_step",
        "logging_dir",
        "log_on_each_node",
        "logging_nan_inf_filter",
        "include_num_input_tokens_seen",
        "log_level",
        "log_level_replica",
        "disable_tqdm",
        "report_to",
        "run_name",
        "project",
        "trackio_space_id",
        "trackio_bucket_id",
        "trackio_static_space_id",
        "skip_memory_metrics",
    ),
    **_ignored(
        "options of `launch`: evaluation, in the job's own precision",
        "eval_strategy",
        "eval_steps",
        "eval_delay",
        "per_device_eval_batch_size",
        "prediction_loss_only",
        "eval_on_start",
        "eval_do_concat_batches",
        "eval_use_gather_object",
        "eval_accumulation_steps",
        "include_for_metrics",
        "batch_eval_metrics",
        "bf16_full_eval",
        "fp16_full_eval",
        "load_best_model_at_end",
        "metric_for_best_model",
        "greater_is_better",
        "do_train",
        "do_eval",
        "do_predict",
    ),
    **_ignored(
        "options of `launch`: checkpoints",
        "save_only_model",
        "save_strategy",
        "save_steps",
        "save_on_each_node",
        "save_total_limit",
        "enable_jit_checkpoint",
        "resume_from_checkpoint",
        "ignore_data_skip",
        "restore_callback_states_from_checkpoint",
    ),
    **_ignored(
        "`trainload push`",
        "push_to_hub",
        "hub_token",
        "hub_private_repo",
        "hub_model_id",
        "hub_strategy",
        "hub_always_push",
        "hub_revision",
    ),
    **_ignored(
        "a run reads its rows itself",
        "dataloader_num_workers",
        "dataloader_pin_memory",
        "dataloader_persistent_workers",
        "dataloader_prefetch_factor",
        "dataloader_multiprocessing_context",
        "dataloader_in_order",
        "remove_unused_columns",
    ),
}
"""Argument of `TrainingArguments` -> what a job does with it."""
ACCELERATOR: Mapping[str, Argument] = {
    **_rejected(
        "it would change the rows of an update",
        "Set per_device_train_batch_size to the rows of an update.",
        False,
        "split_batches",
    ),
    **_rejected(
        "microbatches are those of the plan",
        "Set gradient_accumulation_steps.",
        None,
        "gradient_accumulation_kwargs",
    ),
    **_ignored("a run reads its rows itself", "dispatch_batches", "non_blocking"),
    **_ignored("a run drops and repeats no rows", "even_batches"),
    **_ignored("rows are drawn by the seed", "use_seedable_sampler"),
    **_ignored("a run has no state of accelerate", "use_configured_state"),
}
"""Field of `accelerator_config`, accelerate's settings in `TrainingArguments` -> the same."""


def check_arguments_of_trainer(args: Any) -> None:
    """Check that nothing in a Trainer's arguments would be dropped that changes the training.

    Args:
        args: `TrainingArguments`, or an object with some of its attributes.

    Raises:
        JobError: an argument is rejected; or it is unknown and does not have its default.
    """
    _check(args, ARGUMENTS, "args.")
    config = getattr(args, "accelerator_config", None)
    if config is not None:
        _check(config, ACCELERATOR, "args.accelerator_config.")


def _check(args: Any, table: Mapping[str, Argument], where: str) -> None:
    for name, value, default in _values(args):
        argument = table.get(name)
        if argument is None:
            if not _equal(value, default) and value not in _NOTHING:
                raise JobError(
                    "this argument is not known here, and is set",
                    where=f"{where}{name}",
                    expected=repr(default),
                    got=repr(value)[:80],
                    hint="Leave it at its default, or set what it means in the job.",
                )
        elif argument.treatment == "rejected" and not _is_idle(value, argument.idle):
            raise JobError(
                "this setting is not supported",
                where=f"{where}{name}",
                expected=repr(argument.idle),
                got=repr(value)[:80],
                hint=argument.hint,
            )


def _values(args: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, value and default of each argument."""
    if dataclasses.is_dataclass(args):
        for field in dataclasses.fields(args):
            default = field.default
            if default is dataclasses.MISSING:
                make = field.default_factory
                default = None if make is dataclasses.MISSING else make()
            yield field.name, getattr(args, field.name), default
        return
    named = args if isinstance(args, Mapping) else getattr(args, "__dict__", {})
    for name, value in named.items():
        if not name.startswith("_"):
            yield name, value, None


def _is_idle(value: Any, idle: Any) -> bool:
    """Return True if a rejected argument has no effect."""
    return value is None or _equal(value, idle) or (value in _NOTHING and idle in _NOTHING)


def _equal(value: Any, other: Any) -> bool:
    """Return True for equal values; an enumeration is equal to its value."""
    return bool(getattr(value, "value", value) == other)
