"""Prepare a node and its workers for a run: threads, data and compiled graphs."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from trainload.core.errors import CompileError, IntegrityError
from trainload.core.paths import empty_folder
from trainload.core.storage.places import is_url
from trainload.launching.checkpoints.checkpoint_place import place_of
from trainload.launching.data.run_data import RunData, open_run_data
from trainload.launching.node.build import (
    can_compile,
    compile_build,
    compiled_graphs,
    load_build,
    uncompiled_build,
)
from trainload.launching.node.build_key import device_of, threads_of
from trainload.launching.node.built_graphs import Built
from trainload.launching.node.cache import default_cache_dir
from trainload.launching.node.fetched_builds import (
    FetchedBuilds,
    check_loadable,
    is_from_store,
)
from trainload.launching.node.libraries import library_warnings
from trainload.launching.node.side_by_side import alongside
from trainload.launching.run.contact import Contact
from trainload.launching.run.opening import trained_package
from trainload.launching.run.run_spec import RunSpec
from trainload.packaging.package import Package
from trainload.sharding.planner.check_plan import check_plan
from trainload.sharding.plans.plan import Plan

_log = logging.getLogger(__name__)

_PROCESSES_AT_MOST = 4
"""A process that compiles a graph of a large model takes a GiB."""


def set_threads(local_world: int) -> None:
    """Share a node's cores among its workers."""
    torch.set_num_threads(threads_of(local_world))


class Sharing(Protocol):
    """Exchange of builds with the other nodes of a run."""

    def fetch_build(self, name: str, folder: Path) -> bool:
        """Fill an empty folder with the build of this name (`build_name`) that another node makes,
        or return False if this node is to make it.
        """

    def give_build(self, name: str, folder: Path) -> None:
        """Let other nodes fetch a build of this node's cache."""


class Write(Protocol):
    """A writer of events, such as `Contact.write`."""

    def __call__(self, kind: str, **data: Any) -> None:
        """Write an event."""


def log_warning(kind: str, **data: Any) -> None:
    """Write an event of kind `warning` to the log, and no other: there is no journal."""
    if kind == "warning":
        _log.warning(data["message"])


def prepare_node(
    spec: RunSpec,
    ranks: Sequence[int],
    contact: Contact,
    *,
    quiet: bool = False,
    shared: Sharing | None = None,
) -> None:
    """Prepare a node before the process group is formed: fetch or compile its graphs, and convert
    the data meanwhile, in a process of its own.

    It runs once per node, in a process that may fork (`side_by_side`).

    Args:
        spec: the run.
        ranks: ranks on this node.
        contact: connection to the driver.
        quiet: do not report how long it took.
        shared: exchange of builds with the other nodes; None if there are none.

    Raises:
        StorageError: this node cannot write the run's checkpoints.
        TrainloadError: compiling or reading the data fails.
    """
    set_threads(len(ranks))
    if spec.checkpoints is not None or is_url(spec.run_dir):
        place_of(spec.run_dir, spec.checkpoints).check_writable()
    package = trained_package(spec)
    check_plan(spec.plan, package)
    for warning in library_warnings(package, spec.libraries):
        contact.write("warning", message=f"{socket.gethostname()}: {warning}")

    def convert() -> float:
        began = time.perf_counter()
        open_data(spec, package)
        return time.perf_counter() - began

    with alongside("the data", convert) as converted:
        if spec.compile and can_compile():
            _obtain_builds(spec, package, ranks, contact, quiet=quiet, shared=shared)
        seconds = converted()
    if not quiet:
        contact.write("stage", name="data", seconds=seconds)


def _obtain_builds(
    spec: RunSpec,
    package: Package,
    ranks: Sequence[int],
    contact: Contact,
    *,
    quiet: bool,
    shared: Sharing | None,
) -> None:
    """Fetch or compile the builds of ranks; the arguments are those of `prepare_node`."""
    began = time.perf_counter()
    for index in sorted({spec.plan.pipeline_index(rank) for rank in ranks}):
        processes = compiling_processes(spec.plan)
        folder = _obtain_build(
            spec, package, index, contact.write, processes=processes, shared=shared
        )
        if not quiet:
            _report_layers(contact, folder)
    if not quiet:
        contact.write("stage", name="compile", seconds=time.perf_counter() - began)


def _obtain_build(
    spec: RunSpec,
    package: Package,
    index: int,
    write: Write,
    *,
    processes: int = 1,
    shared: Sharing | None = None,
) -> Path:
    """Fetch or compile a build unless the node's cache has it, report where it came from, and let
    the other nodes have it.

    Args:
        spec: the run.
        package: its package.
        index: index, on the pipeline axis, of the ranks that call the build.
        write: writer of the journal's events.
        processes: see `compile_build`.
        shared: exchange of builds with the other nodes; None if there are none.
    """
    began = time.perf_counter()
    origins: list[str] = []

    def share(name: str, folder: Path) -> bool:
        found = shared is not None and shared.fetch_build(name, folder)
        if found:
            try:
                check_loadable(folder)
            except IntegrityError as error:
                warn(str(error))
                empty_folder(folder)
                found = False
        origins.append("another node" if found else "this node's compiler")
        return found

    def warn(message: str) -> None:
        write("warning", message=f"{socket.gethostname()}: {message}")

    others = FetchedBuilds(
        spec.package, spec.policies, warn, on_fetched=lambda: origins.append("the store")
    )
    folder = compile_build(
        package,
        spec.plan,
        device_of(spec.plan),
        default_cache_dir(),
        lambda *_: None,
        index,
        evaluates=spec.evaluates,
        is_deterministic=spec.deterministic,
        processes=processes,
        others=others,
        share=share,
    )
    if shared is not None and not is_from_store(folder):
        # other nodes may have policies of their own about what is from the store
        shared.give_build(folder.name, folder)
    if origins:
        seconds = time.perf_counter() - began
        write("build", host=socket.gethostname(), source=origins[-1], seconds=seconds)
    return folder


def compiling_processes(plan: Plan) -> int:
    """Return the number of graphs that a process that does nothing else compiles at a time."""
    if plan.cluster.device != "cpu":
        return 1  # a process that is forked after graphs were derived on a GPU cannot use it
    return min(len(os.sched_getaffinity(0)), _PROCESSES_AT_MOST)


def _report_layers(contact: Contact, folder: Path) -> None:
    """Write to the journal which layers of a build's graphs were compiled once, or why none."""
    for name, compiled in compiled_graphs(folder).items():
        layers = [{"operators": each.nodes, "calls": each.calls} for each in compiled.regions]
        if layers:
            contact.write("layers", graph=name, layers=layers)
        elif compiled.flat_because is not None:
            contact.write("layers", graph=name, layers=[], flat_because=compiled.flat_because)


def open_data(spec: RunSpec, package: Package) -> tuple[RunData, RunData | None]:
    """Open a run's data and held-out data, converting them into the node's cache if they are not in
    it.
    """
    cache, rows = default_cache_dir() / "data", spec.plan.rows_per_call
    train = open_run_data(spec.data, package, rows, cache)
    return train, (
        open_run_data(spec.eval_data, package, rows, cache) if spec.eval_data is not None else None
    )


class Opened:
    """The package, the data and the graphs of a rank, each of which is opened when it is needed
    first.
    """

    def __init__(self, spec: RunSpec, rank: int) -> None:
        self._spec = spec
        self._rank = rank
        self._built: tuple[Built, Path | None] | None = None

    @cached_property
    def package(self) -> Package:
        """The run's package with its overrides."""
        package = trained_package(self._spec)
        check_plan(self._spec.plan, package)
        return package

    @cached_property
    def data(self) -> tuple[RunData, RunData | None]:
        """The data and the held-out data."""
        return open_data(self._spec, self.package)

    def built(self, write: Write) -> tuple[Built, Path | None]:
        """Return the graphs, and the folder of their build (`built_for`)."""
        if self._built is None:
            index = self._spec.plan.pipeline_index(self._rank)
            self._built = built_for(self._spec, self.package, index, write)
        return self._built


class Keeper:
    """Keeps open what the next attempt of a run in this process needs again."""

    def __init__(self) -> None:
        self._key: tuple[RunSpec, int] | None = None
        self._opened: Opened | None = None

    def opened(self, spec: RunSpec, rank: int) -> Opened:
        """Return what the last call has returned, if run and rank are the same."""
        key = (spec.model_copy(update={"had_checkpoint": False}), rank)
        if self._opened is None or key != self._key:
            self._opened = None  # so that two are never open at a time
            self._key, self._opened = key, Opened(spec, rank)
        return self._opened


def built_for(
    spec: RunSpec, package: Package, pipeline_index: int, write: Write = log_warning
) -> tuple[Built, Path | None]:
    """Return the graphs that a rank calls, and the folder of their build; None if they are not
    compiled.

    They are compiled, fetched, or loaded from the node's cache, if the run wants that and the
    machine has a compiler. `write` gets where they came from unless the cache had them.

    Raises:
        CompileError: there is no compiler, and the run requires compiled graphs.
    """
    if spec.compile and can_compile():
        folder = _obtain_build(spec, package, pipeline_index, write)
        return load_build(folder, package, spec.plan, default_cache_dir()), folder
    if spec.compile and spec.require_compiled:
        raise CompileError(
            "no C++ compiler was found",
            where=socket.gethostname(),
            expected="a C++ compiler for the run's graphs (require_compiled)",
            hint="Install g++, or omit require_compiled to run the graphs interpreted.",
        )
    return (
        uncompiled_build(
            package,
            spec.plan,
            device_of(spec.plan),
            pipeline_index,
            evaluates=spec.evaluates,
        ),
        None,
    )
