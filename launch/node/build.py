"""Build callables from a package and a plan: compiled once per node into a content-addressed cache,
loaded by every rank.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import filelock
import torch
from torch import Tensor
from torch.fx import GraphModule

from trainload.autograd_trace.derivation.inductor import (
    NotCompiled,
    compile_graph,
    has_cpp_compiler,
    load_compiled,
)
from trainload.autograd_trace.graphs import Port, Role
from trainload.core.atomic import new_folder, remove_temporaries
from trainload.core.canonical_json import canonical_json, sha256_file
from trainload.core.errors import StorageError
from trainload.launching.node.cache import LOCK_SECONDS, make_room, private_folder, use
from trainload.launching.node.determinism import deterministic
from trainload.launching.node.utilisation import Work, work_of
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.package import Package
from trainload.sharding.analysis.collectives import Collective, as_json, of_json
from trainload.sharding.pipeline.stages import Part, Value
from trainload.sharding.plans.device_step_graphs import step_graphs
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
from trainload.sharding.rewriting.rewrite import BETWEEN, Phase

BUILD_VERSION = 14
"""Part of every build key.

Increase it when the graphs made from the same package and plan, or their compilation, change.
"""
_SHAPING = {
    "strategy",
    "shard_ranks",
    "accumulate",
    "prefetch",
    "buckets",
    "tensor_ranks",
    "tensor_shards",
    "divide",
    "pipeline",
    "batch_norm",
    "recompute",
}
_INDEX = "index.json"
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM})

Call = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class BuiltGraph:
    """A callable over flat tensors, with its name within the build and its input and output ports,
    in order.
    """

    name: str
    call: Call
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


@dataclass(frozen=True, slots=True)
class Crossing:
    """Values that cross the boundaries of a graph's pipeline stages, as in `Stages`."""

    up: tuple[tuple[Value, ...], ...]
    down: tuple[tuple[Value, ...], ...]
    symbols: Mapping[str, tuple[str, int]]

    def at(self, boundary: int, *, up: bool) -> tuple[Value, ...]:
        """Return the values that cross a boundary in one direction."""
        return (self.up if up else self.down)[boundary]


@dataclass(frozen=True, slots=True)
class BuiltStages:
    """A pipeline rank's parts of a graph, by (stage, part).

    Parts that have nothing to do are left out.
    """

    parts: dict[tuple[int, Part], BuiltGraph]
    crossing: Crossing

    def forget(self, stage: int, done: Part, between: dict[str, Tensor]) -> None:
        """Delete those of a stage's values that nothing needs once a part of the stage is done."""
        later = {
            Part.FORWARD: (Part.BACKWARD, Part.INPUT, Part.WEIGHT),
            Part.INPUT: (Part.WEIGHT,),
        }[done]
        graphs = [self.parts[stage, part] for part in later if (stage, part) in self.parts]
        taken = {port.name for graph in graphs for port in graph.inputs if port.role in BETWEEN}
        sent = {value.name for value in (self.crossing.down[stage - 1] if stage else ())}
        for name in between.keys() - taken - sent:
            del between[name]


@dataclass(frozen=True, slots=True)
class Built:
    """All callables of a rank. Unless stated otherwise they are keyed by the name of the captured
    graph.

    Attributes:
        train: a training graph for each phase of a step.
        forward: graphs that compute evaluation totals over a batch, or outputs for other graphs.
        update: results of `UpdateStep.trace`, which write in place.
        update_names: names of the updates within the build.
        compiled: True if they were compiled.
        collectives: collectives of each graph, by the graph's name within the build.
        work: operations of the captured graphs, before they are divided among ranks.
        stages: replaces `train` and `forward` under a plan with a pipeline.
        failed: graphs that could not be compiled -> the compiler's error. Calling one raises.
    """

    train: dict[str, dict[Phase, BuiltGraph]]
    forward: dict[str, BuiltGraph]
    update: dict[str, Call]
    update_names: dict[str, str]
    compiled: bool
    collectives: dict[str, tuple[Collective, ...]]
    work: Work
    stages: dict[str, BuiltStages] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)

    def names(self) -> set[str]:
        """Return the names of all graphs and updates, within the build."""
        graphs = [graph for by_phase in self.train.values() for graph in by_phase.values()] + list(
            self.forward.values()
        )
        graphs += [part for stages in self.stages.values() for part in stages.parts.values()]
        return {graph.name for graph in graphs} | set(self.update_names.values())

    def replaced(self, chosen: Callable[[BuiltGraph], Call]) -> Built:
        """Return a copy in which `chosen` has replaced each callable.

        It receives updates without inputs and outputs.
        """

        def graph(given: BuiltGraph) -> BuiltGraph:
            return replace(given, call=chosen(given))

        updates = {self.update_names[name]: call for name, call in self.update.items()}
        replaced = {name: chosen(BuiltGraph(name, call, (), ())) for name, call in updates.items()}
        return replace(
            self,
            train={
                name: {phase: graph(each) for phase, each in by_phase.items()}
                for name, by_phase in self.train.items()
            },
            forward={name: graph(each) for name, each in self.forward.items()},
            update={name: replaced[self.update_names[name]] for name in self.update},
            stages={
                name: replace(each, parts={key: graph(part) for key, part in each.parts.items()})
                for name, each in self.stages.items()
            },
        )


def device_of(plan: Plan) -> torch.device:
    """Return the device of every rank.

    Each sees one GPU only, so that a compiled graph, which names its device, fits all.
    """
    return torch.device("cpu") if plan.cluster.device == "cpu" else torch.device("cuda", 0)


def build_key(
    package: Package,
    plan: Plan,
    device: torch.device,
    pipeline_index: int = 0,
    *,
    evaluates: bool = True,
    threads: int | None = None,
) -> str:
    """Return a hash of all that a compiled build depends on.

    That is the program, its graphs, the parts of the plan that determine them, torch, the hardware
    and the number of threads of a worker (by default, those of this process).
    """
    hardware = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}"
    )
    parts = {
        "build": BUILD_VERSION,
        "program": _without_rates(package.manifest).program_digest,
        "graphs": package.manifest.step_graphs(evaluates=evaluates),
        "plan": (
            plan.model_dump(mode="json", include=_SHAPING)
            | {
                "world": plan.world_size,
                "index": pipeline_index,
            }
        ),
        "torch": torch.__version__,
        # Inductor writes the number of threads into CPU kernels
        "device": [device.type, hardware, threads or torch.get_num_threads()],
    }
    return hashlib.sha256(canonical_json(parts)).hexdigest()[:32]


def _without_rates(manifest: Manifest) -> Manifest:
    """Return a manifest with neutral values for what no graph depends on: learning rates (inputs of
    updates), seed, steps.
    """
    groups = tuple(
        group.model_copy(update={"learning_rates": (0.0,), "schedule": None})
        for group in manifest.recipe.groups
    )
    recipe = manifest.recipe.model_copy(
        update={"groups": groups, "schedules": (), "seed": 0, "steps": 1}
    )
    return manifest.model_copy(update={"recipe": recipe})


def threads_of(local_world: int) -> int:
    """Return the number of threads of each worker on a node: its share of the cores.

    CPU kernels are compiled for this number.
    """
    return max(1, len(os.sched_getaffinity(0)) // local_world)


def is_compiled(package: Package, plan: Plan, cache_dir: Path, *, evaluates: bool) -> bool:
    """Return True if this node's cache holds a build for a run on CPUs.

    A build with evaluation graphs always counts, one without them only if `evaluates` is False.
    """
    threads = threads_of(min(plan.world_size, plan.cluster.devices_per_node))
    keys = {
        build_key(package, plan, device_of(plan), evaluates=whole, threads=threads)
        for whole in (True, evaluates)
    }
    return any((cache_dir / "compiled" / key).is_dir() for key in keys)


def compile_build(
    package: Package,
    plan: Plan,
    device: torch.device,
    cache_dir: Path,
    on_stage: Callable[[str, float], None],
    pipeline_index: int = 0,
    *,
    evaluates: bool = True,
) -> Path:
    """Ensure that the node's cache holds the build. The node's first process compiles it, the
    others wait.

    A build without evaluation graphs is not made if one with them exists, and a build with
    evaluation graphs reuses the graphs of one without them.

    Args:
        package: package that is trained.
        plan: plan of the run.
        device: a device of this node.
        cache_dir: the node's cache.
        on_stage: called with (stage, seconds) when each part is done.
        pipeline_index: index, on the pipeline axis, of the ranks that call the build.
        evaluates: True if the run has held-out data.

    Returns:
        Folder of the complete build.
    """
    with _no_room_told(cache_dir):
        root = private_folder(cache_dir / "compiled")
        smaller, larger = (
            root / build_key(package, plan, device, pipeline_index, evaluates=each)
            for each in (False, True)
        )
        if not evaluates and _is_kept(larger):
            return larger
        final = larger if evaluates else smaller
        use(final)
        with filelock.FileLock(f"{final}.lock", timeout=LOCK_SECONDS):
            if _is_whole(final):
                return final
            shutil.rmtree(final, ignore_errors=True)
            remove_temporaries(final)
            before = smaller if _is_kept(smaller) else None
            make_room(cache_dir)
            with (
                new_folder(final) as temporary,
                _own_kernels(cache_dir, temporary),
                deterministic(),
            ):
                graphs, work = _make_graphs(
                    package, plan, device, pipeline_index, on_stage, evaluates=evaluates
                )
                _compile_into(temporary, graphs, work, plan, on_stage, before)
        return final


@contextmanager
def _no_room_told(cache_dir: Path) -> Iterator[None]:
    """Convert an OSError within the context into a StorageError if the node's cache is full or not
    writable.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise StorageError(
            "the compiled graphs cannot be written",
            where=str(cache_dir),
            expected="free disk space and write permission",
            got=error.strerror or str(error),
            hint="Free some disk space, or set TRAINLOAD_CACHE_DIR to another folder.",
        ) from error


def load_build(folder: Path, package: Package, plan: Plan, cache_dir: Path) -> Built:
    """Load a build that `compile_build` made in the same cache."""
    index = json.loads((folder / _INDEX).read_bytes())
    _use_inductor_cache(cache_dir)

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
    graphs, _ = _make_graphs(package, plan, device, pipeline_index, evaluates=evaluates)
    return _modules(graphs)


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
) -> Built:
    """Return an interpreted build, for machines without a compiler and for tests."""
    graphs, work = _make_graphs(package, plan, device, pipeline_index, evaluates=evaluates)

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


def _make_graphs(
    package: Package,
    plan: Plan,
    device: torch.device,
    pipeline_index: int,
    on_stage: Callable[[str, float], None] = lambda *_: None,
    *,
    evaluates: bool,
) -> tuple[RankGraphs, Work]:
    began = time.perf_counter()
    steps = step_graphs(package, device, package.manifest.step_graphs(evaluates=evaluates))
    on_stage("derive joint graphs", time.perf_counter() - began)
    began = time.perf_counter()
    local = {name: local_step(step, Local.of(plan)) for name, step in steps.items()}
    graphs = rank_graphs(package, plan, local, package.updates(), device, pipeline_index)
    on_stage("shard", time.perf_counter() - began)
    return graphs, work_of(steps, plan.rows_per_call)


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
    graphs: RankGraphs,
    work: Work,
    plan: Plan,
    on_stage: Callable[[str, float], None],
    other: Path | None,
) -> None:
    """Compile the graphs of a build into its folder, or copy them from `other`, a build of some of
    the same graphs.
    """
    groups = {name: len(parts[0]) for name, parts in plan.groups().items()}
    collectives = graphs.collectives(plan)  # compiling changes the graphs
    failed: dict[str, str] = {}
    for name, module in _modules(graphs).items():
        began = time.perf_counter()
        file = draft / f"{name}.bin"
        if other is not None:
            # it does not have the graph, or was just evicted from the cache
            with suppress(FileNotFoundError):
                shutil.copyfile(other / file.name, file)
        if not file.exists():
            try:
                compile_graph(module, file, groups)
            except NotCompiled as error:  # the graph runs interpreted
                failed[name] = str(error)
        on_stage(f"compile {name}", time.perf_counter() - began)
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
        "work": work,
        "digests": {path.name: sha256_file(path) for path in sorted(draft.glob("*.bin"))},
    }
    (draft / _INDEX).write_bytes(canonical_json(index))


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


def _is_kept(folder: Path) -> bool:
    """Return True if the cache holds a complete build; it is then marked as used by this process,
    so that it is not evicted.
    """
    if not folder.is_dir():
        return False
    use(folder)
    return _is_whole(folder)


def _is_whole(folder: Path) -> bool:
    """Return True if a build is complete, and unchanged since it was written."""
    if not (folder / _INDEX).is_file():
        return False
    digests = json.loads((folder / _INDEX).read_bytes())["digests"]
    return all(
        (folder / name).is_file() and sha256_file(folder / name) == digest
        for name, digest in digests.items()
    )


def _use_inductor_cache(cache_dir: Path) -> None:
    """Set Inductor's cache to the node's cache of kernels.

    It is content-addressed, too, and shared by all builds, since plans of one package have most
    kernels in common.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_kernels(cache_dir))


def _kernels(cache_dir: Path) -> Path:
    """Return the folder of the node's kernels, and mark it as used by this process.

    There is one for each release of torch and each BUILD_VERSION, since Inductor would otherwise
    find kernels that an earlier version has compiled.
    """
    folder = private_folder(cache_dir / "kernels") / f"torch-{torch.__version__}-{BUILD_VERSION}"
    use(folder)
    return private_folder(folder)


@contextmanager
def _own_kernels(cache_dir: Path, draft: Path) -> Iterator[None]:
    """Make Inductor write new kernels into `draft` within the context, and add them to the node's
    kernels if it succeeds.

    Inductor's C++ compiler writes libraries in place, and an existing library counts as complete.
    So a process that is killed would leave a partial library that fails every later run, and a
    compiler that outlives it could overwrite a library of the next process.
    """
    shared, own = _kernels(cache_dir), draft / "kernels"
    _link_files(shared, own)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(own)
    try:
        yield
        _link_files(own, shared)
        shutil.rmtree(own)
    finally:
        _use_inductor_cache(cache_dir)


def _link_files(source: Path, target: Path) -> None:
    """Hard-link the files of `source` into `target`, each atomically; existing files of `target`
    remain.
    """
    for folder, _, names in os.walk(source):
        there = target / Path(folder).relative_to(source)
        there.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in names:
            if not name.endswith(".lock"):
                # another build of this node may run concurrently
                with suppress(FileExistsError, FileNotFoundError):
                    os.link(Path(folder) / name, there / name)
