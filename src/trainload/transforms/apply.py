"""Application of passes to a package.

Each pass is recorded, and rejected unless it preserves the results or changes are allowed.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from trainload.autograd_trace.derivation.aot import derive
from trainload.autograd_trace.derivation.step_check import check_step
from trainload.capture.job.ambient import neutrally, one_at_a_time
from trainload.capture.job.synthesise import rows_of, synthesise
from trainload.capture.operators import graphs_in, is_overload
from trainload.capture.parity.compare_programs import Difference, compare
from trainload.capture.program import GraphCapture, Program
from trainload.core.canonical_json import sha256_file
from trainload.core.errors import PackageError, PassError, TrainloadError, first_line
from trainload.core.storage.places import path_here
from trainload.core.work_steps import begin_step
from trainload.freezing.prove import keep_steps
from trainload.launching.data.dataset import Dataset
from trainload.launching.data.run_data import open_run_data
from trainload.launching.node.cache import default_cache_dir
from trainload.packaging.format.manifest_records import PassEntry
from trainload.packaging.format.package_files import check_new_folder
from trainload.packaging.format.source_map import restore_traces
from trainload.packaging.graphs.graph_replacement import with_graph
from trainload.packaging.libraries.providers import distributions_with
from trainload.packaging.package import Package, check_weights
from trainload.packaging.write import with_graphs
from trainload.passes import GRAPH, Pass
from trainload.transforms.operator_sets import counts_of

__all__ = ["Applied", "Options", "Transformation", "transform"]

Options = Mapping[str, Any]
_REPLAYS = (0, 1, 0)
"""Number of rows in addition to the example's, for each comparison batch."""
_RECORDABLE = "Use a module-level function, and numbers, strings or tuples of strings as options."


@dataclass(frozen=True, slots=True)
class Applied:
    """Result of a pass.

    Attributes:
        entry: the package's record of the pass.
        program: the graphs after the pass.
        differences: largest difference for each graph.
        calls_before: number of operator calls in all captured graphs, bodies included.
        calls_after: the same number after the pass.
    """

    entry: PassEntry
    program: Program
    differences: tuple[Difference, ...]
    calls_before: int
    calls_after: int

    @property
    def worst(self) -> Difference:
        """Largest difference relative to its tolerance."""
        return max(
            self.differences, key=lambda difference: difference.distance / difference.tolerance
        )


class Transformation:
    """A sequence of passes over a package's graphs.

    Laws: `program` is the package's program after the kept passes. Each pass was compared with the
    program after the last allowed change, or with the package's program.

    Args:
        package: the package.
        data: rows for the comparison, as Parquet, npz or a mixture, as for a run. None, and for
            variants without rows: synthetic batches from the example's quantiles.

    Raises:
        PackageError: the package is abstract, so nothing can be compared.
    """

    def __init__(self, package: Package, data: str | Path | None = None) -> None:
        check_weights(package)
        self.package = package
        self.program = package.program()
        for name, capture in self.program.graphs.items():
            restore_traces(package.path, name, capture.exported)
        self.passes: tuple[PassEntry, ...] = ()
        self._before = self.program
        rows: dict[str, Dataset] = {}
        if data is not None:
            main = self.program.graphs[package.recipe.main]
            opened = open_run_data(data, package, rows_of(main), default_cache_dir())
            rows = {part.variant: part.dataset for part in reversed(opened.parts)}
        self._batches = {
            name: _batches(capture, rows.get(capture.variant))
            for name, capture in self.program.graphs.items()
        }

    def apply(self, function: Pass, options: Options | None = None) -> Applied:
        """Apply a pass to every graph and compare the results, without keeping them.

        Raises:
            PassError: the pass fails, or its result does not fit the package.
            DataError: there is no data for the comparison.
        """
        options = dict(options or {})
        module_name = getattr(function, "__module__", "")
        name = f"{module_name}:{getattr(function, '__name__', type(function).__name__)}"
        graphs: dict[str, GraphCapture] = {}
        for graph, capture in self.program.graphs.items():
            where = f"{name}, graph {graph}"
            begin_step(f"applying {name} to graph {graph}")
            module = copy.deepcopy(capture.exported.graph_module)
            module.meta[GRAPH] = graph
            try:
                result = function(module, self.program, **options)
            except TrainloadError:
                raise
            except Exception as error:  # a pass is user code and may raise anything
                raise PassError(
                    f"the pass fails: {type(error).__name__}: {error}", where=where
                ) from error
            if not isinstance(result, GraphModule):
                raise PassError(
                    "the pass returns no graph",
                    where=where,
                    expected="a torch.fx.GraphModule",
                    got=type(result).__name__,
                )
            result.meta.pop(GRAPH, None)
            _fill_metadata(result, where)
            try:
                graphs[graph] = dataclasses.replace(
                    capture, exported=with_graph(capture.exported, result, where)
                )
            except PackageError as error:
                raise PassError(
                    error.problem, where=error.where, expected=error.expected, got=error.got
                ) from error
            _check_sizes(graphs[graph], where)
        begin_step("comparing the graphs")
        after = dataclasses.replace(self.program, graphs=graphs)
        differences = tuple(
            compare(graph, self._before, after, self._batches[graph]) for graph in graphs
        )
        entry = _entry(
            function, name, options, preserving=all(difference.equal for difference in differences)
        )
        return Applied(
            entry,
            after,
            differences,
            sum(counts_of(self.program).values()),
            sum(counts_of(after).values()),
        )

    def keep(self, applied: Applied, *, allow_change: bool = False) -> None:
        """Keep the result of a pass.

        Raises:
            PassError: the pass changes what is computed, and that is not allowed.
        """
        if not applied.entry.preserving and not allow_change:
            worst = applied.worst
            raise PassError(
                f"the pass changes the {worst.graph} graph's {worst.value}",
                where=applied.entry.name,
                expected=f"a relative difference of at most {worst.tolerance:g}",
                got=f"{worst.distance:.2g}",
                hint=(
                    "If the change is intended, allow it: --allow-change, or allow_change=True. The"
                    " package will say so."
                ),
            )
        self.program = applied.program
        self.passes += (applied.entry,)
        if not applied.entry.preserving:
            self._before = applied.program

    def write(self, path: str | Path) -> Package:
        """Derive the step graphs, prove them equal to autograd, and write the package, whose parent
        is the original one.

        Raises:
            CaptureError: no sound step graph can be derived any more.
            StorageError: the path is taken or cannot be written.
        """
        cpu = torch.device("cpu")
        steps = {graph: derive(self.program, graph, cpu) for graph in self.program.graphs}
        trained = {
            name: steps[name] for name, graph in self.program.graphs.items() if graph.training
        }
        for name, step in trained.items():
            begin_step(f"comparing the joint graph of {name} with autograd")
            check_step(self.program, name, step, self._batches[name][0])
        package = with_graphs(self.package, path_here(path), self.program, self.passes)
        keep_steps(package, trained)
        return package


@one_at_a_time
@neutrally
def transform(
    package: Package,
    passes: Sequence[Pass | tuple[Pass, Options]],
    path: str | Path,
    *,
    allow_change: bool = False,
    data: str | Path | None = None,
    on_pass: Callable[[Applied], None] | None = None,
) -> Package:
    """Apply passes to a package's captured graphs and write a new package.

    After each pass, loss, metrics, buffers and every gradient are compared with those before it, on
    batches of two sizes, each with its own seed. The updates, the weights and the recipe stay the
    same.

    Args:
        package: the package, which is not changed.
        passes: the passes in order; each is a function, or a pair of a function and its keyword
            arguments.
        path: the package to write.
        allow_change: if True, keep a pass that changes what is computed, and record that it does.
        data: rows for the comparison; None: synthetic batches from the example's quantiles in the
            package.
        on_pass: called with the result of each pass.

    Raises:
        PassError: a pass fails, or changes what is computed without `allow_change`.
        StorageError: the path is taken.

    Example:
        from trainload.passes import decompose, eliminate_dead_code

        chosen = [eliminate_dead_code, (decompose, {"operators": "core"})]
        new = trainload.transform(package, chosen, "new.tl")
    """
    check_new_folder(path_here(path))
    work = Transformation(package, data)
    for item in passes:
        function, options = item if isinstance(item, tuple) else (item, {})
        applied = work.apply(function, options)
        work.keep(applied, allow_change=allow_change)
        if on_pass is not None:
            on_pass(applied)
    return work.write(path)


def _batches(capture: GraphCapture, rows: Dataset | None) -> list[dict[str, Tensor]]:
    if rows is None:
        return [synthesise(capture, seed, more) for seed, more in enumerate(_REPLAYS)]
    names = {spec.name for spec in capture.inputs}
    batches = []
    for seed, more in enumerate(_REPLAYS):
        batch = rows.batch(np.arange(seed, seed + rows_of(capture, more)) % rows.size)
        # inputs that other graphs feed are not in the data
        fed = {} if names <= batch.keys() else synthesise(capture, seed, more)
        batches.append({name: batch[name] if name in batch else fed[name] for name in names})
    return batches


def _check_sizes(capture: GraphCapture, where: str) -> None:
    """Check that dynamic sizes still are: torch specialises a symbol to the example's size when
    Python compares them.
    """
    placeholders = [node for node in capture.exported.graph.nodes if node.op == "placeholder"]
    for spec, node in zip(
        capture.inputs, placeholders[len(placeholders) - len(capture.inputs) :], strict=True
    ):
        for declared, size in zip(spec.shape, node.meta["val"].shape, strict=True):
            if isinstance(declared, str) and (isinstance(size, int) or size.node.expr.is_number):
                raise PassError(
                    "the pass fixes a size that changes from call to call",
                    where=f"{where}, input {spec.name}",
                    expected=declared,
                    got=str(size),
                    hint=(
                        "Do not compare sizes with numbers in Python: a comparison fixes a symbolic"
                        " size."
                    ),
                )


def _fill_metadata(module: GraphModule, where: str) -> None:
    """Set `meta["val"]` of new nodes, and check the graph by torch's lint."""
    for part in graphs_in(module):
        for node in part.graph.nodes:
            if node.op == "call_function" and "val" not in node.meta:
                node.meta["val"] = _value(node, where)
        try:
            part.graph.lint()
        except RuntimeError as error:
            raise PassError(
                f"the pass leaves a broken graph: {first_line(error)}", where=where
            ) from error
        part.recompile()


def _value(node: Node, where: str) -> Any:
    values = [source.meta.get("val") for source in node.all_input_nodes]
    mode = next(
        (
            value.fake_mode
            for value in values
            if isinstance(value, Tensor) and hasattr(value, "fake_mode")
        ),
        None,
    )
    if (
        not (is_overload(node.target) or callable(node.target))
        or any(value is None for value in values)
        or mode is None
    ):
        raise PassError(
            "a new node has no value, and it cannot be inferred",
            where=f"{where}, node {node.name}",
            hint='Set node.meta["val"] to a fake tensor of the right shape and dtype.',
        )
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda source: source.meta["val"])
    function: Any = node.target
    try:
        with mode:
            return function(*args, **kwargs)
    except Exception as error:  # an operator with wrong arguments may raise anything
        raise PassError(
            f"a new node cannot be computed: {first_line(error)}",
            where=f"{where}, node {node.name}",
        ) from error


def _entry(function: Pass, name: str, options: Options, *, preserving: bool) -> PassEntry:
    module = str(getattr(function, "__module__", ""))
    distribution = next(iter(distributions_with(module)), None)
    file = getattr(sys.modules.get(module), "__file__", None)
    recorded_options = {
        key: tuple(value) if isinstance(value, list) else value for key, value in options.items()
    }
    for key, value in recorded_options.items():
        # a one-element tensor would pass for a number
        if not isinstance(value, bool | int | float | str | tuple | None):
            raise PassError(
                f"the pass cannot be recorded: unsupported value of option {key}",
                where=name,
                got=type(value).__name__,
                hint=_RECORDABLE,
            )
    try:
        return PassEntry(
            name=name,
            distribution=distribution,
            version=None if distribution is None else version(distribution),
            source=None if file is None else sha256_file(Path(file)),
            options=recorded_options,
            preserving=preserving,
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise PassError(
            f"the pass cannot be recorded: {place}: {first['msg']}", where=name, hint=_RECORDABLE
        ) from error
