"""The jobs of the GPU benchmark, all without dropout, so losses can be compared with eager's."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from measure import see_example
from torch.nn import functional

see_example()

from model import GPT, Config  # noqa: E402

import trainload  # noqa: E402

STEPS = 50
WARM_UP = 10
WEIGHT_DECAY = 0.1


@dataclass(frozen=True, slots=True)
class Case:
    """One model shape.

    Attributes:
        rows: number of rows per update.
        rate: peak learning rate.
        whole: True if autocast covers the output layer as well as the blocks.
    """

    config: Config
    rows: int
    rate: float
    whole: bool

    def build(self) -> GPT:
        """Build the model, always with the same weights."""
        torch.manual_seed(0)
        return GPT(self.config)

    def flops_per_token(self, parameters: int) -> float:
        """Return the FLOPs per token of forward and backward.

        The count is 6 per parameter except the position embedding, plus 12 x layers x width x
        context for attention, as in PaLM's paper (Chowdhery et al., 2022, appendix B).
        """
        config = self.config
        matrices = parameters - config.context * config.width
        return 6.0 * matrices + 12.0 * config.layers * config.width * config.context

    def optimizer(self, model: torch.nn.Module, fused: bool = False) -> torch.optim.AdamW:
        """Return AdamW with weight decay for matrices only."""
        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.rate, betas=(0.9, 0.95), fused=fused)

    def loss(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean cross-entropy of the next token.

        `batch["tokens"]`: integers (rows, context + 1).
        """
        tokens = batch["tokens"].long()
        if self.whole:
            with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
                logits = model(tokens[:, :-1])
        else:
            logits = model(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


CASES = {
    "demo": Case(Config(dropout=0.0), rows=16, rate=3e-3, whole=False),
    "gpt2": Case(
        Config(vocabulary=50304, context=1024, layers=12, width=768, heads=12, dropout=0.0),
        rows=16,
        rate=6e-4,
        whole=True,
    ),
    "tiny": Case(
        Config(vocabulary=512, context=32, layers=1, width=64, heads=2, dropout=0.0),
        rows=8,
        rate=3e-3,
        whole=True,
    ),
}


def schedule(step: int) -> float:
    """Return the factor of the learning rate: linear warmup, then constant."""
    return min(1.0, (step + 1) / WARM_UP)


def build_job(case: Case) -> trainload.Job:
    """Build the job of a model shape."""
    config = case.config
    dtype = torch.uint8 if config.vocabulary <= 256 else torch.int32
    return trainload.Job(
        model=case.build(),
        batch={"tokens": torch.randint(0, config.vocabulary, (2, config.context + 1), dtype=dtype)},
        loss=case.loss,
        optimizer=case.optimizer,
        schedule=schedule,
        steps=STEPS,
        global_batch=case.rows,
        clip_norm=1.0,
    )


def demo() -> trainload.Job:
    """Build the demo's GPT, with its blocks in bfloat16."""
    return build_job(CASES["demo"])


def gpt2() -> trainload.Job:
    """Build GPT-2 with 124M parameters, entirely in bfloat16."""
    return build_job(CASES["gpt2"])


def gpt2_large_batch() -> trainload.Job:
    """Build GPT-2 with 64 rows in an update: more than 2**31 logits, if one device has them all."""
    return build_job(replace(CASES["gpt2"], rows=64))


def tiny() -> trainload.Job:
    """Build a shape for machines without a GPU."""
    return build_job(CASES["tiny"])
