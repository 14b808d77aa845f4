"""A package as the source of plans: computations that several plans share run once."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import torch

from trainload.autograd_trace.graphs import CHUNK, StepGraph, UpdateGraph
from trainload.packaging.package import Package
from trainload.sharding.planner.check_plan import groups_of
from trainload.sharding.plans.buckets import parameter_order
from trainload.sharding.plans.device_step_graphs import step_graphs
from trainload.sharding.plans.plan import Shard
from trainload.sharding.plans.strategies import Divide
from trainload.sharding.rewriting.chunked_loss import check_chunked
from trainload.sharding.rewriting.local_step import Local, completed
from trainload.sharding.rewriting.offload import check_offload
from trainload.sharding.tensor.partition import Partitioned, partition
from trainload.sharding.tensor.tensor_axis import TensorAxis, divide

UNDIVIDED = TensorAxis(1, {})


class Source:
    """The inputs of a package's plans, computed once.

    Args:
        package: the package.
        evaluates: True if plans must also fit the evaluation graphs, which then have to be derived.

    Attributes:
        device: device of the step graphs. Plans are made without the devices that they are for.
        trained: parameter -> its optimizer groups.
        whole: groups whose update needs whole parameters.
    """

    def __init__(self, package: Package, *, evaluates: bool = True) -> None:
        self.package = package
        self._evaluates = evaluates
        self.device = torch.device("cpu")
        self.trained = groups_of(package)
        self.whole = {u.group for u in package.manifest.updates if not u.elementwise}
        self._axes: dict[tuple[int, tuple[tuple[str, Shard | None], ...], Divide], TensorAxis] = {}
        self._steps: dict[str, StepGraph] = {}
        self._partitioned: dict[
            tuple[str, int, tuple[tuple[str, Shard], ...], bool], Partitioned
        ] = {}
        self._local: dict[Local, dict[str, StepGraph]] = {}

    def steps(self, names: Iterable[str]) -> dict[str, StepGraph]:
        """Return the package's step graphs of these names. Each is derived on first use."""
        requested = tuple(names)
        self._steps |= step_graphs(
            self.package, self.device, [name for name in requested if name not in self._steps]
        )
        return {name: self._steps[name] for name in requested}

    @functools.cached_property
    def updates(self) -> tuple[UpdateGraph, ...]:
        """Update graphs of the package."""
        return self.package.updates()

    @property
    def training(self) -> list[StepGraph]:
        """Training graphs, the main one first."""
        return list(self.steps(self.package.manifest.training_graphs()).values())

    @functools.cached_property
    def order(self) -> list[str]:
        """Names of the parameters that own storage, in the order of their first use."""
        package = self.package
        names = [
            name
            for graph in package.manifest.training_graphs()
            for name in parameter_order(package.captured(graph))
        ]
        aliases = {
            p.name: p.alias_of for p in package.manifest.parameters if p.alias_of is not None
        }
        return list(dict.fromkeys(aliases.get(name) or name for name in names))

    def tensor(
        self, ranks: int, rules: Mapping[str, Shard | None] | None = None, what: Divide = "tensor"
    ) -> TensorAxis:
        """Return what a tensor axis of this number of ranks divides. Raise PlanError if a rule does
        not fit, or nothing can be divided.
        """
        if ranks == 1:
            return UNDIVIDED
        key = ranks, tuple((rules or {}).items()), what
        if key not in self._axes:
            whole = {
                name for name, groups in self.trained.items() if self.whole.intersection(groups)
            }
            main = self.package.manifest.training_graphs()[0]
            self._axes[key] = divide(
                self.training,
                ranks,
                whole,
                rules,
                what,
                functools.partial(self._partition, main, ranks),
            )
        return self._axes[key]

    def local(self, axes: Local, names: Iterable[str] | None = None) -> dict[str, StepGraph]:
        """Return the step graphs of one rank, before sharding over the data axis and before cutting
        into stages.

        Args:
            axes: the axes that divide them.
            names: names of the graphs; None for all that are called in training, and in evaluation
                if plans cover that.
        """
        graphs = self._local.setdefault(axes, {})
        requested = tuple(
            self.package.manifest.step_graphs(evaluates=self._evaluates) if names is None else names
        )
        lacking = [name for name in requested if name not in graphs]
        # all together, because a derivation needs the program, which is then read once
        self.steps(lacking)
        graphs |= {
            name: completed(self._whole_or_partitioned(name, axes), axes) for name in lacking
        }
        return {name: graphs[name] for name in requested}

    def check_chunks(self, axes: Local) -> None:
        """Raise PlanError if the main graph's logits cannot be computed in chunks."""
        main = self.package.manifest.training_graphs()[0]
        nodes = self.local(axes, [main])[main].module.graph.nodes
        if not any(CHUNK in node.meta for node in nodes):
            check_chunked(self._whole_or_partitioned(main, axes), axes.loss_chunks, main)

    def check_offload(self, axes: Local) -> None:
        """Raise PlanError if no training graph has anything to offload."""
        names = self.package.manifest.training_graphs()
        check_offload(list(self.local(axes, names).values()), ", ".join(names))

    def _whole_or_partitioned(self, name: str, axes: Local) -> StepGraph:
        if axes.tensor_ranks == 1:
            return self.steps([name])[name]
        return self._partition(
            name, axes.tensor_ranks, dict(axes.shards), positions=axes.positions
        ).step

    def _partition(
        self, name: str, ranks: int, shards: Mapping[str, Shard], *, positions: bool
    ) -> Partitioned:
        """Partition a step graph, once for all plans that differ only in other axes."""
        ordered = tuple(sorted(shards.items()))
        key = name, ranks, ordered, positions
        if key not in self._partitioned:
            self._partitioned[key] = partition(
                self.steps([name])[name], ranks, dict(ordered), positions=positions
            )
        return self._partitioned[key]

    def forget(self) -> None:
        """Free the graphs that were made for plans."""
        self._local.clear()
        self._partitioned.clear()
