"""Explain a step whose loss or gradient is not finite: by the operator that made the first such
value, which all ranks find together, and by the data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from trainload.core.errors import DivergedError, first_line
from trainload.launching.data.run_data import RunData
from trainload.launching.debugging.bad_value import Finding, first_of
from trainload.launching.debugging.value_watch import Origin, Watch
from trainload.launching.node.build import uncompiled_build
from trainload.launching.node.built_graphs import Built
from trainload.launching.node.process_groups import gathered
from trainload.launching.worker.calls import Microbatch
from trainload.launching.worker.engine import Draw, Engine, NotFiniteError
from trainload.launching.worker.not_finite import first_not_finite
from trainload.launching.worker.row_bisection import causing_rows
from trainload.packaging.package import Package
from trainload.sharding.plans.plan import Plan


@dataclass(frozen=True, slots=True)
class Search:
    """A rank's part of a search.

    Attributes:
        package: package that is trained.
        plan: plan of the run.
        rank: this rank.
        device: device of this rank.
        data: the run's data.
        source: its path or URL.
        control: group of all ranks for messages; None if there is one rank.
    """

    package: Package
    plan: Plan
    rank: int
    device: torch.device
    data: RunData
    source: str
    control: dist.ProcessGroup | None

    def build(self) -> Built:
        """Return the interpreted build of this rank whose graphs know their source lines."""
        return uncompiled_build(
            self.package,
            self.plan,
            self.device,
            self.plan.pipeline_index(self.rank),
            evaluates=False,
            sources=True,
        )

    def rows_of(self, microbatch: Microbatch, rows: Sequence[int]) -> tuple[tuple[int, ...], str]:
        """Return the numbers of rows of a microbatch in their dataset, and its name; () if they are
        unknown.
        """
        known = microbatch.rows
        _, name = self.data.origin(microbatch.part, known, None, self.source)
        return () if known is None else tuple(sorted(int(known[row]) for row in rows)), name

    def _origin(self, engine: Engine) -> Origin:
        """Return the function that maps rows of an engine's calls to those of the data."""

        def rows_of_call(rows: Sequence[int]) -> tuple[tuple[int, ...], str]:
            called = engine.microbatch
            assert called is not None, "a graph is called"
            return self.rows_of(called, rows)

        return rows_of_call

    def watch(self, engine: Engine, *, above: float = math.inf) -> Watch:
        """Return a search in an engine's calls.

        Args:
            engine: the engine.
            above: magnitude above which a finite value counts as bad, wherever it leads.
        """
        return Watch(
            self.plan,
            self.rank,
            origin=self._origin(engine),
            microbatch=partial(_number_of_microbatch, engine),
            above=above,
            everywhere=math.isfinite(above),
        )

    def with_rows(
        self, finding: Finding, engine: Engine, built: Built, *, above: float = math.inf
    ) -> Finding:
        """Return a finding with the rows that cause it: those that its value shows, or else by
        computing the engine's last turn with fewer rows. All ranks must call it.

        Args:
            finding: the finding, in the last turn of the engine.
            engine: the engine.
            built: build of the search.
            above: as in `watch`.
        """
        found = finding.sighting
        if found.rows or found.part not in ("forward", "backward") or found.microbatch is None:
            return finding

        def is_found(changed: Draw | None = None) -> bool:
            watch = self.watch(engine, above=above)
            engine.repeat_turn(watch.watched(built), changed if has_rows else None)
            again = self.finding(watch)
            return again is not None and again.sighting.operator == found.operator

        plan, draw = self.plan, engine.begun_draw
        has_rows = plan.data_index(self.rank) == plan.data_index(finding.rank)
        if not is_found():
            return finding  # another graph of the round made it
        rows = causing_rows(draw, found.microbatch, is_found)
        own = self.rows_of(draw.microbatches[found.microbatch], rows)
        numbers, name = gathered(own, self.control)[finding.rank]
        return replace(finding, sighting=replace(found, rows=numbers, source=name))

    def finding(self, watch: Watch) -> Finding | None:
        """Return the first bad value that the ranks have seen, the same on all.

        All ranks must call it.
        """
        return first_of(enumerate(gathered(watch.sightings, self.control)))


def explain_divergence(
    error: NotFiniteError, search: Search, engine: Engine, draws: Sequence[Draw], step: int
) -> tuple[DivergedError, Finding | None]:
    """Return the error of a step for a user, and the first value that is not finite.

    The turn that failed is computed again, interpreted. All ranks must call this; the results are
    the same on all.

    Args:
        error: error of the engine.
        search: this rank's part of the search.
        engine: engine of the rank.
        draws: batches of the step.
        step: number of the step, from 0.
    """
    several = len(search.package.recipe.graphs) > 1
    of_data = next(
        filter(None, gathered(first_not_finite(draws, search.data, search.source), search.control)),
        "",
    )
    # Last, since no message between ranks may follow: a rank whose search fails ends, and thereby
    # the searches of the others, which wait for it.
    finding, reason = _find(search, engine)
    advice = "Lower the learning rate, clip the gradient, or inspect the data of this step."
    explained = DivergedError(
        f"the {error.quantity} is {error.value}",
        where=f"step {step + 1}" + (f", graph {error.graph}" if several else ""),
        expected="a finite number",
        got=str(error.value),
        hint=" ".join(
            [
                reason if finding is None else str(finding),
                "The last checkpoint was written before this step.",
                f"Check the data: {of_data}." if of_data else advice,
            ]
        ),
    )
    return explained, finding


def _find(search: Search, engine: Engine) -> tuple[Finding | None, str]:
    """Return the first value that is not finite, or a sentence that says why it is unknown."""
    try:
        watch, built = search.watch(engine), search.build()
        engine.repeat_turn(watch.watched(built))
        finding = search.finding(watch)
        if finding is not None:
            finding = search.with_rows(finding, engine, built)
    except Exception as error:  # noqa: BLE001  # the step has failed already, which is reported
        return None, f"The operator could not be found: {first_line(error)}"
    if finding is None:
        return None, "All values are finite when the step is computed again, interpreted."
    return finding, ""


def _number_of_microbatch(engine: Engine) -> int | None:
    """Return the number of the microbatch of an engine's last call in its draw."""
    called = engine.microbatch
    numbers = enumerate(engine.begun_draw.microbatches)
    return next((number for number, each in numbers if each is called), None)
