"""Hand a prepared run over to its driver: a process that is kept, or a job of the cluster."""

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


def keep_run(run_dir: Path, address: str, as_json: bool, others: Sequence[str] = ()) -> int:
    """Drives a run on a cluster from a process of its own.

    `others`: what `resume` is asked for besides.
    """
    from trainload.launching.cluster.connection import answers
    from trainload.launching.run.run_spec import read_spec

    return keep(
        [*_driver(run_dir, address, as_json), *others],
        run_dir,
        lambda: answers(address),
        read_spec(run_dir).node_patience,
    )


@dataclass(slots=True)
class Prepared:
    """The folder of a run that somebody is to drive. made: by this process. handed: somebody else
    has been asked to drive it, and may.
    """

    run_dir: Path
    made: bool = False
    handed: bool = False


def detach_run(prepared: Prepared, address: str, as_json: bool, others: Sequence[str] = ()) -> int:
    """Has the cluster drive a run. `others`: what `resume` is asked for besides."""
    from trainload.launching.cluster.jobs import submit

    run_dir = prepared.run_dir
    # from here on a job may use the folder, whatever becomes of this process
    prepared.handed = True
    try:
        job = submit(address, run_dir, [*_driver(run_dir, "auto", as_json=False), *others])
    except LostClusterError:
        raise
    except (ClusterError, TrainingError):  # there is no job, or none any more
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
    """Remove a run's folder on exit, and those above that were made for it, if this process made it
    and no run has begun there or can.

    The block sets `made` once the folder is its own: of two launches into one folder, the one that
    loses leaves the other's alone.
    """
    from trainload.launching.run.journal import JOURNAL
    from trainload.launching.run.run_state import STATE_FILE

    made = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    prepared = Prepared(run_dir)
    try:
        yield prepared
    finally:
        begun = (run_dir / JOURNAL).exists() or (run_dir / STATE_FILE).exists()
        if made and prepared.made and not prepared.handed and not begun:
            shutil.rmtree(run_dir)
            for path in made[1:]:
                with suppress(OSError):  # somebody else uses it meanwhile
                    path.rmdir()


def _driver(run_dir: Path, address: str, as_json: bool) -> list[str]:
    """The arguments by which a run is driven."""
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
