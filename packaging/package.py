"""Open packages. Everything is checked before it is parsed; weights are read lazily."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from trainload.autograd_trace.graphs import Recipe, UpdateGraph
from trainload.capture.guards.dispatch import Dispatcher
from trainload.capture.program import MAIN, GraphCapture, ParameterSpec, Program, variant_of
from trainload.core.canonical_json import sha256_bytes
from trainload.core.errors import IntegrityError, PackageError, StorageError, UnsafePackageError
from trainload.core.paths import open_inside
from trainload.core.storage.places import path_here
from trainload.packaging.format.assets import (
    ASSETS,
    AssetFile,
    assets_of,
    no_such_asset,
    save_assets,
)
from trainload.packaging.format.entries import (
    buffer_spec,
    graph_guard,
    graph_specs,
    parameter_spec,
    state_spec,
)
from trainload.packaging.format.manifest import MAX_MANIFEST, Manifest
from trainload.packaging.format.manifest_records import BufferEntry, OpLibraryEntry, ParameterEntry
from trainload.packaging.format.package_files import read_checked, walk
from trainload.packaging.format.package_paths import CONSTANTS, MANIFEST, OUTSIDE
from trainload.packaging.graphs.graph_json import graph_from_json
from trainload.packaging.graphs.graph_signature import check_signature, no_such_graph
from trainload.packaging.graphs.operator_compat import Verdict, compare_operators
from trainload.packaging.graphs.validate import parse_graph, validate_graph
from trainload.packaging.libraries.op_libraries import spelled_library
from trainload.packaging.tensors.safetensors_file import (
    DTYPES,
    TensorSpec,
    read_tensors,
    tensor_places,
)
from trainload.packaging.tensors.weight_shards import LazyState, WeightReader, Weights
from trainload.packaging.weight_sources.replaced_weights import ReplacedWeights


@dataclass(frozen=True)
class Package:
    """An open package.

    Laws: when the package was opened, the files at `path` were those that `manifest` lists, by name
    and size; bytes that are read from them later are returned only if their digest is the
    manifest's.

    Attributes:
        path: folder of the package.
        digest: identity of the package: the sha256 of manifest.json, in hex.
        manifest: parsed manifest.json.
        namespaces: trusted namespaces of operators of other libraries.
        source: reference in the store or registry from which the package was fetched, if any, so
            that other machines can fetch it too.
        given: weights that take the place of its own.

    Example:
        package = trainload.open("gpt.tl")
        print(package.digest, package.manifest.graphs)
    """

    path: Path
    digest: str
    manifest: Manifest = field(repr=False)
    namespaces: frozenset[str] = frozenset()
    source: str | None = None
    given: ReplacedWeights | None = field(default=None, repr=False, compare=False)

    @property
    def recipe(self) -> Recipe:
        """The recipe that drives the graphs."""
        return self.manifest.recipe

    @property
    def weights(self) -> Weights:
        """Lazy reader of parameters and buffers: those that a run was given, or the package's own.

        Raises:
            IntegrityError: the index or the list of chunks is damaged.
            PackageError: the package is abstract, and was given none.
        """
        return self.stored_weights if self.given is None else self.given

    @cached_property
    def stored_weights(self) -> WeightReader:
        """Lazy reader of the package's own weights. The errors are those of `weights`."""
        check_weights(self)
        return WeightReader(self.path, self.manifest)

    @property
    def has_weights(self) -> bool:
        """True unless the package is abstract, and was given none."""
        return self.manifest.abstract is None or self.given is not None

    @property
    def default_weights(self) -> str | None:
        """Source of the weights of a launch that names none; None if there is no such source, or
        the package has weights.
        """
        source = self.manifest.weight_source
        return None if source is None or self.has_weights else source.default

    def program(self) -> Program:
        """Load the captured graphs.

        Their state is on the meta device; `Program.state` reads from disk on access.

        Tied parameters are one tensor object in the graphs' state.

        Raises:
            IntegrityError: a graph file or the constants are damaged.
            UnsafePackageError: a graph contains something that is not allowed.
            PackageError: the running torch rejects a graph.
        """
        state = self._state(meta=True)
        constants = self.all_constants()
        graphs = {name: self._load_capture(name, state, constants) for name in self.manifest.graphs}
        return Program(
            graphs=graphs,
            parameters=self.parameters,
            buffers=tuple(buffer_spec(entry) for entry in self.manifest.buffers),
            state=LazyState(self.weights) if self.has_weights else {},
            constants=self._constants_of_graphs(constants),
            variants=self.manifest.variants,
        )

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Parameters, as in `Program.parameters`."""
        return tuple(parameter_spec(entry) for entry in self.manifest.parameters)

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """Constants of the captured graphs, as in `Program.constants`.

        Raises:
            IntegrityError: the file is damaged.
        """
        return self._constants_of_graphs(self.all_constants())

    def all_constants(self) -> dict[str, torch.Tensor]:
        """Read all constants, those of update graphs included, by the manifest's names.

        Raises:
            IntegrityError: the file is damaged.
        """
        return read_tensors(*self._constants_file()) if self.manifest.constants else {}

    def captured(self, name: str) -> GraphCapture:
        """Load one graph of `program`, without the others.

        Raises:
            PackageError: there is no graph of this name; otherwise as `program`.
        """
        return self._load_capture(name, self._state(meta=True), self.all_constants())

    def graph(self, name: str) -> ExportedProgram:
        """Load one captured graph with its weights, ready to run:
        `.module(check_guards=False)(batch)`.

        Raises:
            PackageError: there is no graph of this name, or the package is abstract; otherwise as
                `program`.
        """
        return self._load_capture(name, self._state(meta=False), self.all_constants()).exported

    def dispatcher(self, graph: str = MAIN) -> Dispatcher:
        """Return the dispatcher that picks the variant of a graph for a batch.

        Args:
            graph: name of the graph in the first variant: "train", "eval", "predict", "critic",
                "critic-eval".

        Raises:
            PackageError: there is no graph of this name.
        """
        entries = self.manifest.graphs
        if graph not in entries or variant_of(graph):
            graph_names = [name for name in entries if not variant_of(name)]
            raise no_such_graph(graph, graph_names)
        variants = {
            "": graph,
            **{variant: f"{graph}-{variant}" for variant in self.manifest.variants},
        }
        guards = {variant: (graph_guard(entries[name]),) for variant, name in variants.items()}
        return Dispatcher(graph, guards, ignored=self.batch_names)

    @property
    def batch_names(self) -> frozenset[str]:
        """Dotted names of the inputs and constants of all graphs."""
        guards = [graph_guard(entry) for entry in self.manifest.graphs.values()]
        return frozenset(
            name
            for guard in guards
            for name in (*(i.name for i in guard.inputs), *guard.constants, *guard.absent)
        )

    def dispatch(self, batch: Mapping[str, Any], graph: str = MAIN) -> str:
        """Return the name of the first variant of `graph` whose guard accepts a batch.

        Args:
            batch: name -> tensor or constant, flat with dotted names or nested as in the job.
            graph: as for `dispatcher`. To dispatch many batches, keep a dispatcher instead.

        Raises:
            PackageError: there is no such graph.
            DataError: the batch fits no variant; the message says what does not fit for each
                variant, the nearest first.
        """
        variant = self.dispatcher(graph).pick(batch)
        return f"{graph}-{variant}" if variant else graph

    def updates(self) -> tuple[UpdateGraph, ...]:
        """Load the update graphs, in the manifest's order.

        Raises:
            PackageError: as `program` does.
        """
        constants = self.all_constants()
        return tuple(
            UpdateGraph(
                group=entry.group,
                first=self._graph(entry.first, f"update-{entry.group}-first", {}, constants),
                following=self._graph(
                    entry.following, f"update-{entry.group}-following", {}, constants
                ),
                state=tuple(state_spec(state) for state in entry.state),
                shape=entry.shape,
            )
            for entry in self.manifest.updates
        )

    @property
    def assets(self) -> tuple[AssetFile, ...]:
        """Assets of the package, sorted by name."""
        return assets_of(self.manifest)

    def asset(self, name: str) -> bytes:
        """Return the bytes of assets/NAME.

        Raises:
            StorageError: there is no such asset.
            IntegrityError: the asset is damaged.
        """
        path = f"{ASSETS}{name}"
        if path not in self.manifest.files:
            raise no_such_asset(self.manifest, name)
        return read_checked(self.path, path, self.manifest.files[path])

    def save_asset(self, name: str, target: str | Path) -> tuple[AssetFile, ...]:
        """Write an asset, or all assets of a folder, atomically to a path that does not exist.

        Args:
            name: name of an asset, which becomes a file; of a folder ("tokenizer"), which becomes a
                folder; or "" for all assets, in one folder.
            target: path of the new file or folder.

        Returns:
            The assets that were written.

        Raises:
            StorageError: there is no asset of this name, the path is taken or cannot be written.
            IntegrityError: an asset is damaged.
        """
        return save_assets(self.path, self.manifest, name, path_here(target))

    def _constants_of_graphs(
        self, constants: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return {
            name: tensor
            for name, tensor in constants.items()
            if name.split("/")[0] in self.manifest.graphs
        }

    def _load_capture(
        self, name: str, state: Mapping[str, torch.Tensor], constants: Mapping[str, torch.Tensor]
    ) -> GraphCapture:
        entry = self.manifest.graphs.get(name)
        if entry is None:
            raise no_such_graph(name, [*self.manifest.graphs])
        inputs, outputs = graph_specs(entry)
        guard = graph_guard(entry) if entry.guard is not None else None
        return GraphCapture(
            name,
            self._graph(entry.file, name, state, constants),
            inputs,
            outputs,
            entry.reached,
            guard,
            entry.coupled is True,
        )

    def _graph(
        self,
        file: str,
        prefix: str,
        state: Mapping[str, torch.Tensor],
        constants: Mapping[str, torch.Tensor],
    ) -> ExportedProgram:
        document = read_graph(self.path, self.manifest, file)
        check_graph(self.manifest, document, file, self.namespaces)
        graph_constants = {
            name.removeprefix(f"{prefix}/"): tensor
            for name, tensor in constants.items()
            if name.startswith(f"{prefix}/")
        }
        return graph_from_json(document, state, graph_constants, file)

    def _state(self, *, meta: bool) -> dict[str, torch.Tensor]:
        """Return every parameter and buffer by name; an alias is the same object as its owner."""

        def tensor(entry: ParameterEntry | BufferEntry) -> torch.Tensor:
            return (
                torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")
                if meta
                else self.weights.tensor(entry.name)
            )

        state: dict[str, torch.Tensor] = {
            entry.name: tensor(entry) for entry in self.manifest.buffers
        }
        for entry in self.manifest.parameters:
            if entry.alias_of is None:
                state[entry.name] = torch.nn.Parameter(tensor(entry), requires_grad=entry.trainable)
        for entry in self.manifest.parameters:
            if entry.alias_of is not None:
                state[entry.name] = state[entry.alias_of]
        return state

    def check_contents(self) -> None:
        """Check that all graphs are safe, and that graphs and tensor headers match the manifest.

        Nothing is passed to torch, and the bytes of tensors are not read. Graphs and headers are
        checked in this way whenever they are read; this method finds at once what would otherwise
        be rejected later, by a worker or at a tensor's first use.

        Raises:
            IntegrityError: a file is damaged, or is not what the manifest says.
            UnsafePackageError: a graph contains something that is not allowed.
        """
        for file in self.manifest.graph_files():
            check_graph(
                self.manifest, read_graph(self.path, self.manifest, file), file, self.namespaces
            )
        if self.manifest.constants:
            tensor_places(*self._constants_file())
        if self.has_weights:
            self.weights.check_headers()

    def _constants_file(self) -> tuple[bytes, str, tuple[TensorSpec, ...]]:
        specs = tuple(
            TensorSpec(entry.name, entry.dtype, entry.shape) for entry in self.manifest.constants
        )
        return read_checked(self.path, CONSTANTS, self.manifest.files[CONSTANTS]), CONSTANTS, specs


def check_weights(package: Package) -> None:
    """Check that a package has weights.

    Raises:
        PackageError: the package is abstract, and was given none.
    """
    if not package.has_weights:
        raise PackageError(
            "this package is abstract: it has shapes but no weights, so it can be inspected and"
            " planned, but not run",
            where=str(package.path),
            hint="Launch it with --weights FOLDER, or give it weights with `trainload fill`.",
        )


def open_package(path: Path, *, namespaces: Set[str] = frozenset()) -> Package:
    """Open a package and check everything except file contents, which are checked when read.

    Args:
        path: folder of the package.
        namespaces: namespaces of operators of other libraries that the package may call. Their code
            runs when the graphs run: name only what you trust.

    Raises:
        StorageError: there is no package.
        IntegrityError: the manifest is damaged, or a file is missing, of another size, or not
            listed.
        UnsafePackageError: a link, a path that leaves the folder, paths that differ in case only,
            or operators that are not trusted.
        PackageError: a newer format, an unknown feature, or an operator that the running torch no
            longer has in this form.
    """
    package = open_to_look(path)
    check_operators(package.manifest, namespaces)
    return replace(package, namespaces=frozenset(namespaces))


def open_to_look(path: Path) -> Package:
    """Open a package without checking that the running torch has its operators.

    Use it to read files without loading graphs.

    Raises:
        StorageError, IntegrityError, UnsafePackageError, PackageError: as `open_package`, except
            that operators are not checked.
    """
    path = Path(path)
    if not (path / MANIFEST).is_file():
        raise StorageError(
            "there is no package here", where=str(path), expected=f"a folder with {MANIFEST}"
        )
    data = read_manifest(path)
    manifest = Manifest.from_bytes(data, MANIFEST)
    check_tree(path, manifest)
    return Package(path.resolve(), sha256_bytes(data), manifest)


def read_manifest(path: Path) -> bytes:
    """Return the bytes of manifest.json.

    Raises:
        UnsafePackageError: it is a link, or too large.
    """
    with open_inside(path, MANIFEST) as file:
        data = file.read(MAX_MANIFEST + 1)
    if len(data) > MAX_MANIFEST:
        raise UnsafePackageError(
            "the manifest is too large", where=MANIFEST, expected=f"at most {MAX_MANIFEST} bytes"
        )
    return data


def read_graph(path: Path, manifest: Manifest, file: str) -> Any:
    """Return the JSON value of a graph file, for `check_graph`.

    Raises:
        IntegrityError: it is not the file that the manifest lists, or not canonical JSON.
        UnsafePackageError: it is too large or too deep, or has too many nodes.
    """
    return parse_graph(read_checked(path, file, manifest.files[file]), file)


def check_tree(path: Path, manifest: Manifest) -> None:
    """Check that the folder contains the manifest's files and no others.

    Raises:
        IntegrityError: a file is missing, of another size, or not listed.
        UnsafePackageError: the folder contains links or special files.
    """
    missing = dict(manifest.files)
    for file, status in walk(path):
        if file == MANIFEST or (file.split("/")[0] in OUTSIDE and "/" in file):
            continue
        entry = missing.pop(file, None)
        if entry is None:
            raise IntegrityError(
                "a file is not in the manifest",
                where=file,
                hint="Remove it, or fetch the package again.",
            )
        if status.st_size != entry.size:
            raise IntegrityError(
                "a file's size differs from the manifest",
                where=file,
                expected=f"{entry.size} bytes",
                got=str(status.st_size),
                hint="Fetch the package again.",
            )
    if missing:
        raise IntegrityError(
            "files of the package are missing", where=min(missing), hint="Fetch the package again."
        )


def check_operators(manifest: Manifest, namespaces: Set[str]) -> None:
    """Check that custom operators are trusted, and that the running torch has all operators
    unchanged.

    Raises:
        UnsafePackageError: a namespace is not in `namespaces`.
        PackageError: an operator is missing or its schema changed incompatibly; the message names
            the worst one with its old and new schema.
    """
    for namespace, entry in manifest.op_libraries.items():
        if namespace not in namespaces:
            raise UnsafePackageError(
                f"the package calls operators of another library, {namespace}, from"
                f" {told_library(entry)}",
                where=MANIFEST,
                hint=f"If you trust it, {ways_to_allow(namespace, entry)}.",
            )
    wrong = [each for each in compare_operators(manifest) if not each.fits]
    if wrong:
        worst = min(wrong, key=lambda each: (each.verdict is not Verdict.MISSING, each.name))
        advice = (
            "Use a version of torch closer to the one that the package was made with (see debug/),"
            " or freeze the job again."
        )
        for namespace, entry in manifest.op_libraries.items():
            if worst.name.startswith(f"torch.ops.{namespace}."):
                missing = worst.verdict is Verdict.MISSING
                advice = (
                    f"Its library was not imported: {ways_to_allow(namespace, entry)}."
                    if missing
                    else f"The package was made with {told_library(entry)}."
                )
        raise PackageError(
            f"{len(wrong)} of the package's operators differ in torch {torch.__version__}; the"
            f" worst is {worst.name}: {worst.schemas}",
            where=MANIFEST,
            hint=f"`trainload ops PKG --compat` lists them all. {advice}",
        )


def told_library(entry: OpLibraryEntry) -> str:
    """Return the name of an operator library for an error message, with its digest."""
    return spelled_library(entry) + (
        f" (sha256 {entry.digest})" if entry.digest is not None else ""
    )


def ways_to_allow(namespace: str, entry: OpLibraryEntry) -> str:
    """Return a hint that says how a user can let a package call the operators of a namespace."""
    module = entry.modules[0] if entry.modules else "MODULE"
    pinned = entry.distribution and (
        f"{entry.distribution}=={entry.version}" if entry.version else entry.distribution
    )
    install = (
        f"pip install {pinned}"
        if pinned
        else f"install {', '.join(entry.modules) or 'its library'}"
    )
    install_hint = (
        f"{install}, and allow the namespace {namespace}: trainload --library {namespace}={module}"
        " COMMAND"
    )
    if entry.wheels:
        return (
            "load the wheel that is bundled with the package: trainload --trust-extensions"
            f" COMMAND; or {install_hint}"
        )
    return install_hint


def check_graph(manifest: Manifest, document: Any, file: str, namespaces: Set[str]) -> None:
    """Check that a parsed graph file is safe, and is the graph that the manifest describes.

    Raises:
        UnsafePackageError: the graph is not safe, or calls operators that the manifest does not
            list.
        PackageError: the graph's inputs, outputs or state are not those of the manifest.
    """
    facts = validate_graph(document, file, namespaces)
    unlisted = sorted(facts.operators - set(manifest.ops)) + sorted(
        facts.higher_order - set(manifest.higher_order_ops)
    )
    if unlisted:
        raise UnsafePackageError(
            "the graph calls operators that the manifest does not list",
            where=file,
            got=", ".join(unlisted[:5]),
        )
    prefix = manifest.graph_files()[file]
    for name, entry in manifest.graphs.items():
        if entry.file == file:
            check_signature(
                document,
                manifest,
                name,
                file,
                inputs=[i.name for i in entry.inputs],
                outputs=len(entry.outputs),
            )
    for update in manifest.updates:
        if file in (update.first, update.following):
            input_count = 3 if file == update.first else 3 + len(update.state)
            check_signature(
                document, manifest, prefix, file, inputs=input_count, outputs=1 + len(update.state)
            )


def check_graphs(manifest: Manifest, documents: Mapping[str, Any]) -> None:
    """Apply `check_graph` to graphs that are being written, given as name -> document."""
    for name, document in documents.items():
        check_graph(manifest, document, f"graphs/{name}.json", frozenset(manifest.op_libraries))
