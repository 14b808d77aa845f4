"""Turns a package and a plan into callables: compiled once per node into a content-addressed cache, then loaded by every rank."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import filelock
import torch
from torch import Tensor
from torch.fx import GraphModule

from trainload.autograd_trace.aot import compile_graph, derive, has_cpp_compiler, load_compiled
from trainload.autograd_trace.graphs import Port, Role
from trainload.capture.errors import StorageError
from trainload.capture.program import Mode
from trainload.launch.cache import LOCK_SECONDS, private_folder
from trainload.launch.determinism import deterministic
from trainload.packaging.canonical import canonical_json, sha256_file
from trainload.packaging.derived import read_derived
from trainload.packaging.read import Package
from trainload.sharding.collectives import Collective, as_json, collectives_of, of_json
from trainload.sharding.plan import Plan
from trainload.sharding.rewrite import Phase, RankGraph, rewrite
from trainload.sharding.tensor.partition import partition
from trainload.sharding.update import UpdateStep

BUILD_VERSION = 6
"""Part of every key: raise it when the graphs that are made of the same package and plan change."""
DERIVATION = 3
"""Part of every derived graph's key: raise it when other step graphs are derived of the same program."""
_SHAPING = {"strategy", "shard_ranks", "accumulate", "prefetch", "buckets", "tensor_ranks", "tensor_shards"}
_INDEX = "index.json"
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM})

Call = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class BuiltGraph:
    """A callable over flat tensors, with what goes in and comes out, in order."""

    call: Call
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


@dataclass(frozen=True, slots=True)
class Built:
    """All that a rank calls, by the name of the captured graph.

    train: one for each phase of a step. forward: evaluation's totals over a batch, and what is computed for other graphs. update: what
    `UpdateStep.trace` gives, which writes in place. compiled: whether they were compiled. collectives: what each graph calls, by the
    graph's name within the build.
    """

    train: dict[str, dict[Phase, BuiltGraph]]
    forward: dict[str, BuiltGraph]
    update: dict[str, Call]
    compiled: bool
    collectives: dict[str, tuple[Collective, ...]]


@dataclass(frozen=True, slots=True)
class _Graphs:
    """What is compiled: rank graphs by file name, updates by that of the first training graph that shares them."""

    ranks: dict[str, RankGraph]
    updates: dict[str, GraphModule]

    def collectives(self, plan: Plan) -> dict[str, tuple[Collective, ...]]:
        modules = {name: graph.module for name, graph in self.ranks.items()}
        modules |= {_update_file(owner): module for owner, module in self.updates.items()}
        return {name: collectives_of(module, plan.groups(), name) for name, module in modules.items()}


def _train_file(name: str, phase: Phase) -> str:
    return f"{name}.{phase.value}"


def _update_file(name: str) -> str:
    return f"{name}.update"


def _update_owners(package: Package) -> dict[str, str]:
    """Training graph -> the first one that updates the same groups in the same way."""
    first: dict[str, str] = {}
    owners: dict[str, str] = {}
    for name in package.manifest.training_graphs():
        owners[name] = first.setdefault(package.recipe.graph(name).model_dump_json(), name)
    return owners


def _forward_names(package: Package) -> list[str]:
    return [name for name, mode in package.manifest.modes().items() if mode in (Mode.EVAL, Mode.COMPUTE)]


def phases(plan: Plan) -> tuple[Phase, ...]:
    """The phases of a step that a plan needs."""
    return (Phase.ONLY,) if plan.accumulate == 1 else (Phase.ACCUMULATE, Phase.SYNCHRONISE)


def device_of(plan: Plan) -> torch.device:
    """The device of every rank: each sees one GPU only, so that one compiled graph, which names its device, serves all."""
    return torch.device("cpu") if plan.cluster.device == "cpu" else torch.device("cuda", 0)


def build_key(package: Package, plan: Plan, device: torch.device) -> str:
    """What a compiled build depends on, hashed: the program, the plan's graph-shaping parts, torch and the hardware."""
    hardware = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}"
    )
    parts = {
        "build": BUILD_VERSION,
        "program": package.manifest.program_digest,
        "plan": plan.model_dump(mode="json", include=_SHAPING) | {"world": plan.world_size},
        "torch": torch.__version__,
        "device": [device.type, hardware, torch.get_num_threads()],  # Inductor writes the number of threads into CPU kernels
    }
    return hashlib.sha256(canonical_json(parts)).hexdigest()[:32]


def compile_build(package: Package, plan: Plan, device: torch.device, cache_dir: Path, on_stage: Callable[[str, float], None]) -> Path:
    """Makes sure that the node's cache holds the build; the first of the node's processes compiles, others wait for it.

    Args:
        package: what is trained.
        plan: how.
        device: a device of this node.
        cache_dir: the node's cache.
        on_stage: told (stage, seconds) as each part is done.

    Returns:
        The build's folder, complete.
    """
    root = private_folder(cache_dir / "compiled")
    final = root / build_key(package, plan, device)
    with filelock.FileLock(f"{final}.lock", timeout=LOCK_SECONDS):
        if _is_whole(final):
            return final
        shutil.rmtree(final, ignore_errors=True)
        for left in root.glob(f".draft-{final.name}-*"):  # by a process that was killed; the lock is ours
            shutil.rmtree(left, ignore_errors=True)
        draft = root / f".draft-{final.name}-{uuid.uuid4().hex}"
        try:
            draft.mkdir()
            with _own_kernels(cache_dir, draft), deterministic():
                _compile_into(draft, package, plan, device, on_stage)
            draft.rename(final)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise StorageError(
                "the compiled graphs cannot be written",
                where=str(cache_dir),
                expected="room and permission to write",
                got=error.strerror or str(error),
                cure="Make room, or set TRAINLOAD_CACHE_DIR to another folder.",
            ) from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return final


def load_build(folder: Path, package: Package, plan: Plan, cache_dir: Path) -> Built:
    """Loads a build that `compile_build` made in the same cache."""
    index = json.loads((folder / _INDEX).read_bytes())
    _use_inductor_cache(cache_dir)

    def graph(name: str) -> BuiltGraph:
        entry = index["graphs"][name]
        return BuiltGraph(load_compiled(folder / f"{name}.bin"), _ports(entry["inputs"]), _ports(entry["outputs"]))

    owners = _update_owners(package)
    updates = {owner: load_compiled(folder / f"{_update_file(owner)}.bin") for owner in set(owners.values())}
    train = {name: {phase: graph(_train_file(name, phase)) for phase in phases(plan)} for name in owners}
    forward = {name: graph(name) for name in _forward_names(package)}
    collectives = of_json(index["collectives"])
    return Built(train, forward, {name: updates[owner] for name, owner in owners.items()}, True, collectives)


def uncompiled_build(package: Package, plan: Plan, device: torch.device) -> Built:
    """The same callables, interpreted: for machines without a compiler, and for tests."""
    graphs = _graphs(package, plan, device, lambda *_: None)

    def graph(file: str) -> BuiltGraph:
        return BuiltGraph(graphs.ranks[file].module, graphs.ranks[file].inputs, graphs.ranks[file].outputs)

    owners = _update_owners(package)
    train = {name: {phase: graph(_train_file(name, phase)) for phase in phases(plan)} for name in owners}
    forward = {name: graph(name) for name in _forward_names(package)}
    return Built(train, forward, {name: graphs.updates[owner] for name, owner in owners.items()}, False, graphs.collectives(plan))


def derived_key(graph: str, device: torch.device) -> str:
    """The name under which a package keeps the step graph of one of its graphs for a kind of device, as this torch derives it."""
    return f"{graph}-{device.type}-torch{torch.__version__}-{DERIVATION}"


def can_compile() -> bool:
    """Whether this machine has the C++ compiler that Inductor needs."""
    return has_cpp_compiler()


def _graphs(package: Package, plan: Plan, device: torch.device, on_stage: Callable[[str, float], None]) -> _Graphs:
    began = time.perf_counter()
    program = package.program()
    updates = package.updates()
    on_stage("load graphs", time.perf_counter() - began)
    began = time.perf_counter()
    owners = _update_owners(package)
    steps = {name: read_derived(package, derived_key(name, device)) or derive(program, name, device) for name in owners}
    forward = {name: derive(program, name, device) for name in _forward_names(package)}
    on_stage("derive joint graphs", time.perf_counter() - began)
    began = time.perf_counter()
    if plan.tensor_ranks > 1:
        steps = {name: partition(step, plan.tensor_ranks, plan.tensor_shards).step for name, step in steps.items()}
        forward = {name: partition(step, plan.tensor_ranks, plan.tensor_shards).step for name, step in forward.items()}
    graphs = {name: rewrite(step, plan) for name, step in forward.items()}
    for name, step in steps.items():
        groups = package.recipe.graph(name).groups
        graphs |= {_train_file(name, phase): rewrite(step, plan, phase, groups) for phase in phases(plan)}
    traced = {owner: UpdateStep(plan, updates, package.recipe, owner).trace(device) for owner in dict.fromkeys(owners.values())}
    on_stage("shard", time.perf_counter() - began)
    return _Graphs(graphs, traced)


def _compile_into(draft: Path, package: Package, plan: Plan, device: torch.device, on_stage: Callable[[str, float], None]) -> None:
    graphs = _graphs(package, plan, device, on_stage)
    groups = {name: len(parts[0]) for name, parts in plan.groups().items()}
    collectives = graphs.collectives(plan)  # compiling changes the graphs
    for name, graph in graphs.ranks.items():
        began = time.perf_counter()
        compile_graph(graph.module, draft / f"{name}.bin", groups)
        on_stage(f"compile {name}", time.perf_counter() - began)
    for owner, update in graphs.updates.items():
        began = time.perf_counter()
        compile_graph(update, draft / f"{_update_file(owner)}.bin", groups)
        on_stage(f"compile {_update_file(owner)}", time.perf_counter() - began)
    index = {
        "graphs": {n: {"inputs": _spelled(g.inputs), "outputs": _spelled(g.outputs)} for n, g in graphs.ranks.items()},
        "collectives": as_json(collectives),
        "digests": {path.name: sha256_file(path) for path in sorted(draft.glob("*.bin"))},
    }
    (draft / _INDEX).write_bytes(canonical_json(index))


def _spelled(ports: Sequence[Port]) -> list[list[str]]:
    return [[p.role.value, p.name] for p in ports]


def _ports(spelled: Sequence[Sequence[str]]) -> tuple[Port, ...]:
    return tuple(Port(Role(role), name) for role, name in spelled)


def _is_whole(folder: Path) -> bool:
    """Whether a build is complete and as it was written."""
    if not (folder / _INDEX).is_file():
        return False
    digests = json.loads((folder / _INDEX).read_bytes())["digests"]
    return all((folder / name).is_file() and sha256_file(folder / name) == digest for name, digest in digests.items())


def _use_inductor_cache(cache_dir: Path) -> None:
    """Points Inductor at the node's cache of kernels. It is content-addressed too, and shared by all builds: plans of one package have
    most kernels in common.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(private_folder(cache_dir / "inductor"))


@contextmanager
def _own_kernels(cache_dir: Path, draft: Path) -> Iterator[None]:
    """Within it Inductor sees the node's kernels and writes new ones into `draft`; they join the node's when all is done.

    Inductor has the C++ compiler write libraries in place, and one that exists counts as whole. So a process that is killed would leave a
    torso that fails every later run, and a compiler that outlives it would write under the next one's feet.
    """
    shared, own = private_folder(cache_dir / "inductor"), draft / "inductor"
    _link_files(shared, own)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(own)
    try:
        yield
        _link_files(own, shared)
        shutil.rmtree(own)
    finally:
        _use_inductor_cache(cache_dir)


def _link_files(source: Path, target: Path) -> None:
    """Makes the files of `source` those of `target` too, each at once; what `target` has already stays."""
    for folder, _, names in os.walk(source):
        there = target / Path(folder).relative_to(source)
        there.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in names:
            if not name.endswith(".lock"):
                with suppress(FileExistsError, FileNotFoundError):  # another build of this node may be at it
                    os.link(Path(folder) / name, there / name)
