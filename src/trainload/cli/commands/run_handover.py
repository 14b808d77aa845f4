"""Handover of a prepared run to its driver: a supervised process, or a job of the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainload.cli.commands import shared
from trainload.cli.commands.keeping import keep
from trainload.cli.commands.shared import DONE
from trainload.cli.view import tables as view
from trainload.core.errors import ClusterError, LostClusterError, StorageError, TrainingError
from trainload.launching.run.run_place import place_name

if TYPE_CHECKING:
    from trainload.launching.run.run_directory import RunFolder


def keep_run(
    run_dir: Path,
    address: str,
    as_json: bool,
    *,
    launched: Sequence[str] | None = None,
    others: Sequence[str] = (),
) -> int:
    """Drive a run on a cluster from a separate process.

    This process waits while the driver does the work, and imports no torch for it.

    Args:
        run_dir: the run's folder.
        address: the cluster.
        as_json: print the result as JSON.
        launched: arguments of the `launch` that creates the run; None if it exists.
        others: further arguments of `resume`.
    """
    from trainload.launching.cluster.connection import answers

    again = [*_driver(str(run_dir), address, as_json), *others]
    return keep(
        again if launched is None else launched,
        again,
        run_dir,
        lambda: answers(address),
        as_json=as_json,
    )


def detach_run(folder: RunFolder, address: str, as_json: bool, others: Sequence[str] = ()) -> int:
    """Submit the driver of a run as a job. `others` are further arguments of `resume`."""
    from trainload.launching.cluster.jobs import submit

    run_dir, place = folder.run_dir, place_name(folder.run_dir)
    # from here on a job may use the folder, even if this process ends
    folder.is_kept = True
    try:
        job = submit(address, run_dir, [*_driver(place, "auto", as_json=False), *others])
    except LostClusterError:
        raise
    except (ClusterError, TrainingError, StorageError):  # no job uses it
        folder.is_kept = False
        raise
    if as_json:
        shared.print_json({"run": place, "job": job, "address": address})
        return DONE
    shared.out().print(
        view.table([("run", place), ("job", job), ("watch", f"trainload status {place}")])
    )
    return DONE


def _driver(run: str, address: str, as_json: bool) -> list[str]:
    """Return the arguments of the command that drives a run, in a folder or at a URL."""
    policy = shared.policy()
    options = [] if policy is None else ["--policy", str(policy.absolute())]
    return [
        *options,
        "resume",
        run,
        "--address",
        address,
        *(["--json"] if as_json else []),
    ]
