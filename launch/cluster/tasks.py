"""Small tasks on particular nodes: run trial steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from trainload.core.credentials import no_secrets_raised
from trainload.core.errors import ClusterError, TrainingError, TrainloadError
from trainload.launching.cluster.nodes import NODE_LABEL, in_use_error, resource_of
from trainload.launching.cluster.reservation import RESERVE_SECONDS, DevicesTakenError, reserved

if TYPE_CHECKING:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from trainload.launching.run.run_spec import RunSpec
    from trainload.launching.worker.trial import Trial


def on_node(node: str) -> Any:
    """Return a decorator for tasks and actors that run on a node without using its devices."""
    return ray.remote(num_cpus=0, label_selector={NODE_LABEL: node})


def tried_out(spec: RunSpec, place: str, local_world: int) -> Trial:
    """Run trial steps of a run on a node, with one of its free devices (`trial.try_out`).

    Raises:
        ClusterError: there is no result in time, or the node's devices are in use.
        TrainingError: the task fails with an error of Ray's.
        TrainloadError: an error of `trial.try_out`.
    """
    name = resource_of(spec.plan.cluster.device)
    try:
        with reserved(place, name, 1) as strategy:
            outcome = _answer(spec, place, local_world, name, strategy)
    except DevicesTakenError as error:
        got = f"none within {RESERVE_SECONDS:g} s"
        raise in_use_error(spec.plan.cluster.device, f"node {place}", got) from error
    if isinstance(outcome, TrainloadError):
        raise outcome
    return outcome


def _answer(
    spec: RunSpec,
    place: str,
    local_world: int,
    resource: str,
    strategy: PlacementGroupSchedulingStrategy,
) -> Trial | TrainloadError:
    options: dict[str, Any] = {"num_gpus": 1} if resource == "GPU" else {"num_cpus": 1}
    task = ray.remote(max_calls=1, max_retries=0)(_try_out).options(
        **options, scheduling_strategy=strategy
    )
    reference = task.remote(spec, local_world)
    try:
        outcome: Trial | TrainloadError = ray.get(reference, timeout=spec.start_timeout)
    except GetTimeoutError as error:
        ray.cancel(reference, force=True)
        raise ClusterError(
            "the trial step did not finish in time",
            where=f"node {place}",
            expected=f"a result within {spec.start_timeout:g} s",
            got="none",
            hint="Check what else uses the node, or allow more time: --set start_timeout=SECONDS.",
        ) from error
    except RayError as error:
        raise TrainingError(
            "the trial step failed", where=f"node {place}", got=last_line(str(error))
        ) from error
    return outcome


def last_line(text: str) -> str:
    """Return the last line of a traceback, which has the exception."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].partition(" Worker exit detail: ")[0][:400] if lines else "no reason given"


def _try_out(spec: RunSpec, local_world: int) -> Trial | TrainloadError:
    # slow to import, and the other tasks of this module do not need it
    from trainload.launching.worker.trial import try_out

    try:
        with no_secrets_raised():
            return try_out(spec, local_world)
    except TrainloadError as error:  # returned, since Ray would wrap a raised error
        return error
