"""Compare the compiled graphs of a step with the interpreted ones, on the step's own values."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainload.capture.job.ambient import neutrally
from trainload.core.errors import CompileError
from trainload.launching.api.replay import replaying
from trainload.launching.node.build import can_compile, compile_build, load_build
from trainload.launching.node.cache import default_cache_dir
from trainload.launching.node.graph_comparison import Comparison, read_comparison
from trainload.launching.verification.verify_build import Verifier
from trainload.packaging.package import Package


@dataclass(frozen=True, slots=True)
class CompiledComparison:
    """Result of `compare_compiled`.

    Attributes:
        step: number of the step, from 1.
        graphs: comparison of each compiled graph, by name.
        seconds: duration.

    Example:
        for each in trainload.compare_compiled("runs/first", step=2).graphs:
            print(each)
    """

    step: int
    graphs: tuple[Comparison, ...]
    seconds: float

    @property
    def departing(self) -> list[Comparison]:
        """Comparisons of the graphs that differ by more than rounding explains, or fail."""
        return [each for each in self.graphs if each.interpreted]

    def as_json(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {
            "step": self.step,
            "seconds": round(self.seconds, 3),
            "graphs": [asdict(each) for each in self.graphs],
        }


@neutrally
def compare_compiled(
    source: str | Path | Package, *, data: str | Path | None = None, step: int | None = None
) -> CompiledComparison:
    """Compute a step again in one process, compiled, and compare every graph with the interpreted
    one on the step's own arguments; name the operator and the line at which a graph differs.

    A run makes the same comparison, of the graphs of its own plan, at the first call of each graph
    on a machine; this makes it again, for the values of any step. The graphs are taken from the
    cache, or compiled.

    Args:
        source: folder or URL of a run, or a package.
        data: rows, for a package: path, URL or mixture, as for `launch`.
        step: number of the step, from 1. Default: the last one of a run; the first step for a
            package. If it is the first step, the update is that of the next one, since the first
            one makes the optimizer's state.

    Raises:
        RequestError: the step does not exist, a package has no data, or a run has its own.
        CompileError: this machine has no C++ compiler.
        TrainloadError: an error of the run, the package, the data or the checkpoints.

    Example:
        comparison = trainload.compare_compiled("runs/first", step=2)
        print(comparison.departing)
    """
    began = time.perf_counter()
    if not can_compile():
        raise CompileError(
            "graphs cannot be compiled", where="this machine", expected="a C++ compiler"
        )
    with (
        replaying(source, data, step) as (replay, start, number),
        tempfile.TemporaryDirectory(prefix="trainload-") as scratch,
    ):
        engine, plan, cache = replay.engine, replay.plan, default_cache_dir()
        package, device = replay.package, replay.search.device
        build = compile_build(package, plan, device, cache, lambda *_: None, evaluates=False)
        # comparisons that are stored beside the build were made on other values
        comparisons = Path(scratch)
        verifier = Verifier(package, plan, 0, device, comparisons, None)
        compiled = verifier.verified(load_build(build, package, plan, cache))
        has_state = bool(engine.held.states) or number > start
        for each, draws in replay.batches(start, number + (1 if has_state else 2)):
            engine.built = compiled if each >= number else replay.built
            with replay.explaining(each):
                engine.step(each, draws)
        graphs = [read_comparison(comparisons, name) for name in sorted(compiled.names())]
        failed = [
            Comparison(name, interpreted=True, error=reason)
            for name, reason in compiled.failed.items()
        ]
        found = (*failed, *(each for each in graphs if each is not None))
        return CompiledComparison(number + 1, found, time.perf_counter() - began)
