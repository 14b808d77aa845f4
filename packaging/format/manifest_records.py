"""Records that a manifest contains."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from trainload.capture.job.synthesise import QUANTILES
from trainload.core.records import Record
from trainload.packaging.format.field_types import (
    DistributionName,
    DistributionVersion,
    Fqn,
    Identifier,
    Label,
    MediaType,
    ModuleName,
    Option,
    Quantile,
    SafePath,
    SettingName,
    Sha256,
    Symbolic,
)
from trainload.packaging.format.guard_entries import GuardEntry, InputName, Size


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
        added: parameters that a launch added, such as adapters; only these have values in weights/.
    """

    later: ClassVar[frozenset[str]] = frozenset({"added"})

    reduced_parameters: Size
    reduced_program: Sha256
    structure: Sha256
    check: Literal["usual", "thorough"]
    added: tuple[Fqn, ...] = ()


class WeightSourceEntry(Record):
    """The source of weights of a package that does not have all of them itself.

    Attributes:
        default: the source of a launch that names none: an absolute path, a URL, a release, or
            "init"; None if a launch has to name one. Only an abstract package has a default.
        names: parameter or buffer -> its name in sources, for those with another one there.
    """

    default: Annotated[str, Field(min_length=1, max_length=4096)] | None
    names: dict[Fqn, Annotated[str, Field(min_length=1, max_length=1024)]]


class GivenWeightsEntry(Record):
    """The weights with which the training run of a package began, if they were not its parent's.

    Attributes:
        kind: kind of the source, as in run.json.
        source: its URL, or the name of its file or folder.
        digest: sha256 of the canonical JSON of the records of its files and of its seed.
    """

    kind: Literal["release", "package", "checkpoint", "files", "init"]
    source: Annotated[str, Field(max_length=4096)]
    digest: Sha256


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
        weights: the weights with which the run began; None if they were the parent's.
    """

    later: ClassVar[frozenset[str]] = frozenset({"weights"})

    steps: Size
    data: Sha256
    changed: Annotated[tuple[SettingsEntry, ...], Field(max_length=10_000)]
    weights: GivenWeightsEntry | None = None
