"""The reason why an attempt ended early."""

from __future__ import annotations

from collections.abc import Callable, Collection

from trainload.launching.cluster.attempt import AttemptError
from trainload.launching.cluster.retries import Failure
from trainload.launching.cluster.supervised_run import WatchedAttempt
from trainload.launching.cluster.tasks import last_line
from trainload.launching.run.monitor import in_words


def why_failed(
    watched: WatchedAttempt, unreachable: Callable[[Collection[str]], set[str]]
) -> Failure | None:
    """Return why an attempt that is over has failed; None if it has not.

    Args:
        watched: the attempt, none of whose ranks raised a TrainloadError.
        unreachable: returns those of these nodes that do not respond.
    """
    attempt = watched.attempt
    if watched.hang is not None:
        hang = watched.hang
        return Failure(
            "hang",
            f"{hang.why}, for {hang.seconds:.0f} s",
            hang.ranks,
            tuple(attempt.seats[rank] for rank in hang.ranks),
            {rank: str(each) for rank, each in hang.doing.items()},
        )
    error = attempt.error
    if error is None:
        return None
    failures = error.failures if isinstance(error, AttemptError) else {}
    died = tuple(rank for rank in sorted(failures) if failures[rank].died)
    ranks = died or tuple(sorted(failures))
    text = failures[ranks[0]].text if ranks else last_line(str(error))
    # A rank that raised proves that its node is alive, however busy. So only nodes whose actor has
    # died are probed, or all nodes if no rank began.
    gone = unreachable(set(error.nodes) if isinstance(error, AttemptError) else set(attempt.seats))
    if gone:
        ranks = tuple(rank for rank, seat in enumerate(attempt.seats) if seat in gone)
        names = tuple(sorted(gone))
        message = f"node {', '.join(names)} is gone, with {in_words(ranks)}"
        return Failure("node", message, ranks, names, watched.doing, error)
    if not failures:
        message = f"the workers could not be started: {text}"
        return Failure("error", message, doing=watched.doing, cause=error)
    message = f"{in_words(ranks)} {'died' if died else 'failed'}: {text}"
    return Failure("death", message, ranks, doing=watched.doing, cause=error)
