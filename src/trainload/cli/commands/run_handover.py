"""Handover of a prepared run to its driver: a supervised process, or a job of the cluster."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from trainload.cli.commands import shared
from trainload.cli.commands.keeping import keep
from trainload.cli.commands.shared import DONE
from trainload.cli.view import tables as view
from trainload.core.errors import ClusterError, LostClusterError, TrainingError


def keep_run(
    run_dir: Path,
    address: str,
    as_json: bool,
    *,
    launched: Sequence[str] | None = None,
    others: Sequence[str] = (),
) -> int:
    """Drive a run on a cluster from a separate process.

    This process imports no torch: it waits while the driver does the work.

    Args:
        run_dir: the run's folder.
        address: the cluster.
        as_json: print the result as JSON.
        launched: arguments of the `launch` that creates the run; None if it exists.
        others: further arguments of `resume`.
    """
    from trainload.launching.cluster.connection import answers

    def patience() -> float:
        from trainload.launching.run.run_spec import read_spec

        return read_spec(run_dir).node_patience

    again = [*_driver(run_dir, address, as_json), *others]
    return keep(
        again if launched is None else launched, again, run_dir, lambda: answers(address), patience
    )


@dataclass(slots=True)
class Prepared:
    """The folder of a run before its driver starts.

    Attributes:
        run_dir: the folder.
        made: True if this process created it.
        handed: True if another process has been asked to drive the run, and may do so.
    """

    run_dir: Path
    made: bool = False
    handed: bool = False


def detach_run(prepared: Prepared, address: str, as_json: bool, others: Sequence[str] = ()) -> int:
    """Submit the driver of a run as a job. `others` are further arguments of `resume`."""
    from trainload.launching.cluster.jobs import submit

    run_dir = prepared.run_dir
    # from here on a job may use the folder, even if this process ends
    prepared.handed = True
    try:
        job = submit(address, run_dir, [*_driver(run_dir, "auto", as_json=False), *others])
    except LostClusterError:
        raise
    except (ClusterError, TrainingError):  # no job uses it
        prepared.handed = False
        raise
    if as_json:
        shared.print_json({"run": run_dir, "job": job, "address": address})
        return DONE
    shared.out().print(
        view.table([("run", str(run_dir)), ("job", job), ("watch", f"trainload status {run_dir}")])
    )
    return DONE


@contextmanager
def nothing_left(run_dir: Path) -> Iterator[Prepared]:
    """Remove the folder of a run on exit, with the parents that were created for it.

    Only if this process created it, and no run has begun there or can begin.

    The block sets `made` once it owns the folder: if two launches use one folder concurrently, the
    one that fails leaves the folder to the other.
    """
    from trainload.launching.run.journal import JOURNAL
    from trainload.launching.run.run_state import STATE_FILE

    new_folders = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    prepared = Prepared(run_dir)
    try:
        yield prepared
    finally:
        begun = (run_dir / JOURNAL).exists() or (run_dir / STATE_FILE).exists()
        if new_folders and prepared.made and not prepared.handed and not begun:
            shutil.rmtree(run_dir)
            for path in new_folders[1:]:
                with suppress(OSError):  # another process uses it meanwhile
                    path.rmdir()


def _driver(run_dir: Path, address: str, as_json: bool) -> list[str]:
    """Return the arguments of the command that drives a run."""
    policy = shared.policy()
    options = [] if policy is None else ["--policy", str(policy.absolute())]
    return [
        *options,
        "resume",
        str(run_dir),
        "--address",
        address,
        *(["--json"] if as_json else []),
    ]
