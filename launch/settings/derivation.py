"""Derived packages, which runs train that change a package's graphs.

A derived package is made once per node and stored in the node's cache. It is an ordinary package
with its own digest, so plans, builds and checkpoints do not depend on its origin. All nodes make
the same one: its bytes are determined by the frozen package, the changes and the run's seed.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import filelock
import torch
from torch.export.graph_signature import InputKind
from torch.fx import Node

from trainload.autograd_trace.derivation.aot import derive
from trainload.autograd_trace.graphs import GroupRecipe, Recipe, Role, StepGraph
from trainload.autograd_trace.low_rank import LowRank, adapt, uses_of
from trainload.autograd_trace.precision import in_precision
from trainload.capture.program import GraphCapture, Mode, ParameterSpec, Program
from trainload.core.canonical_json import canonical_json
from trainload.core.errors import JobError, PackageError
from trainload.core.logs import logged_suppress
from trainload.launching.node.cache import LOCK_SECONDS, make_room, private_folder, use
from trainload.launching.settings.adapter_weights import first_values
from trainload.launching.settings.adapters import Adapters
from trainload.launching.settings.peft_adapter import source_values
from trainload.packaging.derived import cache_derived
from trainload.packaging.format.field_types import Option
from trainload.packaging.format.manifest_records import PassEntry
from trainload.packaging.format.source_map import restore_traces
from trainload.packaging.graphs.graph_replacement import with_graph, with_parameters
from trainload.packaging.package import Package, open_package
from trainload.packaging.write import with_program
from trainload.sharding.plans.device_step_graphs import DERIVATION, derived_key

_log = logging.getLogger(__name__)

Precision = Literal["bf16", "fp32"]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
VERSION = 1
"""Part of every key; to be increased when the same changes result in another package."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes of a package's graphs. None: unchanged."""

    adapters: Adapters | None = None
    precision: Precision | None = None

    def __bool__(self) -> bool:
        return self.adapters is not None or self.precision is not None


@dataclass(slots=True)
class _PackageDraft:
    """The changed parts of a derived package. `values` are those of new parameters."""

    program: Program
    recipe: Recipe
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    passes: list[PassEntry] = field(default_factory=list)


def derived_package(package: Package, changes: Changes, seed: int, cache_dir: Path) -> Package:
    """Return the package with changes, from the node's cache if it is there; otherwise make it.

    Args:
        package: the frozen package.
        changes: changes of its graphs.
        seed: seed of the run, which determines the adapters' initial values.
        cache_dir: the node's cache.

    Raises:
        JobError: the package cannot be changed this way.
        CaptureError: no step graph can be derived from the changed graphs.
        StorageError: the cache cannot be written.
    """
    adapters = None
    if changes.adapters is not None:
        # where a source is does not matter, only its digest
        hidden = {"source"} | ({"source_digest"} if changes.adapters.source is None else set())
        adapters = {**changes.adapters.model_dump(mode="json", exclude=hidden), "seed": seed}
    request = {"package": package.digest, "adapters": adapters, "precision": changes.precision}
    versions = {"version": [VERSION, DERIVATION], "torch": torch.__version__}
    key = hashlib.sha256(canonical_json({**request, **versions})).hexdigest()[:32]
    folder = private_folder(cache_dir / "packages")
    path = folder / f"{key}.tl"
    with filelock.FileLock(folder / f"{path.name}.lock", timeout=LOCK_SECONDS):
        use(path)
        if path.exists():
            with logged_suppress(_log, "a cached package is damaged; derived again", PackageError):
                return open_package(path, namespaces=package.namespaces)
            shutil.rmtree(path)
        make_room(cache_dir)
        return _make_package(package, changes, seed, path)


def _make_package(package: Package, changes: Changes, seed: int, path: Path) -> Package:
    draft = _PackageDraft(package.program(), package.recipe)
    for name, capture in draft.program.graphs.items():
        restore_traces(package.path, name, capture.exported)
    if changes.precision is not None:
        _change_precision(draft, changes.precision)
    if changes.adapters is not None:
        _add_adapters(draft, package, changes.adapters, seed)
    steps = {
        name: derive(draft.program, name, _CPU)
        for name, capture in draft.program.graphs.items()
        if capture.training
    }
    if changes.adapters is not None:
        draft.program = replace(
            draft.program,
            graphs={
                name: _with_reached(draft.program, name, steps) for name in draft.program.graphs
            },
        )
    _check_gradients(draft, steps)
    group_names = {group.name for group in draft.recipe.groups}
    updates = [update for update in package.updates() if update.group in group_names]
    written = with_program(
        package, path, draft.program, updates, draft.recipe, draft.passes, draft.values
    )
    for name, step in steps.items():
        cache_derived(written, derived_key(name, _CPU), step)
    return written


def _change_precision(draft: _PackageDraft, precision: Precision) -> None:
    """Change all graphs except those that predict, which a run does not call."""
    dtype = DTYPES[precision]
    graphs = dict(draft.program.graphs)
    changed = False
    for name, capture in draft.program.graphs.items():
        if capture.mode is not Mode.PREDICT:
            module = in_precision(capture, dtype)
            changed = changed or (capture.training and module is not None)
            module = capture.exported.graph_module if module is None else module
            graphs[name] = replace(
                capture, exported=with_graph(capture.exported, module, f"graph {name}")
            )
    if not changed:
        raise JobError(
            f"it has no effect: everything that autocast would compute in {_dtype_name(dtype)} was"
            " already frozen that way",
            where="precision",
            got=precision,
            hint="Omit it.",
        )
    draft.program = replace(draft.program, graphs=graphs)
    draft.passes.append(_pass_entry("change_precision", {"precision": precision}))


def _add_adapters(draft: _PackageDraft, package: Package, adapters: Adapters, seed: int) -> None:
    chosen = adapters.chosen(package.manifest)
    trained_beside = adapters.trained_beside(package.manifest)
    if adapters.source is None or adapters.source_digest is None:
        draft.values = first_values(chosen, package.manifest, seed)
    else:
        draft.values = source_values(
            adapters.source, adapters.source_digest, chosen, package.manifest
        )
    for adapter in chosen:
        _check_linear(draft.program, adapter)
    draft.recipe = adapted_recipe(package, chosen, trained_beside)
    trained = {name for group in draft.recipe.groups for name in group.parameters}
    new = [
        ParameterSpec(name, _dtype_name(value.dtype), tuple(value.shape), name in trained)
        for name, value in draft.values.items()
    ]
    old = [
        replace(spec, trainable=(spec.alias_of or spec.name) in trained)
        for spec in draft.program.parameters
    ]
    meta = {name: torch.nn.Parameter(value.to("meta")) for name, value in draft.values.items()}
    graphs = {
        name: _add_adapters_to_graph(capture, chosen, meta)
        for name, capture in draft.program.graphs.items()
    }
    draft.program = replace(draft.program, graphs=graphs, parameters=(*old, *new))
    options: dict[str, Option] = {
        "rank": adapters.rank,
        "layers": adapters.layers,
        "scale": adapters.scale,
        "also": adapters.also,
    }
    draft.passes.append(_pass_entry("add_adapters", options))


def adapted_recipe(
    package: Package, adapters: Sequence[LowRank], trained_beside: frozenset[str]
) -> Recipe:
    """Return the recipe of adapters, each in the group of its parameter, and of the other trained
    parameters.


    Raises:
        JobError: a group's update cannot update an adapter, or a graph has nothing left to train.
    """
    recipe = package.recipe
    pairs = {adapter.weight: (adapter.down, adapter.up) for adapter in adapters}
    grouped = {name for group in recipe.groups for name in group.parameters}
    # A parameter that the job did not train has no group: its adapter joins the first that fits.
    homeless = tuple(
        name for weight, pair in pairs.items() if weight not in grouped for name in pair
    )
    home = _find_group(package, pairs.keys() - grouped) if homeless else ""
    groups: list[GroupRecipe] = []
    for group in recipe.groups:
        own = tuple(
            new
            for name in group.parameters
            for new in pairs.get(name, (name,) if name in trained_beside else ())
        )
        own += homeless if group.name == home else ()
        if own:
            groups.append(group.model_copy(update={"parameters": own}))
        if set(own) - trained_beside:
            _check_elementwise(package, group)
    group_names = {group.name for group in groups}
    graphs = {
        name: graph.model_copy(
            update={"groups": tuple(group for group in graph.groups if group in group_names)}
        )
        for name, graph in recipe.graphs.items()
    }
    idle = next((name for name, graph in graphs.items() if not graph.groups), None)
    if idle is not None:
        raise JobError(
            f"graph {idle} would have no trained parameters",
            where="adapters.layers",
            hint="Add adapters to parameters that it trains, or select them in adapters.also.",
        )
    return recipe.model_copy(update={"groups": tuple(groups), "graphs": graphs})


def _find_group(package: Package, weights: set[str]) -> str:
    """Return the group for adapters of parameters that are in none."""
    dtypes = {entry.name: entry.dtype for entry in package.manifest.parameters}
    weight_dtypes = {dtypes[name] for name in weights}
    elementwise = {update.group for update in package.manifest.updates if update.elementwise}
    for group in package.recipe.groups:
        if (
            group.name in elementwise
            and weight_dtypes == {dtypes[group.parameters[0]]}
            and not package.recipe.graphs
        ):
            return group.name
    raise JobError(
        f"{min(weights)} is not trained by the job, and no parameter group's update can be used for"
        " its adapter",
        where="adapters.layers",
        expected=(
            "a job with one graph and a parameter group of the same dtype with an element-wise"
            " update"
        ),
        hint="Freeze the job with this parameter in its optimizer.",
    )


def _check_elementwise(package: Package, group: GroupRecipe) -> None:
    update = next(
        (candidate for candidate in package.manifest.updates if candidate.group == group.name), None
    )
    if update is not None and not update.elementwise:
        raise JobError(
            f"the adapters of group {group.name} cannot be updated by {package.recipe.optimizer}",
            where="adapters.layers",
            expected="an element-wise update, which supports parameters of any shape",
            got=(
                f"an update captured for whole parameters of shape {update.shape}, since it mixes"
                " their elements"
            ),
            hint=(
                "Freeze the job with AdamW, SGD or another element-wise optimizer for these"
                " parameters."
            ),
        )


def _check_linear(program: Program, adapter: LowRank) -> None:
    """Raise JobError if a graph uses the parameter other than as the weight of a linear layer, or
    if no training graph uses it.
    """
    is_trained = False
    for name, capture in program.graphs.items():
        uses = [
            use
            for weight in _placeholders(capture, adapter.weight)
            for use in uses_of(capture.exported.graph_module, weight)
        ]
        is_trained = is_trained or (capture.training and bool(uses))
        strange = next((use for use in uses if not use.linear), None)
        if strange is not None:
            raise JobError(
                f"{adapter.weight} is not only used as the weight of a linear layer",
                where=f"adapters.layers, graph {name}",
                expected="aten.linear.default(x, weight, bias)",
                got=f"{strange.operator} at {strange.place}",
                hint="Exclude it from the pattern, or train it without an adapter: adapters.also.",
            )
    if not is_trained:
        raise JobError(
            f"no training graph uses {adapter.weight}",
            where="adapters.layers",
            hint="Exclude it from the pattern.",
        )


def _placeholders(capture: GraphCapture, parameter: str) -> list[Node]:
    """Return the inputs of a graph that hold a parameter: one, or none."""
    nodes = [node for node in capture.exported.graph.nodes if node.op == "placeholder"]
    specs = zip(nodes, capture.exported.graph_signature.input_specs, strict=True)
    return [
        node
        for node, spec in specs
        if spec.kind is InputKind.PARAMETER and spec.target == parameter
    ]


def _add_adapters_to_graph(
    capture: GraphCapture, adapters: Sequence[LowRank], values: Mapping[str, torch.Tensor]
) -> GraphCapture:
    module = capture.exported.graph_module
    added: dict[str, tuple[str, torch.Tensor]] = {}
    placements = [
        (adapter, weight)
        for adapter in adapters
        for weight in _placeholders(capture, adapter.weight)
        if weight.users
    ]
    for adapter, weight in placements:
        down, up = adapt(module, weight, adapter, after=weight)
        added |= {
            down.name: (adapter.down, values[adapter.down]),
            up.name: (adapter.up, values[adapter.up]),
        }
    return replace(
        capture,
        exported=with_parameters(capture.exported, module, added, f"graph {capture.name}"),
        reached=None,
    )


def _with_reached(program: Program, name: str, steps: Mapping[str, StepGraph]) -> GraphCapture:
    """Return a graph that lists the trained parameters to which it computes a gradient."""
    capture = program.graphs[name]
    if name not in steps:
        return capture
    reached = sorted(port.name for port in steps[name].outputs if port.role is Role.GRADIENT)
    trained = sorted(
        spec.name for spec in program.parameters if spec.trainable and spec.alias_of is None
    )
    return replace(capture, reached=None if reached == trained else tuple(reached))


def _check_gradients(draft: _PackageDraft, steps: Mapping[str, StepGraph]) -> None:
    """Raise JobError if a graph would train a parameter without a gradient."""
    members = {group.name: group.parameters for group in draft.recipe.groups}
    for name, step in steps.items():
        reached = {port.name for port in step.outputs if port.role is Role.GRADIENT}
        lacking = [
            parameter
            for group in draft.recipe.graph(name).groups
            for parameter in members[group]
            if parameter not in reached
        ]
        if lacking:
            raise JobError(
                f"{lacking[0]} gets no gradient from graph {name}",
                where="adapters.layers",
                hint=(
                    "It is used under torch.no_grad(), or its output is detached: exclude it from"
                    " the pattern."
                ),
            )


def _pass_entry(what: str, options: dict[str, Option]) -> PassEntry:
    name = f"trainload.launching.settings.derivation:{what}"
    return PassEntry(
        name=name, distribution=None, version=None, source=None, options=options, preserving=False
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
