"""The description of a run, run.json: written at the launch, read by every worker and by
`resume`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainload.core.atomic import create_file, replace_file
from trainload.core.canonical_json import canonical_json, parse_canonical
from trainload.core.errors import PackageError, StorageError, first_line
from trainload.core.paths import check_name
from trainload.core.reading import reading
from trainload.core.storage.places import Where
from trainload.core.writable_folder import check_writable_folder
from trainload.launching.checkpoints.retention import Retention
from trainload.launching.run.given_weights import GivenWeights
from trainload.launching.run.run_directory import (
    RUN_FILE,
    missing_folders,
    remove_empty,
    resume_command,
)
from trainload.launching.run.run_place import check_can_be_owned, files_of, place_name, url_of
from trainload.launching.settings.run_settings import MAX_STEPS, RunSettings, SinkName
from trainload.packaging.format.package_files import check_outside_packages
from trainload.packaging.signatures.policy import Policy
from trainload.sharding.plans.plan import Plan

_OTHER_FOLDER_HINT = "; or name another folder"


class Change(BaseModel):
    """Settings that apply from a step on, by their names in `--set`.

    The first change has step 0 and the settings of the launch.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = Field(ge=0)
    settings: dict[str, bool | int | float | str | tuple[str, ...] | None]


class RunSpec(RunSettings):
    """A run: its settings, package, plans and data.

    Paths are absolute. Those that are not URLs are on storage that all nodes share.
    """

    version: int = 1
    package: str
    plan: Plan
    plans: tuple[Plan, ...] = ()
    """Plans of an elastic run, including `plan`, smallest first; () if the run is not elastic."""
    data: str
    run_dir: str
    """The run's folder, or its URL."""
    work_dir: str | None = Field(default=None, exclude=True)
    """Working copy of a run at a URL, on the machine of its driver; None if the run has a
    folder.
    """
    nonce: str = ""
    """Random: two runs that are created at one URL at the same time differ."""
    checkpoints: str | None = None
    optimizer_from: str | None = None
    """Checkpoint of another run from which the initial optimizer state is loaded."""
    steps: int = Field(ge=0, le=MAX_STEPS)
    """Number of updates. 0: the held-out data is evaluated, and nothing is trained."""
    sinks: tuple[SinkName, ...] = ()
    eval_data: str | None = None
    made: dict[Literal["data", "eval_data"], str] = Field(default_factory=dict)
    """Descriptions of the sources of data that was not in a file, and is stored in the run's
    folder.
    """
    output: str | None = None
    changes: tuple[Change, ...] = ()
    """Changes in order; () if nothing was changed since the launch.

    `overrides` and the other settings are those in effect now.
    """
    given: GivenWeights | None = None
    """Weights that the run begins from, in place of the package's."""
    libraries: dict[str, str | None] = Field(default_factory=dict)
    """Custom operators that the package may call: namespace -> the module or file that every worker
    imports for it.
    """
    trust_extensions: bool = False
    """True if every worker loads the operator libraries that the package contains."""
    had_checkpoint: bool = False
    """True if the run has published a checkpoint: it does not start from step 0 if none is
    found.
    """
    versions: dict[str, str] = Field(default_factory=dict)
    """Versions at the launch: python, trainload, torch, ray.

    Empty in runs of releases that did not record it.
    """
    digest: str | None = None
    """Digest of the package; None in runs of releases that did not record it."""
    policies: tuple[Policy, ...] = ()
    """Policies that the driver found.

    Every worker checks the package against them, and against its own machine's.
    """

    @property
    def folder(self) -> Path:
        """The folder with the run's files on the machine of its driver."""
        return Path(self.work_dir or self.run_dir)

    @property
    def place(self) -> Where:
        """Its folder, or its URL."""
        return self.folder if self.work_dir is None else self.run_dir

    @property
    def evaluates(self) -> bool:
        """True if the run has held-out data."""
        return self.eval_data is not None

    @property
    def retention(self) -> Retention:
        """Retention of the run's checkpoints."""
        return Retention(self.keep, self.keep_best, self.keep_every)


def least_plan(spec: RunSpec) -> Plan:
    """Return the plan that needs the fewest ranks."""
    return spec.plans[0] if spec.plans else spec.plan


def made_file(run_dir: Path, name: Literal["data", "eval_data"]) -> Path:
    """Return the path in a run's folder of data that was not in a file."""
    return run_dir / made_path(name)


def made_path(name: Literal["data", "eval_data"]) -> str:
    """Return the path of data that was not in a file, relative to the place of its run."""
    return "data/train.arrow" if name == "data" else "data/eval.arrow"


def check_new_run(run_dir: Path) -> None:
    """Check that a run can be created in a folder, before anything is started.

    Raises:
        StorageError: there is a run already, or the folder or URL cannot be read, created or
            written.
    """
    check_name(run_dir)
    files = files_of(run_dir)
    if files is not None:
        check_can_be_owned(files)
        if files.size(RUN_FILE) is not None:
            raise _run_exists_error(run_dir)
        return
    with reading("it", run_dir / RUN_FILE, _OTHER_FOLDER_HINT):
        exists = (run_dir / RUN_FILE).exists()
    if exists:
        raise _run_exists_error(run_dir)
    check_outside_packages(run_dir)
    check_writable_folder(
        run_dir, "the run's folder cannot be written", "Choose another --run-dir."
    )


def _run_exists_error(run_dir: Path) -> StorageError:
    return StorageError(
        "a run already exists here",
        where=place_name(run_dir),
        hint=f"Continue it with `{resume_command(run_dir)}`, or choose another --run-dir.",
    )


def write_spec(spec: RunSpec) -> None:
    """Create the run's folder and write run.json into it.

    If several processes create a run in the same folder concurrently, exactly one succeeds.

    Raises:
        StorageError: the folder contains a run already, or cannot be written; nothing is left
            behind.
    """
    folder = spec.folder
    check_new_run(folder)
    with reading("it", folder, _OTHER_FOLDER_HINT):
        new_folders = missing_folders(folder)
    content = canonical_json(spec.model_dump(mode="json"))
    files = files_of(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_created = create_file(folder / RUN_FILE, content)
    except OSError as error:
        remove_empty(new_folders)
        raise StorageError(
            f"the run's folder cannot be written: {error.strerror}",
            where=str(folder),
            hint="Choose another --run-dir.",
        ) from error
    if not is_created or (files is not None and not files.create(RUN_FILE, content)):
        raise _run_exists_error(folder)


def replace_spec(spec: RunSpec) -> None:
    """Replace the run.json of a run that nobody drives.

    Raises:
        OSError, StorageError: it cannot be written.
    """
    content = canonical_json(spec.model_dump(mode="json"))
    replace_file(spec.folder / RUN_FILE, content)
    files = files_of(spec.folder)
    if files is not None:
        files.replace(RUN_FILE, content)


def read_spec(run_dir: Path) -> RunSpec:
    """Read the run in a folder, which may have been moved since the launch.

    Raises:
        StorageError: there is no run, or run.json cannot be read.
    """
    path = run_dir / RUN_FILE
    with reading("it", path, _OTHER_FOLDER_HINT):
        content = path.read_bytes() if path.is_file() else None
    if content is None:
        raise StorageError(
            "there is no run here",
            where=place_name(run_dir),
            expected=f"a folder or URL with {RUN_FILE}",
        )
    try:
        spec = RunSpec.model_validate(parse_canonical(content, str(path)))
    except (PackageError, ValidationError) as error:
        raise StorageError(
            "the run's description cannot be read",
            where=str(path),
            expected="a description in the format of this version of trainload",
            got=first_line(error),
            hint="Resume with the version of trainload that launched the run.",
        ) from error
    return at_place(spec, run_dir.absolute())


def at_place(spec: RunSpec, folder: Path) -> RunSpec:
    """Return a run as it is in a folder, or at the URL of which the folder is a working copy."""
    url = url_of(folder)
    place = url or str(folder)
    own: dict[str, str] = {name: f"{place}/{made_path(name)}" for name in spec.made}
    work_dir = None if url is None else str(folder)
    return spec.model_copy(update={"run_dir": place, "work_dir": work_dir, **own})
