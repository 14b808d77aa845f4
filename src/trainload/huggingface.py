"""Conversion of a transformers model, a collator's batch and a Trainer's settings to a job.

    from trainload.huggingface import job_of

    job = job_of(model, collator(rows), TrainingArguments(max_steps=1000, learning_rate=3e-4,
    warmup_steps=100)) package = trainload.freeze(job, "gpt2.tl")

The training step is that of `transformers.Trainer` with these settings: docs/guides/transformers.md
lists the supported and the rejected ones. transformers itself is imported only when a schedule or
Adafactor is created.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import math
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainload.capture.job.definition import AssetLike, Job, Loss, SchedulerFactory
from trainload.core.errors import JobError
from trainload.core.suggestions import did_you_mean
from trainload.trainer_arguments import check_arguments_of_trainer

IGNORED = -100
"""Value of labels that do not count."""
LABELS = (
    "labels",
    "label",
    "label_ids",
    "start_positions",
    "end_positions",
    "next_sentence_label",
    "decoder_input_ids",
)
"""Entries of a batch that predict does not read."""
_WITHOUT_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
_LOSS_DEPENDENT_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
"""Schedules that depend on the loss, not only on the step."""


def job_of(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    args: Any,
    *,
    tokenizer: Any = None,
    **options: Any,
) -> Job:
    """Return the job that `transformers.Trainer(model, args)` would train.

    The loss is the model's own. Its weight is the number of labels that are not -100 (without the
    first of each row if the model shifts its labels), so that microbatches and workers with
    different padding are combined as in Trainer. The weight is the number of rows if labels are not
    integers, if there are none, and for a CTC loss. Weight decay excludes biases and norms. predict
    returns the model's logits; an encoder-decoder has no predict, since it predicts token by token.
    The assets are those of `assets_of` and of `options`.

    Args:
        model: a transformers model that computes its loss.
        batch: a collator's batch: name -> (rows, ...), of 2 rows or more, with labels.
        args: `transformers.TrainingArguments`, or an object with such attributes; missing ones have
            Trainer's defaults.
        tokenizer: the model's tokenizer or processor, or any object with `save_pretrained`; it
            becomes part of the assets.
        options: further fields of `trainload.Job` (dynamic, assets, predict, ...), which override
            those above.

    Raises:
        JobError: a setting is not supported (the message names it), or the batch is invalid.
    """
    settings = _Settings(args)
    unchecked: Mapping[str, Any] = batch  # not checked yet
    entries = {name: value for name, value in unchecked.items() if value is not None}
    for name, value in entries.items():
        if not isinstance(value, Tensor):
            raise JobError(
                "not a tensor",
                where=f"batch[{name!r}]",
                expected="a tensor",
                got=type(value).__name__,
                hint='Pass return_tensors="pt" to the collator.',
            )
    if _experts_to_replace(model):
        warnings.warn(
            "the experts are computed by transformers' batched_mm, because its grouped_mm in"
            " float32 is a custom operator that a package cannot contain. batched_mm copies the"
            " weights of each token's experts; a model in bfloat16 keeps torch's grouped_mm.",
            stacklevel=2,
        )
    weigh = _weight_function(model, entries)
    dtype = torch.bfloat16 if settings.get("bf16", False) else None

    def loss(module: nn.Module, inputs: dict[str, Tensor]) -> Loss:
        value = _call_model(module, inputs, dtype).loss
        if value is None:
            raise JobError(
                "the model returns no loss",
                where="batch",
                expected="labels",
                got=", ".join(sorted(inputs)),
            )
        return Loss(value.float() if dtype is not None else value, weight=weigh(inputs))

    def predict(module: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        logits = {
            name: value
            for name, value in _call_model(module, inputs, dtype).items()
            if "logits" in name and isinstance(value, Tensor)
        }
        if not logits:
            raise JobError(
                "the model returns no logits",
                where="model",
                got=type(module).__name__,
                hint="Pass job_of(..., predict=...).",
            )
        return logits

    fields: dict[str, Any] = {
        "model": model,
        "batch": entries,
        "loss": loss,
        "optimizer": settings.optimizer(),
        "schedule": settings.schedule(),
        "steps": settings.steps,
        "global_batch": settings.rows(),
        "clip_norm": settings.get("max_grad_norm", 1.0) or None,
        "seed": (
            settings.get("seed", 42)
            if (data_seed := settings.get("data_seed", None)) is None
            else data_seed
        ),
    }
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        fields |= {
            "predict": predict,
            "predict_inputs": [name for name in entries if name not in LABELS],
        }
    given_assets: Mapping[str, Any] = options.pop("assets", {})
    return Job(**(fields | options), assets={**assets_of(model, tokenizer), **given_assets})


def assets_of(
    model: nn.Module, tokenizer: Any = None, *, within: nn.Module | None = None
) -> dict[str, AssetLike]:
    """Return the files that `from_pretrained` needs besides weights, as entries of `Job.assets`.

    With them, `trainload export --to huggingface` writes a folder that `from_pretrained` opens.
    `job_of` adds them to its job; use this function for jobs that are made in another way.

    Args:
        model: a transformers model.
        tokenizer: its tokenizer or processor, or any object with `save_pretrained`.
        within: the job's model, if it is another one that contains `model`.

    Returns:
        config.json, generation_config.json if the model generates, the tokenizer's files below
        tokenizer/, and huggingface.json, which names the module of the job's model that is the
        transformers model.

    Raises:
        JobError: the model has no configuration, or is not part of `within`.
    """
    config: Any = copy.deepcopy(getattr(model, "config", None))
    if not hasattr(config, "to_json_string"):
        raise JobError(
            "not a transformers model: it has no configuration",
            where="model",
            got=type(model).__name__,
        )
    part = next(
        (name for name, module in (within or model).named_modules() if module is model), None
    )
    if part is None:
        raise JobError(
            "the job's model does not contain the transformers model",
            where="within",
            got=type(within).__name__,
        )
    name = type(model).__name__
    config.architectures = [name]
    config.dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    assets: dict[str, AssetLike] = {
        "config.json": config.to_json_string().encode("utf-8"),
        "huggingface.json": (
            json.dumps({"class": name, "part": part}, sort_keys=True).encode("utf-8")
        ),
    }
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None and getattr(model, "can_generate", lambda: False)():
        assets["generation_config.json"] = generation.to_json_string().encode("utf-8")
    if tokenizer is not None:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            for file in sorted(Path(folder).rglob("*")):
                if file.is_file():
                    assets[f"tokenizer/{file.relative_to(folder).as_posix()}"] = file.read_bytes()
    return assets


class _Settings:
    """The settings of a Trainer, read from its arguments."""

    def __init__(self, args: Any) -> None:
        self._args = args
        check_arguments_of_trainer(args)
        self.steps: int = self.get("max_steps", -1)
        if self.steps < 1:
            raise JobError(
                "a job needs its number of steps, because the data set is specified later",
                where="args.max_steps",
                expected="1 or more",
                got=str(self.steps),
                hint=(
                    "Set max_steps. For epochs, it is rows of the data * epochs / rows per update."
                ),
            )

    def get(self, name: str, default: Any) -> Any:
        return getattr(self._args, name, default)

    def rows(self) -> int:
        """Return the number of rows of one update."""
        rows: int = self.get("per_device_train_batch_size", 8) * self.get(
            "gradient_accumulation_steps", 1
        )
        return rows

    def optimizer(self) -> Callable[[nn.Module], torch.optim.Optimizer]:
        setting = self.get("optim", "adamw_torch")
        name = str(getattr(setting, "value", setting))
        rate, decay = self.get("learning_rate", 5e-5), self.get("weight_decay", 0.0)
        adam = {
            "betas": (self.get("adam_beta1", 0.9), self.get("adam_beta2", 0.999)),
            "eps": self.get("adam_epsilon", 1e-8),
        }
        makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
            "adamw_torch": lambda groups: torch.optim.AdamW(groups, lr=rate, **adam),
            "adamw_torch_fused": lambda groups: torch.optim.AdamW(groups, lr=rate, **adam),
            "sgd": lambda groups: torch.optim.SGD(groups, lr=rate),
            "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=rate),
            "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=rate),
            "adafactor": lambda groups: _adafactor()(
                groups, lr=rate, scale_parameter=False, relative_step=False
            ),
        }
        if name not in makers:
            raise JobError(
                "unsupported optimizer",
                where="args.optim",
                expected=", ".join(makers),
                got=name,
                hint=did_you_mean(
                    name, makers, "Set one with dataclasses.replace(job, optimizer=...)."
                ),
            )

        def make(model: nn.Module) -> torch.optim.Optimizer:
            return makers[name](_groups(model, decay))

        return make

    def schedule(self) -> SchedulerFactory:
        setting = self.get("lr_scheduler_type", "linear")
        name = str(getattr(setting, "value", setting))
        options = self.get("lr_scheduler_kwargs", None) or {}
        warmup = self.get("warmup_steps", 0) or self.get("warmup_ratio", None) or 0
        # As in Trainer, a number below one is a fraction of the steps.
        count = int(warmup) if warmup >= 1 else math.ceil(self.steps * warmup)
        steps = self.steps
        if name in _LOSS_DEPENDENT_SCHEDULES:
            raise JobError(
                "a schedule that depends on the loss is not supported",
                where="args.lr_scheduler_type",
                got=name,
                hint="Use a schedule that depends only on the step, such as cosine.",
            )

        _check_installed("args.lr_scheduler_type")

        def make(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
            from transformers import get_scheduler

            try:
                scheduler: torch.optim.lr_scheduler.LRScheduler = get_scheduler(
                    name, optimizer, count, steps, options
                )
            except (ValueError, TypeError) as error:
                raise JobError(
                    f"transformers cannot create this schedule: {error}",
                    where="args.lr_scheduler_type",
                    got=name,
                ) from error
            return scheduler

        return make


def _check_installed(where: str) -> None:
    """Check that transformers is installed, for a setting that it implements.

    Raises:
        JobError: it is not.
    """
    if find_spec("transformers") is None:
        raise JobError(
            "transformers is not installed",
            where=where,
            hint="Run `pip install 'trainload[transformers]'`.",
        )


def _adafactor() -> Any:
    _check_installed("args.optim")
    from transformers.optimization import Adafactor

    return Adafactor


def _groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups: with weight decay, and without (biases, norms, everything in a
    LayerNorm).

    Tied parameters are in only one of them.
    """
    layer_norm_ids = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.LayerNorm)
        for p in module.parameters()
    }
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [
        p
        for name, p in trainable
        if id(p) not in layer_norm_ids and not _WITHOUT_DECAY.search(name.lower())
    ]
    decayed_ids = {id(p) for p in decayed}
    groups = [
        {"params": decayed, "weight_decay": decay},
        {"params": [p for _, p in trainable if id(p) not in decayed_ids], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _weight_function(
    model: nn.Module, batch: Mapping[str, Tensor]
) -> Callable[[Mapping[str, Tensor]], Tensor | None]:
    """Return a function from a batch to the number of labels over which the model's loss is a mean,
    or to None for rows.
    """
    labels = batch.get("labels")
    if type(model).__name__.endswith("ForCTC"):
        reduction = getattr(getattr(model, "config", None), "ctc_loss_reduction", "mean")
        if reduction != "mean":
            raise JobError(
                "a summed loss depends on the batch size",
                where="model.config.ctc_loss_reduction",
                expected="mean",
                got=reduction,
            )
        return lambda _: None
    if labels is None or labels.is_floating_point():
        return lambda _: None
    start = 1 if labels.ndim > 1 and _shifts_labels(model) else 0
    return lambda inputs: (
        (inputs["labels"][..., start:] if start else inputs["labels"]).ne(IGNORED).sum()
    )


def _shifts_labels(model: nn.Module) -> bool:
    """Return True if the loss compares outputs with the labels of the next position, as in a
    decoder-only language model.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    return getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss"


def _call_model(model: nn.Module, batch: Mapping[str, Tensor], dtype: torch.dtype | None) -> Any:
    """Call the model without a cache of keys and values."""
    arguments: dict[str, Any] = dict(batch)
    if "use_cache" in inspect.signature(model.forward).parameters:
        arguments["use_cache"] = False
    device = next(iter(batch.values())).device.type
    context = torch.autocast(device, dtype=dtype) if dtype is not None else contextlib.nullcontext()
    with context, _without_cache(getattr(model, "config", None)), _replace_experts(model):
        return model(**arguments)


def _experts_to_replace(model: nn.Module) -> dict[str, str]:
    """Return part of the configuration ("": its top) -> experts' implementation to set, for those
    that a package cannot contain.
    """
    get_implementation: Any = getattr(model, "get_experts_implementation", None)
    matrices = [p for p in model.parameters() if p.ndim == 3]
    if (
        get_implementation is None
        or not matrices
        or all(p.dtype is torch.bfloat16 for p in matrices)
    ):
        return {}
    return {
        part: "batched_mm" for part, name in get_implementation().items() if name == "grouped_mm"
    }


@contextlib.contextmanager
def _replace_experts(model: Any) -> Iterator[None]:
    """Within the block, compute experts by torch's own operators."""
    implementations = _experts_to_replace(model)
    if not implementations:
        yield
        return
    before = model.get_experts_implementation()
    model.set_experts_implementation(before | implementations)
    try:
        yield
    finally:
        model.set_experts_implementation(before)


@contextlib.contextmanager
def _without_cache(config: Any) -> Iterator[None]:
    """Set `use_cache` of the configuration to False within the block: some models read the setting
    only there.
    """
    if not getattr(config, "use_cache", False):
        yield
        return
    config.use_cache = False
    try:
        yield
    finally:
        config.use_cache = True
