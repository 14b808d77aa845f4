"""Fault tolerance of a run on Ray: attempts, each from the last checkpoint, until the run has
ended.

The driver makes decisions and writes the journal; ranks train. Ranks report through the mailbox,
not through the run's storage, so that a failure of storage is not mistaken for a hang.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ray.exceptions import RayError

from trainload.core.errors import LostClusterError, first_line
from trainload.core.storage.lease import LeaseLostError
from trainload.launching.cluster.ray_cluster import RayCluster
from trainload.launching.cluster.states import TRANSITIONS, Attempting, Ended, Placing, State
from trainload.launching.cluster.supervised_run import AnyCluster, SupervisedRun
from trainload.launching.ranks.fork_server import ServerOptions
from trainload.launching.run.contact import asked_since_lost, clear_requests, withdraw
from trainload.launching.run.driver import CheckDriver
from trainload.launching.run.journal import POLL_SECONDS, Event, last_word
from trainload.launching.run.publication import Publication
from trainload.launching.run.run_spec import RunSpec


def supervise(
    spec: RunSpec,
    on_event: Callable[[Event], None],
    check_driver: CheckDriver,
    fork_server: ServerOptions,
    publication: Publication | None = None,
) -> None:
    """Drive a run on the cluster to which this process is connected, and which must be large enough
    for its plan, until it has completed its last step.

    Ctrl-C makes the ranks stop after their step and write a checkpoint; so does a file "stop" in
    the run's folder. If that file was created after the previous driver was lost, the run stops
    before it begins.

    Args:
        spec: the run. Its folder contains run.json.
        on_event: called with every event after it is in the journal.
        check_driver: raises LeaseLostError if another process drives the run.
        fork_server: the fork server of a node.
        publication: publishes the run's records.

    Raises:
        RunInterrupted: a stop was requested.
        TrainingError: ranks failed too often without a new checkpoint in between.
        ClusterError: nodes were missing for too long.
        LostClusterError: the cluster no longer responds.
        LeaseLostError: another process drives the run; journal, state and requests are left to it.
        TrainloadError: an error raised by a rank.
    """
    cluster = RayCluster(spec.plan.cluster.device, fork_server)
    run = SupervisedRun(spec, cluster, on_event, check_driver, publication=publication)
    Supervisor(run, cluster).run()


class Supervisor:
    """Driver that takes a run from state to state.

    Args:
        run: the run.
        cluster: its cluster.
        sleep: waits for a number of seconds.
    """

    def __init__(
        self,
        run: SupervisedRun,
        cluster: AnyCluster,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._run = run
        self._cluster = cluster
        self._sleep = sleep

    def run(self) -> None:
        """Drive the run until it is over; see `supervise`."""
        run_dir = self._run.run_dir
        stop_requested = asked_since_lost(run_dir)
        try:
            self._run.check_driver()
            clear_requests(run_dir)  # left by an attempt that was killed before it could stop
            self._run.stop_requested = stop_requested
            self._pass_states()
        except LeaseLostError:
            raise
        except BaseException as error:
            self._run.journal.say(last_word(error))
            self._leave()
            raise
        self._leave()

    def _leave(self) -> None:
        """Say that the run has no driver any more."""
        self._run.check_driver()
        withdraw(self._run.run_dir)
        self._run.write_state(over=True)

    def _pass_states(self) -> None:
        state: State = Placing(self._run)
        try:
            try:
                while not isinstance(state, Ended):
                    state = self.next(state)
            except RayError:
                raise  # without the cluster nothing can be ended
            except BaseException:
                if isinstance(state, Attempting):
                    state.watched.attempt.end()
                self._cluster.close()
                raise
            self._cluster.close()
        except RayError as error:
            raise LostClusterError(
                "the cluster no longer responds",
                where=self._run.spec.run_dir,
                got=first_line(error),
                hint=f"When it responds again, continue with: {self._run.resume_command()}",
            ) from error

    def next(self, state: State) -> State:
        """Return the state after `state`, having waited if nothing has changed."""
        try:
            following = state.advance()
            if following is state:
                self._sleep(POLL_SECONDS)
                return state
        except KeyboardInterrupt:
            self._interrupt(state)
            return state
        assert type(following) in TRANSITIONS[type(state)], (state, following)
        return following

    def _interrupt(self, state: State) -> None:
        """Request a stop after the current step, at the first Ctrl-C while ranks train."""
        run = self._run
        if run.stop_requested or not run.journal.stepped or not isinstance(state, Attempting):
            raise KeyboardInterrupt
        run.stop_requested = True
        run.journal.write(
            "stage",
            name="stopping after this step, with a checkpoint; press Ctrl-C again to stop"
            " immediately",
        )
