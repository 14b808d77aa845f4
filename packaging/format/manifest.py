"""manifest.json: the file that describes a package. Its sha256 is the package's identity.

docs/reference/format.md specifies every field.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationError

from trainload.autograd_trace.graphs import Recipe
from trainload.capture.program import (
    Mode,
    graph_name,
    graph_of,
    mode_of,
    variant_of,
)
from trainload.core.canonical_json import canonical_json, parse_canonical, sha256_bytes
from trainload.core.credentials import check_no_credentials
from trainload.core.errors import IntegrityError, PackageError, UnsafePackageError
from trainload.core.records import Record
from trainload.packaging.format.field_types import Identifier, Label, SafePath, Sha256
from trainload.packaging.format.format_version import check_version
from trainload.packaging.format.guard_entries import check_guard
from trainload.packaging.format.manifest_records import (
    AbstractEntry,
    BufferEntry,
    ConstantEntry,
    FileEntry,
    GraphEntry,
    InputEntry,
    OpLibraryEntry,
    ParameterEntry,
    PassEntry,
    TrainingEntry,
    UpdateEntry,
    WeightSourceEntry,
)
from trainload.packaging.format.package_paths import (
    CHUNKS,
    CONSTANTS,
    EXTENSIONS,
    INDEX,
    INITIALIZATION,
    MANIFEST,
    OUTSIDE,
)
from trainload.packaging.format.upgrade import oldest_form, upgraded

MAX_MANIFEST = 64 * 2**20
"""Maximum size of manifest.json in bytes."""


class Manifest(Record):
    """manifest.json.

    Laws: `from_bytes(m.to_bytes(), w) == m`. `from_bytes(b, w).to_bytes() == b` if `b` has the
    present format version; an older manifest is upgraded when it is read, and would be written in
    the present version. A package's identity is the digest of the stored bytes.
    """

    later: ClassVar[frozenset[str]] = frozenset(
        {"abstract", "training", "variants", "weight_source"}
    )

    format_version: Literal[2] = 2
    features: tuple[str, ...]
    graphs: dict[Label, GraphEntry]
    variants: Annotated[tuple[Label, ...], Field(max_length=256)] = ()
    """Variants of the job except the first, in the order in which they are tried for a batch."""
    parameters: tuple[ParameterEntry, ...]
    buffers: tuple[BufferEntry, ...]
    constants: tuple[ConstantEntry, ...]
    recipe: Recipe
    updates: tuple[UpdateEntry, ...]
    ops: dict[str, Annotated[str, Field(max_length=8192)]]
    """Operator of a graph ("torch.ops.aten.add.Tensor") -> schema where the package was written."""
    higher_order_ops: tuple[Identifier, ...]
    op_libraries: dict[Identifier, OpLibraryEntry]
    """Namespace that is not built in -> library that registers its operators."""
    passes: tuple[PassEntry, ...]
    """Passes that changed the graphs since their capture, in order."""
    parent: Sha256 | None
    files: dict[SafePath, FileEntry]
    abstract: AbstractEntry | None = None
    """The proof, if the package has no weights."""
    training: TrainingEntry | None = None
    """The training run, if the weights were trained from the parent's."""
    weight_source: WeightSourceEntry | None = None
    """The source of other weights."""

    def to_bytes(self) -> bytes:
        """Return the file: canonical JSON of the fields, and their sha256 as `checksum`."""
        fields = self.model_dump(mode="json")
        return canonical_json({**fields, "checksum": sha256_bytes(canonical_json(fields))})

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        """Parse the file, which may be hostile.

        Raises:
            IntegrityError: it is not canonical JSON, or its checksum is wrong.
            PackageError: a newer format, an unknown feature, or inconsistent fields.
        """
        raw = parse_canonical(data, where)
        if not isinstance(raw, dict):
            raise IntegrityError("the manifest is not an object", where=where)
        check_version(raw, where)
        checksum = raw.pop("checksum", None)
        if checksum != sha256_bytes(canonical_json(raw)):
            raise IntegrityError(
                "the manifest is damaged: its checksum does not match",
                where=where,
                hint="Fetch the package again.",
            )
        try:
            manifest = cls.model_validate_json(canonical_json(upgraded(raw, where)))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            place = ".".join(str(part)[:80] for part in first["loc"] if part != "[key]")
            reason = first["msg"].removeprefix("Value error, ")
            raise PackageError(
                f"the manifest's field {place} is wrong: {reason}", where=where
            ) from error
        manifest.check(where)
        return manifest

    @property
    def program_digest(self) -> str:
        """Digest of everything that retraining does not change.

        It is the sha256 of the manifest as canonical JSON, without weights, their source, parent
        and training, in the oldest format version that can express it. So it stays the same when a
        newer reader reads or retrains the package.
        """
        replaced = {"parent", "training", "weight_source"}
        fields = oldest_form(self.model_dump(mode="json", exclude=replaced))
        fields["features"] = [
            feature
            for feature in fields["features"]
            if feature not in ("training", "weight-source")
        ]
        fields["files"] = {
            path: entry
            for path, entry in fields["files"].items()
            if not path.startswith("weights/")
        }
        return sha256_bytes(canonical_json(fields))

    @property
    def weights_digest(self) -> str:
        """Digest of the weights: the sha256 of the canonical JSON of `files` under weights/."""
        return sha256_bytes(
            canonical_json(
                {p: e.model_dump() for p, e in self.files.items() if p.startswith("weights/")}
            )
        )

    def modes(self) -> dict[str, Mode]:
        """Return graph name -> mode."""
        return {
            name: mode_of(name, any(o.role == "loss" for o in entry.outputs))
            for name, entry in self.graphs.items()
        }

    def training_graphs(self) -> list[str]:
        """Return the names of the training graphs, those of the main graph first."""
        names = [name for name, mode in self.modes().items() if mode is Mode.TRAIN]
        return sorted(names, key=lambda name: (graph_of(name) != self.recipe.main, name))

    def step_graphs(self, *, evaluates: bool = True) -> list[str]:
        """Return the names of the graphs that a run calls, the training graphs first.

        Args:
            evaluates: True if the run has held-out data. Without it no evaluation graph is called.
        """
        called = (Mode.EVAL, Mode.COMPUTE) if evaluates else (Mode.COMPUTE,)
        return [
            *self.training_graphs(),
            *(name for name, mode in self.modes().items() if mode in called),
        ]

    def data_inputs(self, variant: str | None = None) -> dict[str, InputEntry]:
        """Return the inputs that a run reads from its data.

        These are the inputs of all graphs except predict, without those that other graphs feed.

        Args:
            variant: variant of the graphs; None: all variants together.
        """
        inputs: dict[str, InputEntry] = {}
        for name, mode in self.modes().items():
            if mode is not Mode.PREDICT and variant in (None, variant_of(name)):
                fed = self.recipe.feeds.get(graph_of(name), {})
                inputs |= {
                    entry.name: entry for entry in self.graphs[name].inputs if entry.name not in fed
                }
        return dict(sorted(inputs.items()))

    def graph_files(self) -> dict[str, str]:
        """Return graph file -> prefix of its constants' names ("train", "update-decay-first")."""
        files = {entry.file: name for name, entry in self.graphs.items()}
        for update in self.updates:
            files[update.first] = f"update-{update.group}-first"
            files[update.following] = f"update-{update.group}-following"
        return files

    def check(self, where: str) -> None:
        """Check that the fields are consistent with each other.

        Raises:
            PackageError: they are not.
        """
        parameters = {p.name: p for p in self.parameters}
        names = [*parameters, *(b.name for b in self.buffers)]
        _unique(
            [*(p.name for p in self.parameters), *(b.name for b in self.buffers)],
            "state entry",
            where,
        )
        _unique([c.name for c in self.constants], "constant", where)
        _unique(self.variants, "variant", where)
        for name, graph in self.graphs.items():
            if graph.guard is not None:
                check_guard(
                    graph.guard, [(i.name, i.shape) for i in graph.inputs], f"{where}, graph {name}"
                )
            if (variant := variant_of(name)) and (
                variant not in self.variants or graph.guard is None
            ):
                raise PackageError(
                    "a graph of a variant has no guard, or its variant is not in the list of"
                    " variants",
                    where=where,
                    got=name,
                )
            lacking = (
                []
                if variant
                else [each for each in self.variants if f"{name}-{each}" not in self.graphs]
            )
            if lacking:
                raise PackageError(
                    "a graph lacks one of the variants", where=where, got=f"{name}, {lacking[0]}"
                )
        for parameter in self.parameters:
            owner = (
                parameters.get(parameter.alias_of) if parameter.alias_of is not None else parameter
            )
            if owner is None or (parameter.alias_of is not None and owner.alias_of is not None):
                raise PackageError(
                    f"parameter {parameter.name} is an alias of nothing",
                    where=where,
                    got=repr(parameter.alias_of),
                )
            if (owner.shape, owner.dtype, owner.trainable) != (
                parameter.shape,
                parameter.dtype,
                parameter.trainable,
            ):
                raise PackageError(f"alias {parameter.name} differs from {owner.name}", where=where)
        grouped = [name for group in self.recipe.groups for name in group.parameters]
        self._check_recipe(where)
        trainable = {p.name for p in self.parameters if p.trainable and p.alias_of is None}
        if set(grouped) - set(names) or trainable - set(grouped):
            wrong = sorted(set(grouped) - set(names)) or sorted(trainable - set(grouped))
            raise PackageError(
                "the recipe's groups do not fit the parameters",
                where=where,
                got=", ".join(wrong[:5]),
            )
        _unique([u.group for u in self.updates], "update group", where)
        members = {g.name: g.parameters for g in self.recipe.groups}
        for update in self.updates:
            taken = {
                parameters[name].shape
                for name in members.get(update.group, ())
                if name in parameters
            }
            if update.elementwise != (update.shape is None) or (
                update.shape is not None and taken - {update.shape}
            ):
                raise PackageError(
                    f"the update of {update.group} does not fit its parameters",
                    where=where,
                    expected=str(update.shape),
                    got=str(taken),
                )
            if any(
                entry.shape and (entry.like_parameter or update.elementwise)
                for entry in update.state
            ):
                raise PackageError(
                    "an optimizer state has its own shape where only the parameter's shape or none"
                    " is allowed",
                    where=where,
                    got=update.group,
                )
        if self.updates and {u.group for u in self.updates} != {g.name for g in self.recipe.groups}:
            raise PackageError("the updates do not match the recipe's groups", where=where)
        modes = self.modes()
        for name in self.graphs:
            if name != graph_name(graph_of(name), modes[name], variant_of(name)):
                raise PackageError(
                    "a graph has a name that no job can produce", where=where, got=name
                )
        _unique(
            [
                *(g.file for g in self.graphs.values()),
                *(f for u in self.updates for f in (u.first, u.following)),
            ],
            "graph file",
            where,
        )
        _check_abstract(self, where)
        _check_weight_source(self, where)
        _check_extensions(self, where)
        if ("initialization" in self.features) != (INITIALIZATION in self.files):
            raise PackageError(
                f"the feature initialization requires {INITIALIZATION}, and the reverse",
                where=where,
            )
        if ("training" in self.features) != (self.training is not None):
            raise PackageError(
                "the feature training requires the field training, and the reverse", where=where
            )
        needed = [
            *self.graph_files(),
            *([] if self.abstract is not None and not self.abstract.added else [INDEX, CHUNKS]),
            *([CONSTANTS] if self.constants else []),
        ]
        for path in needed:
            if path not in self.files:
                raise PackageError(
                    "a file that the manifest needs is not in its list of files",
                    where=where,
                    got=path,
                )
        folded: dict[str, str] = {}
        for path in self.files:
            if path == MANIFEST or path.split("/")[0] in OUTSIDE:
                raise UnsafePackageError(
                    "this path is not allowed in the list of files", where=where, got=path
                )
            parts = path.split("/")
            for end in range(1, len(parts) + 1):
                prefix = "/".join(parts[:end])
                other = folded.setdefault(prefix.casefold(), prefix)
                if other != prefix:
                    raise UnsafePackageError(
                        "two paths differ only in case", where=where, got=f"{other} and {prefix}"
                    )

    def _check_recipe(self, where: str) -> None:
        """Check that the recipe is consistent with the graphs.

        Raises:
            PackageError: it is not.
        """
        recipe, modes = self.recipe, self.modes()
        trained = {name for name, mode in modes.items() if mode is Mode.TRAIN}
        called = {
            graph_of(name) for name, mode in modes.items() if mode in (Mode.TRAIN, Mode.COMPUTE)
        }
        trainable = {p.name for p in self.parameters if p.trainable and p.alias_of is None}
        groups = {group.name: group.parameters for group in recipe.groups}
        if recipe.graphs and set(recipe.graphs) != trained:
            raise PackageError(
                "the recipe's graphs do not match the training graphs",
                where=where,
                got=", ".join(sorted(recipe.graphs)),
            )
        if not recipe.graphs and {graph_of(name) for name in trained} - {recipe.main}:
            raise PackageError(
                "the recipe does not state which parameters each graph trains",
                where=where,
                got=", ".join(sorted(trained)),
            )
        for name in trained:
            if set(self.graphs[name].reached or ()) - trainable:
                raise PackageError(
                    "a graph reaches a parameter that is not trained", where=where, got=name
                )
        for name, graph in recipe.graphs.items():
            if set(graph.groups) - set(groups):
                raise PackageError(
                    "the recipe names an unknown group",
                    where=where,
                    got=", ".join(sorted(graph.groups)),
                )
            _unique(
                [p for group in graph.groups for p in groups[group]],
                f"parameter in the groups of graph {name}:",
                where,
            )
        if not recipe.graphs:
            _unique(
                [p for parameters in groups.values() for p in parameters],
                "parameter in the recipe's groups",
                where,
            )
        fed = {
            graph
            for feeds in recipe.feeds.values()
            for source in feeds.values()
            for graph in [source.partition(".")[0]]
        }
        clocks = {graph for group in recipe.groups for graph in group.clock}
        turns = {turn.graph for turn in recipe.turns}
        if trained and (turns | clocks | fed | set(recipe.feeds) | {recipe.main}) - called:
            wrong = sorted((turns | clocks | fed | set(recipe.feeds) | {recipe.main}) - called)
            raise PackageError(
                "the recipe names an unknown graph", where=where, got=", ".join(wrong)
            )
        if trained and not any(
            turn.graph == recipe.main and (turn.every, turn.start) == (1, 0)
            for turn in recipe.turns
        ):
            raise PackageError(
                "the main graph does not run in every round", where=where, got=recipe.main
            )
        for fed_graph, feeds in recipe.feeds.items():
            self._check_feeds(fed_graph, feeds, where)

    def _check_feeds(self, graph: str, feeds: Mapping[str, str], where: str) -> None:
        for name, entry in self.graphs.items():
            if self.modes()[name] is Mode.PREDICT:
                continue
            if graph_of(name) == graph and set(feeds) - {i.name for i in entry.inputs}:
                raise PackageError(
                    "a graph is fed an input that it does not have",
                    where=where,
                    got=f"{name}: {', '.join(sorted(feeds))}",
                )
            outputs = {f"{graph_of(name)}.{o.name}" for o in entry.outputs if o.role == "output"}
            lacking = [
                source
                for source in feeds.values()
                if source.partition(".")[0] == graph_of(name) and source not in outputs
            ]
            if lacking:
                raise PackageError(
                    "a graph is fed by an unknown output", where=where, got=lacking[0]
                )


def _check_abstract(manifest: Manifest, where: str) -> None:
    """Check that a package either has weights, or says that it is abstract and has none."""
    if ("abstract" in manifest.features) != (manifest.abstract is not None):
        raise PackageError(
            "the feature abstract requires the field abstract, and the reverse",
            where=where,
            got=(
                ", ".join(manifest.features)
                if manifest.abstract is None
                else "a field without its feature"
            ),
        )
    weights = sorted(path for path in manifest.files if path.startswith("weights/"))
    if manifest.abstract is None:
        return
    if weights and not manifest.abstract.added:
        raise PackageError(
            "a package that says it is abstract has weights",
            where=where,
            got=", ".join(weights[:5]),
        )
    unknown = set(manifest.abstract.added) - {entry.name for entry in manifest.parameters}
    if unknown:
        raise PackageError(
            "a parameter that was added is none of the package",
            where=f"{where}, abstract.added",
            got=", ".join(sorted(unknown)[:5]),
        )


def _check_weight_source(manifest: Manifest, where: str) -> None:
    """Check the names of weights in other sources, and that only a package without weights has a
    default one.
    """
    source = manifest.weight_source
    if ("weight-source" in manifest.features) != (source is not None):
        raise PackageError(
            "the feature weight-source requires the field weight_source, and the reverse",
            where=where,
        )
    if source is None:
        return
    known = {entry.name for entry in manifest.parameters}
    known |= {entry.name for entry in manifest.buffers}
    unknown = sorted(source.names.keys() - known)
    if unknown:
        raise PackageError(
            "a name of weights is that of no parameter or buffer",
            where=f"{where}, weight_source.names",
            got=", ".join(unknown[:5]),
        )
    if source.default is not None:
        if manifest.abstract is None:
            raise PackageError(
                "a package with weights names a source of weights",
                where=f"{where}, weight_source.default",
                got=source.default,
            )
        check_no_credentials(source.default)


def _check_extensions(manifest: Manifest, where: str) -> None:
    """Check that operator libraries name exactly the wheels in extensions/, and check the
    feature.
    """
    named = {wheel for entry in manifest.op_libraries.values() for wheel in entry.wheels}
    there = {path for path in manifest.files if path.split("/")[0] == EXTENSIONS}
    if named != there:
        raise PackageError(
            f"the wheels in {EXTENSIONS}/ do not match those that the operator libraries name",
            where=where,
            expected=", ".join(sorted(named)),
            got=", ".join(sorted(there)),
        )
    if wrong := sorted(path for path in there if path.count("/") != 1 or not path.endswith(".whl")):
        raise PackageError(f"a file in {EXTENSIONS}/ is not a wheel", where=where, got=wrong[0])
    if bool(there) != ("extensions" in manifest.features):
        raise PackageError(
            "the feature extensions requires wheels, and the reverse",
            where=where,
            got=", ".join(manifest.features),
        )


def _unique(names: Iterable[str], what: str, where: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise PackageError(f"{what} {name!r} is listed twice", where=where)
        seen.add(name)
