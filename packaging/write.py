"""Write packages: a complete one, or one that shares the weights or the graphs of another."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch
from pydantic import ValidationError
from torch.export import ExportedProgram

from trainload.autograd_trace.graphs import Recipe, UpdateGraph
from trainload.capture.initialization.initial_graphs import Initialization
from trainload.capture.job.definition import AssetLike
from trainload.capture.program import BufferSpec, ParameterSpec, Program
from trainload.core.canonical_json import canonical_json, sha256_file
from trainload.core.errors import IntegrityError, PackageError
from trainload.core.garbage import garbage_collection_disabled
from trainload.core.paths import link_or_copy, write_bytes
from trainload.core.work_steps import ByteStep, begin_step
from trainload.packaging.format.assets import ASSETS, media_type_of, write_assets
from trainload.packaging.format.debug import read_debug, write_debug
from trainload.packaging.format.entries import (
    buffer_entry,
    buffer_spec,
    graph_entry,
    parameter_entry,
    parameter_spec,
    state_entry,
)
from trainload.packaging.format.format_version import BUILT_IN_NAMESPACES
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.format.manifest_records import (
    AbstractEntry,
    ConstantEntry,
    FileEntry,
    OpLibraryEntry,
    PassEntry,
    TrainingEntry,
    UpdateEntry,
    WeightSourceEntry,
)
from trainload.packaging.format.package_files import new_folder, walk
from trainload.packaging.format.package_paths import (
    CONSTANTS,
    EXTENSIONS,
    INITIAL_CONSTANTS,
    INITIALIZATION,
    MANIFEST,
    OUTSIDE,
)
from trainload.packaging.format.source_map import NAME as SOURCE_MAP
from trainload.packaging.format.source_map import SourceMap, make_source_map, restore_traces
from trainload.packaging.graphs.graph_json import graph_to_json
from trainload.packaging.graphs.torch_operators import operator_namespaces, running_schema
from trainload.packaging.graphs.validate import GraphFacts, parse_graph, validate_graph
from trainload.packaging.initialization.initial_file import write_initialization
from trainload.packaging.libraries.op_libraries import Libraries, describe_libraries
from trainload.packaging.package import Package, check_graphs, open_package
from trainload.packaging.tensors.safetensors_file import write_tensors
from trainload.packaging.tensors.weight_shards import (
    MAX_SHARD,
    add_weights,
    stored_tensors,
    trained_tensors,
    write_weights,
)

Bundle = Callable[[Manifest, Path], Mapping[str, OpLibraryEntry]]
"""Writes wheels into a new folder, from the manifest without its list of files.

Returns the operator libraries with their wheels.
"""

_NOTHING: Mapping[str, object] = MappingProxyType({})
_NO_LIBRARIES: Mapping[str, str | None] = MappingProxyType({})
_OF_THE_STATE = ("weights", "assets", INITIALIZATION, INITIAL_CONSTANTS)
"""Files and folders that a package with other graphs keeps."""
_FREEZE_DOCUMENTS = ("batch", "capture")
"""Documents of debug/ that passes copy unchanged."""


def write_package(
    path: Path,
    program: Program,
    updates: Sequence[UpdateGraph],
    recipe: Recipe,
    *,
    assets: Mapping[str, AssetLike] = MappingProxyType({}),
    parent: str | None = None,
    debug: Mapping[str, object] = _NOTHING,
    max_shard: int = MAX_SHARD,
    abstract: AbstractEntry | None = None,
    initialization: Initialization | None = None,
    weight_source: WeightSourceEntry | None = None,
    libraries: Libraries = _NO_LIBRARIES,
    bundle: Bundle | None = None,
) -> Package:
    """Write a package atomically: it appears at `path` complete, or not at all.

    Args:
        path: a folder that does not exist; its parent does.
        program: the captured program. Its state is read one tensor at a time.
        updates: one update for each group of `recipe`.
        recipe: the recipe that drives the graphs.
        assets: contents of assets/, as in `Job.assets`.
        parent: digest of the package that this one was made from.
        debug: name -> JSON value of further files in debug/, outside the digest.
        max_shard: bytes of tensors in one weight file.
        abstract: for a program without state: what was proven about it. No weights are written.
        initialization: first values of parameters and buffers.
        weight_source: where other weights are found.
        libraries: modules that, according to the user, register the operators of other libraries;
            the others are detected.
        bundle: writes the wheels of these libraries into the package. None: no wheels.

    Law: equal arguments (`debug` aside) yield the same digest on every machine, in every folder and
    process.

    Raises:
        PackageError: a graph cannot be serialised, or the parts do not fit each other.
        StorageError: the path is taken, an asset cannot be read, or the disk is full; nothing is
            left behind.
    """
    path = Path(path)
    graphs = _Graphs(program, updates)
    constants = _merge_constants(program, updates)
    with new_folder(path) as root:
        graphs.write(root)
        if constants:
            write_tensors(root / CONSTANTS, constants)
        media_types = write_assets(root, assets)
        bare = _bare_manifest(
            program, updates, recipe, constants, graphs.facts, (), parent, libraries
        )
        if bundle is not None and bare.op_libraries:
            begin_step("bundling operator libraries")
            bare = _with_libraries(bare, bundle(bare, root / EXTENSIONS))
        if initialization is not None:
            write_initialization(root, initialization)
            bare = _with_feature(bare, "initialization")
        bare = _with_weight_source(bare, weight_source)
        if abstract is not None:
            bare = _with_feature(bare, "abstract").model_copy(update={"abstract": abstract})
        else:
            state = ((name, program.state[name]) for name in _state_names(bare))
            write_weights(root, stored_tensors(bare), state, max_shard, trained_tensors(bare))
        _write_manifest(root, bare, media_types)
        begin_step("checking the package")
        graphs.check(root)
        write_debug(root, {**debug, **graphs.debug({})})
    return open_package(path, namespaces=graphs.namespaces)


class _Graphs:
    """All graphs of a package that is being written, as validated JSON."""

    @garbage_collection_disabled()
    def __init__(self, program: Program, updates: Sequence[UpdateGraph]) -> None:
        begin_step("writing the graphs")
        exported = _graph_programs(program, updates)
        self._written = {name: graph_to_json(graph, name) for name, graph in exported.items()}
        self._bytes = {
            name: canonical_json(graph.document) for name, graph in self._written.items()
        }
        # Parsed from the bytes that are written, so that readers get exactly what is validated
        # here.
        self._documents = {name: parse_graph(data, name) for name, data in self._bytes.items()}
        all_namespaces = frozenset[str]().union(
            *(operator_namespaces(graph.graph_module) for graph in exported.values())
        )
        self.namespaces = all_namespaces - BUILT_IN_NAMESPACES
        self.facts = [
            validate_graph(document, f"graphs/{name}.json", self.namespaces)
            for name, document in self._documents.items()
        ]

    def write(self, root: Path) -> None:
        for name, data in self._bytes.items():
            write_bytes(root / f"graphs/{name}.json", data)

    def check(self, root: Path) -> None:
        """Check that the graphs match the manifest that was written."""
        check_graphs(Manifest.from_bytes((root / MANIFEST).read_bytes(), MANIFEST), self._documents)

    def debug(self, recorded_digests: Mapping[str, str | None]) -> dict[str, object]:
        """Return the graphs' documents for debug/.

        `recorded_digests` maps source files to digests that were recorded at capture.
        """
        notes = {name: graph.debug for name, graph in self._written.items()}
        return {
            **notes,
            SOURCE_MAP: make_source_map(
                {name: note["nodes"] for name, note in notes.items()}, recorded_digests
            ),
        }


def with_graphs(
    package: Package, path: Path, program: Program, passes: Sequence[PassEntry]
) -> Package:
    """Write a child of `package` with the graphs of a program, and the weights, updates, recipe and
    assets of `package`.

    Args:
        package: the parent. Its weights and assets are shared (hard links where the file system has
            them).
        path: a folder that does not exist.
        program: the parent's program with other graphs. Parameters and buffers are the same.
        passes: the passes that changed the graphs, in order; they are recorded after those of the
            parent.

    Raises:
        PackageError: a graph cannot be serialised, or does not fit the package.
        StorageError: the path is taken, or the disk is full; nothing is left behind.
    """
    assert (program.parameters, program.buffers) == _state_specs(package.manifest)
    return with_program(package, path, program, package.updates(), package.recipe, passes)


def with_program(
    package: Package,
    path: Path,
    program: Program,
    updates: Sequence[UpdateGraph],
    recipe: Recipe,
    passes: Sequence[PassEntry],
    added: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Package:
    """Write a child of `package` with a program, updates and a recipe, and the weights and assets
    of `package`.

    Args:
        package: as for `with_graphs`.
        path: a folder that does not exist.
        program: its parameters and buffers are the parent's (other ones may be trainable), followed
            by `added`.
        updates: a subset of the parent's updates.
        recipe: recipe for these updates.
        passes: as for `with_graphs`.
        added: parameters that the parent lacks.

    Raises:
        PackageError: a graph cannot be serialised, or the parts do not fit each other.
        StorageError: the path is taken, or the disk is full; nothing is left behind.
    """
    for update in updates:
        restore_traces(package.path, f"update-{update.group}-first", update.first)
        restore_traces(package.path, f"update-{update.group}-following", update.following)
    graphs = _Graphs(program, updates)
    constants = _merge_constants(program, updates)
    with new_folder(Path(path)) as root:
        graphs.write(root)
        if constants:
            write_tensors(root / CONSTANTS, constants)
        all_passes = (*package.manifest.passes, *passes)
        bare = _bare_manifest(
            program,
            updates,
            recipe,
            constants,
            graphs.facts,
            all_passes,
            package.digest,
            _NO_LIBRARIES,
        )
        # A library's description from the time of capture says more than the one of this machine.
        recorded_libraries = {
            name: entry
            for name, entry in package.manifest.op_libraries.items()
            if entry.digest is not None
        }
        bare = _with_libraries(
            bare,
            {
                name: recorded_libraries.get(name, entry)
                for name, entry in bare.op_libraries.items()
            },
        )
        if "initialization" in package.manifest.features:
            bare = _with_feature(bare, "initialization")
        bare = _with_weight_source(bare, package.manifest.weight_source)
        if package.manifest.abstract is not None:
            names = tuple(sorted({*package.manifest.abstract.added, *added}))
            entry = package.manifest.abstract.model_copy(update={"added": names})
            bare = _with_feature(bare, "abstract").model_copy(update={"abstract": entry})
        added_files = add_weights(package.path, package.manifest, root, added) if added else []
        copied = [
            file
            for file in package.manifest.files
            if file.split("/")[0] in _OF_THE_STATE and file not in added_files
        ]
        copied += sorted({wheel for entry in bare.op_libraries.values() for wheel in entry.wheels})
        for file in copied:
            link_or_copy(package.path / file, root / file)
        _write_manifest(root, bare, _media_types(package.manifest))
        written_files = Manifest.from_bytes((root / MANIFEST).read_bytes(), MANIFEST).files
        for file in copied:
            if written_files[file] != package.manifest.files[file]:
                raise IntegrityError(
                    "a file does not match its entry in the manifest",
                    where=file,
                    hint="Fetch the package again.",
                )
        graphs.check(root)
        freeze_documents = {
            name: document
            for name in _FREEZE_DOCUMENTS
            if (document := read_debug(package.path, name)) is not None
        }
        write_debug(root, {**freeze_documents, **graphs.debug(SourceMap(package.path).files)})
    return open_package(Path(path), namespaces=package.namespaces)


def _state_specs(manifest: Manifest) -> tuple[tuple[ParameterSpec, ...], tuple[BufferSpec, ...]]:
    return tuple(parameter_spec(entry) for entry in manifest.parameters), tuple(
        buffer_spec(entry) for entry in manifest.buffers
    )


def with_weights(
    package: Package,
    path: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    training: TrainingEntry | None = None,
    trained: Collection[str] | None = None,
    max_shard: int = MAX_SHARD,
) -> Package:
    """Write a child of `package` with its graphs and new weights.

    Args:
        package: the parent. Its graphs, recipe and assets are shared (hard links where the file
            system has them).
        path: a folder that does not exist.
        tensors: (name, tensor) for every parameter that is not an alias and every buffer, in any
            order; omitted buffers keep their values.
        training: how the weights were trained from the parent's.
        trained: the parameters that were trained, which are stored in separate files; None: those
            that the package trains.
        max_shard: bytes of tensors in one weight file.

    Law: the new package's `program_digest` is the parent's, unless the parent is abstract, which is
    part of it.

    Raises:
        PackageError: a tensor is missing, unknown, occurs twice or does not fit.
        StorageError: the path is taken, or the disk is full; nothing is left behind.
    """
    manifest = package.manifest
    buffers = {buffer.name for buffer in manifest.buffers}

    def complete() -> Iterable[tuple[str, torch.Tensor]]:
        omitted = set(buffers)
        for name, tensor in tensors:
            omitted.discard(name)
            yield name, tensor
        for name in sorted(omitted):
            yield name, package.weights.tensor(name)

    with new_folder(Path(path)) as root:
        copied = [file for file in manifest.files if not file.startswith("weights/")]
        copied += [
            file
            for file, _ in walk(package.path)
            if file.startswith(("debug/", "derived/")) and not file.startswith("derived/.")
        ]
        for file in copied:
            link_or_copy(package.path / file, root / file)
        write_weights(
            root,
            stored_tensors(manifest),
            complete(),
            max_shard,
            trained_tensors(manifest, trained),
        )
        source = manifest.weight_source
        if source is not None:  # the default is for a package without weights
            source = source.model_copy(update={"default": None}) if source.names else None
            manifest = _with_weight_source(manifest, source)
        features = set(manifest.features) - {"training", "abstract"} | (
            {"training"} if training is not None else set()
        )
        changes = {
            "parent": package.digest,
            "training": training,
            "features": tuple(sorted(features)),
            "abstract": None,
        }
        _write_manifest(root, manifest.model_copy(update=changes), _media_types(manifest))
    return open_package(Path(path), namespaces=package.namespaces)


def _graph_programs(program: Program, updates: Sequence[UpdateGraph]) -> dict[str, ExportedProgram]:
    graphs: dict[str, ExportedProgram] = {}
    for name, capture in sorted(program.graphs.items()):
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,31}(-[a-z][a-z0-9_]{0,31}){0,2}", name):
            raise PackageError(
                "a graph has a name that no job can produce",
                where=name,
                expected="lowercase letters, digits and _, with - between parts",
            )
        graphs[name] = capture.exported
    for update in updates:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}", update.group):
            raise PackageError(
                "a parameter group's name is not a plain word",
                where=update.group,
                expected="letters, digits, _ and -",
            )
        graphs[f"update-{update.group}-first"] = update.first
        graphs[f"update-{update.group}-following"] = update.following
    return graphs


def _merge_constants(program: Program, updates: Sequence[UpdateGraph]) -> dict[str, torch.Tensor]:
    constants = dict(program.constants)
    for update in updates:
        for place, exported in (("first", update.first), ("following", update.following)):
            if exported.state_dict:
                raise PackageError(
                    "an update graph has parameters or buffers of its own",
                    where=f"update-{update.group}-{place}",
                )
            for name, value in exported.constants.items():
                if not isinstance(value, torch.Tensor):
                    raise PackageError(
                        "an update graph has a constant that is not a tensor",
                        where=f"update-{update.group}-{place}",
                        got=name,
                    )
                constants[f"update-{update.group}-{place}/{name}"] = value
    return dict(sorted(constants.items()))


def _bare_manifest(
    program: Program,
    updates: Sequence[UpdateGraph],
    recipe: Recipe,
    constants: Mapping[str, torch.Tensor],
    facts: Sequence[GraphFacts],
    passes: tuple[PassEntry, ...],
    parent: str | None,
    user_libraries: Libraries,
) -> Manifest:
    """Return the manifest without its list of files.

    Raises:
        PackageError: the format cannot describe the package, for example because of a name.
    """
    operators = frozenset[str]().union(*(fact.operators for fact in facts))
    libraries = frozenset[str]().union(*(fact.namespaces for fact in facts)) - BUILT_IN_NAMESPACES
    features = {"custom-ops"} if libraries else set()
    if not all(buffer.persistent for buffer in program.buffers):
        features.add("non-persistent-buffers")
    if not all(update.elementwise for update in updates):
        features.add("whole-updates")
    if recipe.graphs or recipe.loop:
        features.add("several-graphs")
    if recipe.schedules:
        features.add("schedules")
    if program.variants:
        features.add("variants")
    optional_features = {
        "clip-value": any(
            recipe.graph(name).clip_value is not None
            for name, graph in program.graphs.items()
            if graph.training
        ),
        "ema": recipe.keeps_mean,
        "loss-scale": recipe.loss_scale is not None,
    }
    features |= {name for name, present in optional_features.items() if present}
    schemas: dict[str, str] = {}
    for name in sorted(operators):
        schema = running_schema(name)
        if schema is None:
            raise PackageError(f"the operator {name} is not registered with torch's dispatcher")
        schemas[name] = schema
    try:
        return Manifest(
            features=tuple(sorted(features)),
            graphs={
                name: graph_entry(graph, f"graphs/{name}.json")
                for name, graph in sorted(program.graphs.items())
            },
            variants=program.variants,
            parameters=tuple(parameter_entry(spec) for spec in program.parameters),
            buffers=tuple(buffer_entry(spec) for spec in program.buffers),
            constants=tuple(
                ConstantEntry(
                    name=name,
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    shape=tuple(tensor.shape),
                )
                for name, tensor in constants.items()
            ),
            recipe=recipe,
            updates=tuple(
                UpdateEntry(
                    group=update.group,
                    first=f"graphs/update-{update.group}-first.json",
                    following=f"graphs/update-{update.group}-following.json",
                    state=tuple(state_entry(spec) for spec in update.state),
                    elementwise=update.elementwise,
                    shape=update.shape,
                )
                for update in updates
            ),
            ops=schemas,
            higher_order_ops=tuple(
                sorted(frozenset[str]().union(*(fact.higher_order for fact in facts)))
            ),
            op_libraries=describe_libraries(schemas, libraries, user_libraries),
            passes=passes,
            parent=parent,
            files={},
        )
    except ValidationError as error:
        raise PackageError(
            f"the package cannot be described: {error.errors(include_url=False)[0]['msg']}"
        ) from error


def _with_libraries(bare: Manifest, libraries: Mapping[str, OpLibraryEntry]) -> Manifest:
    features = (
        {*bare.features, "extensions"}
        if any(entry.wheels for entry in libraries.values())
        else set(bare.features)
    )
    return bare.model_copy(
        update={"op_libraries": dict(libraries), "features": tuple(sorted(features))}
    )


def _with_feature(bare: Manifest, feature: str) -> Manifest:
    return bare.model_copy(update={"features": tuple(sorted({*bare.features, feature}))})


def _with_weight_source(manifest: Manifest, source: WeightSourceEntry | None) -> Manifest:
    features = set(manifest.features) - {"weight-source"}
    features |= {"weight-source"} if source is not None else set()
    return manifest.model_copy(
        update={"weight_source": source, "features": tuple(sorted(features))}
    )


def _state_names(manifest: Manifest) -> list[str]:
    return [spec.name for specs in stored_tensors(manifest) for spec in specs]


def _media_types(manifest: Manifest) -> dict[str, str]:
    """Return the media types of the assets, which need not follow from their names."""
    return {
        file: entry.media_type for file, entry in manifest.files.items() if file.startswith(ASSETS)
    }


def _write_manifest(root: Path, bare: Manifest, media_types: Mapping[str, str]) -> None:
    """Write the manifest, with every file that is part of the identity.

    `media_types` maps files to their media types where these do not follow from the names.
    """
    sizes = {
        file: status.st_size for file, status in walk(root) if file.split("/")[0] not in OUTSIDE
    }
    read = ByteStep("computing the digests of files", sum(sizes.values()))
    files = {
        file: FileEntry(
            media_type=media_types.get(file) or media_type_of(file),
            sha256=sha256_file(root / file, read),
            size=size,
        )
        for file, size in sizes.items()
    }
    data = bare.model_copy(update={"files": dict(sorted(files.items()))}).to_bytes()
    Manifest.from_bytes(data, MANIFEST)
    write_bytes(root / MANIFEST, data)
