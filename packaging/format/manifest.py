"""manifest.json: the file that describes a package. Its sha256 is the package's identity.

docs/format.md specifies every field.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationError

from trainload.autograd_trace.graphs import Recipe
from trainload.capture.job.names import is_dotted_name
from trainload.capture.job.synthesise import QUANTILES
from trainload.capture.program import (
    Mode,
    graph_name,
    graph_of,
    mode_of,
    variant_of,
)
from trainload.core.canonical_json import canonical_json, parse_canonical, sha256_bytes
from trainload.core.errors import IntegrityError, PackageError, UnsafePackageError
from trainload.core.records import Record
from trainload.packaging.format.guard_entries import GuardEntry, InputName, Size, check_guard
from trainload.packaging.format.upgrade import oldest_form, upgraded

FORMAT_VERSION = 2
"""History:

    1 (2026-11-21)  First version.
    2 (2026-11-22)  `op_libraries` describes what registers each namespace: distribution, version,
                    digest, modules, Triton kernels, and wheels in extensions/; feature
                    `extensions`. 2026-11-23: feature `training`.

A reader upgrades older manifests: packaging/format/upgrade.py. tests/golden keeps a package of each
version.
"""
FEATURES: Mapping[str, str] = {
    "abstract": (
        "the package has shapes and no weights, and cannot be trained: `abstract` says what was"
        " proven"
    ),
    "custom-ops": (
        "graphs call operators of other libraries, described in `op_libraries`; a reader needs"
        " permission to run them"
    ),
    "extensions": (
        "extensions/ holds wheels of operator libraries, which run code; a reader loads them only"
        " with permission"
    ),
    "non-persistent-buffers": (
        "weights/non-persistent.safetensors holds buffers that are not in the model's state dict"
    ),
    "clip-value": "the elements of the gradient are clipped: `clip_value` in the recipe",
    "several-graphs": (
        "several graphs are trained in turns: `loop`, `graphs`, `feeds` and `main` in the recipe,"
        " `clock` in its groups"
    ),
    "ema": "a running mean of the parameters is kept: `ema_decay` in the recipe",
    "loss-scale": "the loss is scaled: `loss_scale` in the recipe",
    "schedules": (
        "learning rates are one number for each group, multiplied by tables that groups share:"
        " `schedules` in the recipe"
    ),
    "training": (
        "the weights were trained from the parent's: `training` says how long, on what, and with"
        " which settings"
    ),
    "variants": (
        "graphs have variants, each with a guard, which are tried in the order of `variants`"
    ),
    "whole-updates": (
        "the update of a group takes whole parameters of one shape, which the update states"
    ),
}
"""Features that a package may require of its reader besides the version -> meaning.

Unknown ones are rejected.
"""

MANIFEST = "manifest.json"
MAX_MANIFEST = 64 * 2**20
"""Maximum size of manifest.json in bytes."""
CONSTANTS = "constants.safetensors"
INDEX = "weights/model.safetensors.index.json"
NON_PERSISTENT = "weights/non-persistent.safetensors"
CHUNKS = "weights/chunks.json"
OUTSIDE = ("debug", "derived", "signatures")
"""Folders whose files are not part of the package's identity."""
EXTENSIONS = "extensions"
"""The folder of wheels."""
BUILT_IN_NAMESPACES = frozenset({"aten", "prims", "trainload"})
"""Namespaces of operators that every reader has."""

SAFE_PART = r"[A-Za-z0-9_][A-Za-z0-9_.+-]*"
"""Pattern of one part of a path, between slashes."""
_PATH = re.compile(rf"{SAFE_PART}(/{SAFE_PART})*")
_TOKEN = r"[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]{0,126}"
_RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?")


def safe_path(path: str) -> str:
    """Return `path` if a package may contain it.

    Raises:
        ValueError: it is not a safe relative path.
    """
    parts = path.split("/")
    if (
        len(path) > 512
        or not _PATH.fullmatch(path)
        or any(part.endswith(".") or _RESERVED.fullmatch(part) for part in parts)
    ):
        raise ValueError(
            f"{path[:80]!r} is not a safe relative path (letters, digits and _ . + - between"
            " slashes)"
        )
    return path


def _of_64_bits(value: int | float) -> int | float:
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ValueError(f"{value} does not fit into 64 bits")
    return value


def _fqn(name: str) -> str:
    if not is_dotted_name(name):
        raise ValueError(f"{name[:80]!r} is not a dotted name")
    return name


Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
SafePath = Annotated[str, AfterValidator(safe_path)]
Fqn = Annotated[str, AfterValidator(_fqn)]
MediaType = Annotated[str, Field(pattern=rf"^{_TOKEN}/{_TOKEN}(; charset={_TOKEN})?$")]
"""A media type as in RFC 6838, with at most a charset: "text/plain", "text/csv; charset=utf-8"."""
Identifier = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)]
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_-]*$", max_length=64)]
Symbolic = Annotated[str, Field(min_length=1, max_length=256)]
ModuleName = Annotated[
    str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$", max_length=512)
]
DistributionName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$", max_length=256)
]
DistributionVersion = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.!+-]+$", max_length=256)]
Quantile = Annotated[int | float, AfterValidator(_of_64_bits)]
Option = (
    bool
    | int
    | float
    | Annotated[str, Field(max_length=8192)]
    | tuple[Annotated[str, Field(max_length=8192)], ...]
    | None
)
"""Value of an option of a pass."""
SettingName = Annotated[
    str, Field(pattern=r"^[a-z][a-z_]{0,31}(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,63})?$")
]
"""A setting's name as for `--set`: "lr", "lr.group0", "adapters.rank"."""


class FileEntry(Record):
    """A file of the package; `size` is in bytes."""

    media_type: MediaType
    sha256: Sha256
    size: Size


class InputEntry(Record):
    """One entry of a graph's batch; `quantiles` is as in `InputSpec`."""

    name: InputName
    dtype: Identifier
    shape: tuple[Size | Symbolic, ...]
    quantiles: Annotated[tuple[Quantile, ...], Field(max_length=QUANTILES)]


class OutputEntry(Record):
    """One output of a graph."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    role: Literal["loss", "weight", "metric", "prediction", "output"]


class GraphEntry(Record):
    """A captured graph and its file."""

    later: ClassVar[frozenset[str]] = frozenset({"coupled", "guard", "reached"})

    file: SafePath
    inputs: tuple[InputEntry, ...]
    outputs: tuple[OutputEntry, ...]
    reached: tuple[Fqn, ...] | None = None
    """Names of the parameters that the graph reaches; see `GraphCapture.reached`."""
    guard: GuardEntry | None = None
    coupled: Literal[True] | None = None
    """True if the rows of a call depend on each other; see `GraphCapture.coupled`."""


class ParameterEntry(Record):
    """A parameter; one with `alias_of` has no tensor of its own."""

    name: Fqn
    dtype: Identifier
    shape: tuple[Size, ...]
    trainable: bool
    alias_of: Fqn | None


class BufferEntry(Record):
    """A buffer."""

    name: Fqn
    dtype: Identifier
    shape: tuple[Size, ...]
    persistent: bool


class ConstantEntry(Record):
    """A tensor constant; `name` is "GRAPH/NAME_IN_THE_GRAPH"."""

    name: SafePath
    dtype: Identifier
    shape: tuple[Size, ...]


class StateEntry(Record):
    """One entry of an optimizer's state."""

    later: ClassVar[frozenset[str]] = frozenset({"shape"})

    name: Label
    dtype: Identifier
    like_parameter: bool
    shape: tuple[Size, ...] = ()
    """Shape of the entry, if `like_parameter` is false."""


class UpdateEntry(Record):
    """The update of one parameter group: two graph files.

    `shape` is the shape of the parameters that the update takes whole; None if the update is
    elementwise.
    """

    later: ClassVar[frozenset[str]] = frozenset({"shape"})

    group: Label
    first: SafePath
    following: SafePath
    state: tuple[StateEntry, ...]
    elementwise: bool
    shape: tuple[Size, ...] | None = None


class PassEntry(Record):
    """A pass that made a package's graphs from its parent's.

    Attributes:
        name: MODULE:FUNCTION.
        distribution: distribution that provides the module, if known, and its `version`.
        source: sha256 of the module's source file, if it has one.
        options: keyword arguments of the function.
        preserving: True if the graphs before and after the pass computed the same values; if False,
            the user who ran the pass allowed the change.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]+:[A-Za-z0-9_]+$", max_length=512)]
    distribution: Annotated[str, Field(max_length=256)] | None
    version: Annotated[str, Field(max_length=256)] | None
    source: Sha256 | None
    options: dict[Identifier, Option]
    preserving: bool


class KernelEntry(Record):
    """A Triton kernel that an operator launches.

    Attributes:
        name: MODULE:FUNCTION.
        distribution: distribution that provides the module, if known, and its `version`.
        source: sha256 of the module's source file, if it has one.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]+:[A-Za-z0-9_]+$", max_length=512)]
    distribution: DistributionName | None
    version: DistributionVersion | None
    source: Sha256 | None


class OpLibraryEntry(Record):
    """The library that registered the operators of a namespace where the package was written.

    Attributes:
        distribution: name of the distribution, with its `version`; None if unknown, or if modules
            of several distributions register operators.
        digest: `Provider.digest` of the distribution, or of the files if there is no distribution;
            None if no module is known.
        modules: modules to import in order to register the operators.
        kernels: Triton kernels that the operators launch.
        wheels: wheels of the library in extensions/: one, or one for each kind of Python and
            machine.
    """

    distribution: DistributionName | None
    version: DistributionVersion | None
    digest: Sha256 | None
    modules: tuple[ModuleName, ...]
    kernels: tuple[KernelEntry, ...]
    wheels: tuple[SafePath, ...]


class AbstractEntry(Record):
    """The proof for a package without weights.

    Attributes:
        reduced_parameters: number of parameter elements of the reduced job, which was compared with
            eager mode instead.
        reduced_program: sha256 of the canonical JSON of the reduced job's captured graphs, name ->
            graph file.
        structure: sha256 of the structure of the graphs, which is the same for both jobs.
        check: check by which the reduced job was compared.
    """

    reduced_parameters: Size
    reduced_program: Sha256
    structure: Sha256
    check: Literal["usual", "thorough"]


class SettingsEntry(Record):
    """Settings that override those of the package from a step of the run on.

    Attributes:
        step: step of the run; 0 for the settings of the launch.
        settings: name, as for `--set` -> value.
    """

    step: Size
    settings: dict[SettingName, Option]


class TrainingEntry(Record):
    """The training run that made a package's weights from its parent's.

    Attributes:
        steps: number of steps of the run.
        data: fingerprint of the training data: a sha256 of all rows.
        changed: changed settings in order of steps; () if the run used those of the parent.
    """

    steps: Size
    data: Sha256
    changed: Annotated[tuple[SettingsEntry, ...], Field(max_length=10_000)]


class Manifest(Record):
    """manifest.json.

    Laws: `from_bytes(m.to_bytes(), w) == m`. `from_bytes(b, w).to_bytes() == b` if `b` has the
    present format version; an older manifest is upgraded when it is read, and would be written in
    the present version. A package's identity is the digest of the stored bytes.
    """

    later: ClassVar[frozenset[str]] = frozenset({"abstract", "training", "variants"})

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
        _check_version(raw, where)
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
            told = first["msg"].removeprefix("Value error, ")
            raise PackageError(
                f"the manifest's field {place} is wrong: {told}", where=where
            ) from error
        manifest.check(where)
        return manifest

    @property
    def program_digest(self) -> str:
        """Digest of everything that retraining does not change.

        It is the sha256 of the manifest as canonical JSON, without weights, parent and training, in
        the oldest format version that can express it. So it stays the same when a newer reader
        reads or retrains the package.
        """
        fields = oldest_form(self.model_dump(mode="json", exclude={"parent", "training"}))
        fields["features"] = [feature for feature in fields["features"] if feature != "training"]
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
        found = [name for name, mode in self.modes().items() if mode is Mode.TRAIN]
        return sorted(found, key=lambda name: (graph_of(name) != self.recipe.main, name))

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
        found: dict[str, InputEntry] = {}
        for name, mode in self.modes().items():
            if mode is not Mode.PREDICT and variant in (None, variant_of(name)):
                fed = self.recipe.feeds.get(graph_of(name), {})
                found |= {
                    entry.name: entry for entry in self.graphs[name].inputs if entry.name not in fed
                }
        return dict(sorted(found.items()))

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
        _check_extensions(self, where)
        if ("training" in self.features) != (self.training is not None):
            raise PackageError(
                "the feature training requires the field training, and the reverse", where=where
            )
        needed = [
            *self.graph_files(),
            *([] if self.abstract is not None else [INDEX, CHUNKS]),
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
            given = {f"{graph_of(name)}.{o.name}" for o in entry.outputs if o.role == "output"}
            lacking = [
                source
                for source in feeds.values()
                if source.partition(".")[0] == graph_of(name) and source not in given
            ]
            if lacking:
                raise PackageError(
                    "a graph is fed by an unknown output", where=where, got=lacking[0]
                )


def _check_version(raw: dict[str, Any], where: str) -> None:
    version = raw.get("format_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise PackageError(
            "the manifest states no format version",
            where=where,
            expected=f"1 to {FORMAT_VERSION}",
            got=repr(version),
        )
    if version > FORMAT_VERSION:
        raise PackageError(
            "the package was made in a newer format",
            where=where,
            expected=f"format 1 to {FORMAT_VERSION}",
            got=f"format {version}",
            hint="Update trainload.",
        )
    features = raw.get("features")
    if not isinstance(features, list) or not all(isinstance(feature, str) for feature in features):
        raise PackageError(
            "the manifest states no features",
            where=where,
            expected="a list of names",
            got=repr(features)[:80],
        )
    for feature in features:
        if feature not in FEATURES:
            raise PackageError(
                f"the package needs the feature {feature[:80]!r}, which this version of trainload"
                " does not support",
                where=where,
                expected=f"features among {', '.join(sorted(FEATURES))}",
                got=feature[:80],
                hint="Update trainload.",
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
    if manifest.abstract is not None and weights:
        raise PackageError(
            "a package that says it is abstract has weights",
            where=where,
            got=", ".join(weights[:5]),
        )


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
