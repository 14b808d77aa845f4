"""Ray Train script without trainload: the example's model, compiled, with DDP on two workers.

The model is trained from its source. At the end of the first optimizer step, the time in seconds
since 1970 is written to --out.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path
from typing import Any


def loop(config: dict[str, Any]) -> None:
    """Run the training loop of a worker."""
    sys.path.insert(0, config["here"])
    import numpy as np
    import pyarrow.parquet as pq
    import ray.train
    import ray.train.torch
    import torch
    from measure import see_example

    see_example()
    import job as example
    from model import GPT, Config
    from torch import nn
    from trainers import CLIP_NORM, Training

    torch.set_num_threads(1)
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    column = pq.read_table(config["data"]).column("tokens").combine_chunks()
    table = torch.from_numpy(np.asarray(column.flatten()).reshape(len(column), -1).copy())

    torch.manual_seed(0)
    training = Training(GPT(Config()))
    wrapped = ray.train.torch.prepare_model(training)
    parameters = list(wrapped.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": example.WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=example.PEAK_RATE, betas=(0.9, 0.95), fused=True)
    compiled = torch.compile(wrapped)
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
    rows = example.ROWS // world
    for step in range(config["steps"]):
        start = step * example.ROWS + rank * rows
        loss, _ = compiled({"tokens": table[order[start : start + rows]]})
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        for group in optimizer.param_groups:
            group["lr"] = example.PEAK_RATE * example.schedule(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        if step == 0 and rank == 0:
            Path(config["out"]).write_text(repr(time.time()))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="Parquet file with a column `tokens`"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--storage", type=Path, required=True, help="storage path of Ray Train")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--address", default="local", help="address of a Ray cluster")
    arguments = parser.parse_args()

    import ray
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    own = {"include_dashboard": False} if arguments.address == "local" else {}
    ray.init(address=arguments.address, log_to_driver=False, logging_level=logging.ERROR, **own)
    config = {
        "here": str(Path(__file__).resolve().parent),
        "data": str(arguments.data.absolute()),
        "out": str(arguments.out.absolute()),
        "steps": arguments.steps,
    }
    trainer = TorchTrainer(
        loop,
        train_loop_config=config,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(storage_path=str(arguments.storage.absolute())),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
