"""Build callables from a package and a plan: compiled once per node into a content-addressed cache,
loaded by every rank.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule

from trainload.autograd_trace.compiling.call_sizes import shape_environment
from trainload.autograd_trace.compiling.compiler_answers import asking_ahead
from trainload.autograd_trace.compiling.inductor import (
    Compiled,
    NotCompiled,
    compile_graph,
    has_cpp_compiler,
    load_compiled,
)
from trainload.autograd_trace.compiling.kernels import KERNELS
from trainload.autograd_trace.graphs import Port, Role
from trainload.autograd_trace.outlining.outline import OutlinedRegion
from trainload.core.canonical_json import canonical_json, sha256_file
from trainload.core.paths import empty_folder, link_or_copy
from trainload.launching.node.build_key import (
    build_name,
    build_target,
    device_of,
    threads_of,
)
from trainload.launching.node.built_graphs import Built, BuiltGraph, BuiltStages, Call, Crossing
from trainload.launching.node.cache import private_folder
from trainload.launching.node.cached_builds import (
    add_build,
    fetched_of,
    is_kept,
    is_whole,
    no_room_told,
)
from trainload.launching.node.determinism import deterministic
from trainload.launching.node.deterministic_attention import (
    define_operators,
    require_deterministic_attention,
)
from trainload.launching.node.kernel_cache import own_kernels, use_inductor_cache
from trainload.launching.node.side_by_side import side_by_side
from trainload.launching.node.utilisation import Work, work_of
from trainload.packaging.builds.build_record import INDEX_FILE, Target
from trainload.packaging.package import Package
from trainload.sharding.analysis.collectives import Collective, as_json, of_json
from trainload.sharding.pipeline.stages import Part, Value
from trainload.sharding.planner.plan_costs import sizes_of
from trainload.sharding.plans.device_step_graphs import sourced_step_graphs, step_graphs
from trainload.sharding.plans.plan import Plan
from trainload.sharding.rewriting.local_step import Local, local_step
from trainload.sharding.rewriting.rank_graphs import (
    RankGraphs,
    phases,
    rank_graphs,
    stage_name,
    train_name,
    update_name,
    update_owners,
)

Source = Callable[[str, Path], bool]
"""Function that fills an empty folder with the build of a name (`build_name`) from elsewhere.

If it has none, it returns False and leaves the folder empty.
"""


@dataclass(frozen=True, slots=True)
class OfferedBuild:
    """A build that was made elsewhere.

    Attributes:
        suffix: suffix of its name in the cache, which differs between builds of one target. What is
            in the cache under this name already may be loaded.
        fetch: function that fills an empty folder with it; it returns False if it cannot, and then
            leaves the folder empty.
    """

    suffix: str
    fetch: Callable[[Path], bool]


class OtherBuilds(Protocol):
    """Builds that were made elsewhere, and are loaded if the run's policies allow that."""

    def allows(self, folder: Path) -> bool:
        """Return True if a build that was fetched into the cache may be loaded by this run."""

    def offered(self, target: Target, index: int) -> Iterator[OfferedBuild]:
        """Yield builds for a target, of the ranks with an index on the pipeline axis."""


def is_compiled(
    package: Package,
    plan: Plan,
    cache_dir: Path,
    *,
    evaluates: bool,
    is_deterministic: bool = True,
) -> bool:
    """Return True if this node's cache holds a build for a run on CPUs.

    A build with evaluation graphs always counts, one without them only if `evaluates` is False.
    """
    threads = threads_of(min(plan.world_size, plan.cluster.devices_per_node))
    targets = _targets(
        package,
        plan,
        device_of(plan),
        evaluates=evaluates,
        threads=threads,
        is_deterministic=is_deterministic,
    )
    root = cache_dir / "compiled"
    return any(
        folder.is_dir()
        for each in targets
        for folder in (root / build_name(each, 0), *fetched_of(root, build_name(each, 0)))
    )


def compile_build(
    package: Package,
    plan: Plan,
    device: torch.device,
    cache_dir: Path,
    on_stage: Callable[[str, float], None],
    pipeline_index: int = 0,
    *,
    evaluates: bool = True,
    is_deterministic: bool = True,
    processes: int = 1,
    others: OtherBuilds | None = None,
    share: Source | None = None,
) -> Path:
    """Ensure that the node's cache holds the build. The node's first process fetches or compiles
    it, the others wait.

    A build without evaluation graphs is not made if there is one with them, and a build with
    evaluation graphs reuses the graphs of one without them.

    Args:
        package: package that is trained.
        plan: plan of the run.
        device: a device of this node.
        cache_dir: the node's cache.
        on_stage: called with (stage, seconds) when each part is done.
        pipeline_index: index, on the pipeline axis, of the ranks that call the build.
        evaluates: True if the run has held-out data.
        is_deterministic: True if every call of the graphs must give the same bits.
        processes: number of forked processes that compile graphs at a time; 1: this process
            compiles them. See `side_by_side` for who may fork.
        others: builds that were made elsewhere.
        share: source of builds that another node makes. It is asked last, and only for what is
            compiled here otherwise.

    Returns:
        Folder of the complete build.

    Raises:
        ChildEnded: a process that compiles a graph was killed.
        StorageError: the cache is full or cannot be written.
    """
    targets = _targets(
        package, plan, device, evaluates=evaluates, is_deterministic=is_deterministic
    )
    with no_room_told(cache_dir):
        root = private_folder(cache_dir / "compiled")
        names = [build_name(target, pipeline_index) for target in targets]
        for name in names:
            if is_kept(root / name):
                return root / name
        for folder in [folder for name in names for folder in fetched_of(root, name)]:
            if others is not None and others.allows(folder) and is_kept(folder):
                return folder
        without = build_target(
            package, plan, device, evaluates=False, is_deterministic=is_deterministic
        )
        smaller = build_name(without, pipeline_index)
        reused = root / smaller if smaller != names[-1] and is_kept(root / smaller) else None
        for target, name in zip(targets, names, strict=True):
            for offered in others.offered(target, pipeline_index) if others is not None else ():
                if add_build(root / f"{name}-{offered.suffix}", cache_dir, offered.fetch):
                    return root / f"{name}-{offered.suffix}"

        def make(draft: Path) -> bool:
            if share is not None and share(names[-1], draft):
                if is_whole(draft):
                    return True
                empty_folder(draft)  # the other node was just removing it
            with (
                own_kernels(cache_dir, draft),
                deterministic(is_deterministic),
                asking_ahead(device, forks=processes > 1),
            ):
                made = _make_graphs(
                    package, plan, device, pipeline_index, on_stage, evaluates=evaluates
                )
                _compile_into(draft, made, plan, on_stage, reused, processes)
            return True

        add_build(root / names[-1], cache_dir, make)
        return root / names[-1]


def _targets(
    package: Package,
    plan: Plan,
    device: torch.device,
    *,
    evaluates: bool,
    threads: int | None = None,
    is_deterministic: bool,
) -> list[Target]:
    """Return the targets whose builds a run can use, the one that it needs last: a build with
    evaluation graphs also serves a run without held-out data.
    """
    flags = (True,) if evaluates else (True, False)
    found = [
        build_target(
            package,
            plan,
            device,
            evaluates=flag,
            threads=threads,
            is_deterministic=is_deterministic,
        )
        for flag in flags
    ]
    return found[-1:] if found[0] == found[-1] else found


def compiled_graphs(folder: Path) -> dict[str, Compiled]:
    """Return which layers of the graphs of a build were compiled once, by the graph's name in the
    build. Graphs that could not be compiled are left out.
    """
    index = json.loads((folder / INDEX_FILE).read_bytes())
    return {
        name: Compiled(
            tuple(OutlinedRegion(**region) for region in entry["regions"]),
            entry["flat_because"],
            tuple(entry["kernels"]),
        )
        for name, entry in index["compiled"].items()
    }


def kernel_files(folder: Path) -> list[Path]:
    """Return the files of a build's CPU kernels."""
    return sorted((folder / KERNELS).glob("*"))


def load_build(folder: Path, package: Package, plan: Plan, cache_dir: Path) -> Built:
    """Load a build that `compile_build` made in the same cache."""
    index = json.loads((folder / INDEX_FILE).read_bytes())
    use_inductor_cache(cache_dir)
    if plan.cluster.device == "cuda":
        define_operators()

    failed: dict[str, str] = index["failed"]

    def call(name: str) -> Call:
        return (
            _Failed(name, failed[name]) if name in failed else load_compiled(folder / f"{name}.bin")
        )

    def graph(name: str) -> BuiltGraph:
        entry = index["graphs"][name]
        return BuiltGraph(name, call(name), _ports(entry["inputs"]), _ports(entry["outputs"]))

    cuts = {name: _read_crossing(entry) for name, entry in index["cuts"].items()}
    updates = {owner: call(update_name(owner)) for owner in set(update_owners(package).values())}
    collectives, work = of_json(index["collectives"]), _read_work(index["work"])
    built = _built(
        package, plan, set(index["graphs"]), graph, cuts, updates, collectives, work, compiled=True
    )
    return replace(built, failed=failed)


@dataclass(frozen=True, slots=True)
class _Failed:
    """A placeholder for a graph that could not be compiled; calling it raises NotCompiled."""

    name: str
    reason: str

    def __call__(self, *_: Tensor) -> Sequence[Tensor]:
        raise NotCompiled(f"{self.name}: {self.reason}")


def uncompiled_graphs(
    package: Package,
    plan: Plan,
    device: torch.device,
    pipeline_index: int = 0,
    *,
    evaluates: bool = True,
) -> dict[str, GraphModule]:
    """Return the graph modules from which a build is compiled, by their names within the build."""
    made = _make_graphs(package, plan, device, pipeline_index, evaluates=evaluates)
    return _modules(made.graphs)


def _modules(graphs: RankGraphs) -> dict[str, GraphModule]:
    updates = {update_name(owner): update for owner, update in graphs.updates.items()}
    return {name: graph.module for name, graph in graphs.ranks.items()} | updates


def uncompiled_build(
    package: Package,
    plan: Plan,
    device: torch.device,
    pipeline_index: int = 0,
    *,
    evaluates: bool = True,
    sources: bool = False,
) -> Built:
    """Return an interpreted build, for machines without a compiler, for tests and for debugging.

    With `sources`, the graphs' nodes have the stack traces and modules of the captured operators
    (`sourced_step_graphs`).
    """
    made = _make_graphs(package, plan, device, pipeline_index, evaluates=evaluates, sources=sources)
    graphs, work = made.graphs, made.work

    def graph(name: str) -> BuiltGraph:
        return BuiltGraph(
            name, graphs.ranks[name].module, graphs.ranks[name].inputs, graphs.ranks[name].outputs
        )

    cuts = {
        name: Crossing(stages.up, stages.down, stages.symbols)
        for name, stages in graphs.cuts.items()
    }
    return _built(
        package,
        plan,
        set(graphs.ranks),
        graph,
        cuts,
        dict(graphs.updates),
        graphs.collectives(plan),
        work,
        compiled=False,
    )


@dataclass(frozen=True, slots=True)
class _Made:
    """The graphs of a build, before they are compiled.

    Attributes:
        graphs: the graphs.
        work: what their calls compute.
        sizes: pairs of a shape environment, and the values of its symbols in the largest call.
    """

    graphs: RankGraphs
    work: Work
    sizes: tuple[tuple[object, dict[str, int]], ...]

    def sizes_in(self, module: GraphModule) -> dict[str, int]:
        """Return the values of the symbols of one of the graphs."""
        own = shape_environment(module)
        return next((sizes for environment, sizes in self.sizes if environment is own), {})


def _make_graphs(
    package: Package,
    plan: Plan,
    device: torch.device,
    pipeline_index: int,
    on_stage: Callable[[str, float], None] = lambda *_: None,
    *,
    evaluates: bool,
    sources: bool = False,
) -> _Made:
    began = time.perf_counter()
    names = package.manifest.step_graphs(evaluates=evaluates)
    steps = (sourced_step_graphs if sources else step_graphs)(package, device, names)
    on_stage("derive joint graphs", time.perf_counter() - began)
    began = time.perf_counter()
    local = {name: local_step(step, Local.of(plan)) for name, step in steps.items()}
    graphs = rank_graphs(package, plan, local, package.updates(), device, pipeline_index)
    if device.type == "cuda" and torch.are_deterministic_algorithms_enabled():
        for module in _modules(graphs).values():
            require_deterministic_attention(module)
    on_stage("shard", time.perf_counter() - began)
    rows = plan.rows_per_call
    sizes = tuple(
        # graphs are compared on one row more than a call has
        (shape_environment(step.module), sizes_of(step.module, step.inputs, rows + 1))
        for step in steps.values()
    )
    return _Made(graphs, work_of(steps, rows), sizes)


def _built(
    package: Package,
    plan: Plan,
    names: Collection[str],
    graph: Callable[[str], BuiltGraph],
    cuts: Mapping[str, Crossing],
    updates: Mapping[str, Call],
    collectives: dict[str, tuple[Collective, ...]],
    work: Work,
    *,
    compiled: bool,
) -> Built:
    owners = update_owners(package)
    update = {name: updates[owner] for name, owner in owners.items()}
    named = {name: update_name(owner) for name, owner in owners.items()}
    if plan.pipeline is None:
        train = {
            name: {phase: graph(train_name(name, phase)) for phase in phases(plan)}
            for name in owners
        }
        forward = {
            name: graph(name)
            for name in package.manifest.step_graphs()
            if name not in owners and name in names
        }
        return Built(train, forward, update, named, compiled, collectives, work)
    places = [(stage, part) for stage in range(len(plan.pipeline.stage_ranks)) for part in Part]
    stages = {
        name: BuiltStages(
            {p: graph(stage_name(name, *p)) for p in places if stage_name(name, *p) in names},
            crossing,
        )
        for name, crossing in cuts.items()
    }
    return Built({}, {}, update, named, compiled, collectives, work, stages)


def can_compile() -> bool:
    """Return True if this machine has the C++ compiler that Inductor needs."""
    return has_cpp_compiler()


def _compile_into(
    draft: Path,
    made: _Made,
    plan: Plan,
    on_stage: Callable[[str, float], None],
    other: Path | None,
    processes: int,
) -> None:
    """Compile the graphs of a build into its folder, or copy them from `other`, a build of some of
    the same graphs.
    """
    graphs = made.graphs
    groups = {name: len(parts[0]) for name, parts in plan.groups().items()}
    collectives = graphs.collectives(plan)  # compiling changes the graphs
    failed: dict[str, str] = {}
    compiled: dict[str, Compiled] = {}
    pending: dict[str, Callable[[], tuple[Compiled | None, str, float]]] = {}
    for name, module in _modules(graphs).items():
        file = draft / f"{name}.bin"
        if other is not None:
            # it does not have the graph, or was just evicted from the cache
            with suppress(FileNotFoundError):
                before = compiled_graphs(other)
                if name in before:
                    _copy_graph(other, draft, file.name, before[name].kernels)
                    compiled[name] = before[name]
        if not file.exists():
            pending[name] = partial(_try_to_compile, module, file, groups, made.sizes_in(module))
    for name, (result, reason, seconds) in side_by_side(pending, processes):
        if result is None:  # the graph runs interpreted
            failed[name] = reason
        else:
            compiled[name] = result
        on_stage(f"compile {name}", seconds)
    index = {
        "graphs": {
            n: {"inputs": _spelled(g.inputs), "outputs": _spelled(g.outputs)}
            for n, g in graphs.ranks.items()
        },
        "cuts": {
            name: asdict(Crossing(cut.up, cut.down, cut.symbols))
            for name, cut in graphs.cuts.items()
        },
        "collectives": as_json(collectives),
        "failed": failed,
        "compiled": {name: asdict(each) for name, each in compiled.items()},
        "work": made.work,
        "digests": {
            path.relative_to(draft).as_posix(): sha256_file(path)
            for pattern in ("*.bin", f"{KERNELS}/*")
            for path in sorted(draft.glob(pattern))
        },
    }
    (draft / INDEX_FILE).write_bytes(canonical_json(index))


def _copy_graph(source: Path, target: Path, file: str, kernels: Sequence[str]) -> None:
    """Copy a graph and its kernels from one build to another.

    Raises FileNotFoundError if the build does not have it.
    """
    for kernel in kernels:
        with suppress(FileExistsError):
            link_or_copy(source / KERNELS / kernel, target / KERNELS / kernel)
    shutil.copyfile(source / file, target / file)


def _try_to_compile(
    module: GraphModule, file: Path, groups: Mapping[str, int], sizes: Mapping[str, int]
) -> tuple[Compiled | None, str, float]:
    """Compile a graph into a file.

    Returns:
        What was compiled, or None and the reason why it cannot be; and the seconds that it took.
    """
    began = time.perf_counter()
    try:
        compiled, reason = compile_graph(module, file, groups, sizes), ""
    except NotCompiled as error:
        compiled, reason = None, str(error)
    return compiled, reason, time.perf_counter() - began


def _read_crossing(entry: Mapping[str, Any]) -> Crossing:
    """Decode a `Crossing` from the build's index."""
    up, down = (
        tuple(
            tuple(Value(v["name"], v["dtype"], tuple(v["shape"])) for v in values)
            for values in entry[name]
        )
        for name in ("up", "down")
    )
    return Crossing(
        up, down, {symbol: (name, at) for symbol, (name, at) in entry["symbols"].items()}
    )


def _read_work(entry: Mapping[str, Any]) -> Work:
    return {
        graph: {dtype: (fixed, each_row) for dtype, (fixed, each_row) in by_dtype.items()}
        for graph, by_dtype in entry.items()
    }


def _spelled(ports: Sequence[Port]) -> list[list[str]]:
    return [[p.role.value, p.name] for p in ports]


def _ports(spelled: Sequence[Sequence[str]]) -> tuple[Port, ...]:
    return tuple(Port(Role(role), name) for role, name in spelled)
