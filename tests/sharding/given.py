"""What step graphs are given in tests of their rewritings."""

from __future__ import annotations

from typing import Any

import torch
from tests.coverage.cases import case_named
from tests.laws.gpt import gpt_job
from torch import Tensor

from trainload.autograd_trace.graphs import Port, Role
from trainload.capture.job import Job

SCALARS = {Role.SEED: 5, Role.STEP: 3, Role.ROW: 0}


def job_of(case: str) -> Job:
    return gpt_job() if case == "gpt" else case_named(case).job()


def value(port: Port, job: Job, state: dict[str, Tensor], constants: Any, rank: int = 0) -> Tensor:
    """What a step graph is given, whole."""
    match port.role:
        case Role.PARAMETER | Role.BUFFER:
            return state[port.name].clone()
        case Role.CONSTANT:
            found: Tensor = constants[port.name]
            return found
        case Role.BATCH:
            given: Tensor = job.batch[port.name]
            return given.contiguous()
        case Role.SCALE:
            return torch.tensor(0.25)
        case Role.TENSOR_RANK:
            return torch.tensor(rank)
        case _:
            return torch.tensor(SCALARS[port.role])
