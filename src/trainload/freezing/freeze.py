"""Freeze a job: capture it, prove it equal to eager mode, and write it as a package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from trainload.capture.job.ambient import neutrally, one_at_a_time, warned_of_autocast
from trainload.capture.job.declared_sizes import declared_shapes, spelled
from trainload.capture.job.definition import Job, check_job
from trainload.capture.job.inputs import constants_of, leaves_of
from trainload.capture.job.leading_rows import arranged
from trainload.capture.parity.replays import Check
from trainload.capture.program import Program
from trainload.capture.shapes.shape_fixes import AppliedFix, with_suggested_fixes
from trainload.core.arguments import check_arguments
from trainload.core.errors import JobError
from trainload.core.paths import check_name
from trainload.core.storage.places import path_here
from trainload.freezing.abstract import freeze_abstract, no_reduced_job
from trainload.freezing.bundle import Bundler, given_wheel
from trainload.freezing.initial_values import proven_values
from trainload.freezing.named_source import names_in_sources, weight_source
from trainload.freezing.prove import keep_steps, prove
from trainload.freezing.recorded_job import RecordedJob, recorded_job
from trainload.launching.node.libraries import import_libraries
from trainload.packaging.format.assets import asset_sources
from trainload.packaging.format.package_files import check_new_folder
from trainload.packaging.libraries.op_libraries import Libraries
from trainload.packaging.package import Package
from trainload.packaging.weight_sources.weight_source import source_of_weights
from trainload.packaging.write import write_package


@warned_of_autocast
@one_at_a_time
@check_arguments(JobError)
def freeze(
    job: Job | Callable[[], Job] | RecordedJob,
    path: str | Path,
    *,
    check: Check | Literal["usual", "thorough"] = Check.USUAL,
    strict: bool | None = None,
    apply_suggested_fixes: bool = False,
    on_fix: Callable[[AppliedFix], None] | None = None,
    abstract: bool = False,
    reduced: Job | Callable[[], Job] | RecordedJob | None = None,
    libraries: Libraries = MappingProxyType({}),
    bundle_ops: bool | Sequence[str | Path] = False,
    weights_from: str | Path | None = None,
) -> Package:
    """Capture a job, prove its graphs equal to eager mode, and write the package.

    The joint forward and backward graph for the CPU is derived, proven and stored too; other
    devices derive theirs when the package is first compiled there.

    Args:
        job: model, loss, optimizer, schedule and an example batch; or a function that returns them.
            A function is called while the first values of the model that it constructs are
            recorded, for runs with `weights_from="init"`. With `abstract`, large tensors that it
            constructs have no values and take no memory.
        path: the package to write, a folder that does not exist.
        check: "usual" compares with eager mode on the example batch and on one with another number
            of rows; "thorough" on six further batches, with sizes drawn from those that the graph
            accepts and other seeds.
        strict: torch.export's mode. None: non-strict, or strict for a graph that the non-strict
            mode does not support, if strict mode loses nothing; True: only strict, which rejects
            whatever it would lose; False: only non-strict. debug/capture.json records the mode of
            each graph and the reason.
        apply_suggested_fixes: if True and torch rejects the sizes that `Job.dynamic` declares,
            declare those that it suggests instead. debug/batch.json records the changes.
        on_fix: called with each change.
        abstract: True if the model has no values: it is frozen without weights. See
            docs/guides/abstract.md.
        reduced: for an abstract package, a job of the same code with smaller sizes, or a function
            that returns it; it is compared with eager mode instead.
        libraries: namespace of custom operators that the job calls -> module or Python file that
            registers them, which is imported and recorded; the others are detected. See
            docs/reference/operators.md.
        bundle_ops: True bundles these libraries into the package, as wheels built from installed
            files; a sequence of wheels bundles these instead. False or an empty sequence bundles
            nothing.
        weights_from: for an abstract package, the weights of launches that name no others, in the
            forms that `launch` accepts. They are not read now. Default: a launch has to name some.

    Raises:
        JobError: the job's description is inconsistent.
        CaptureError: the model cannot be captured soundly.
        PackageError: a library cannot be imported, or cannot be bundled so that it loads in
            isolation; an asset's name or media type is invalid.
        StorageError: the path is taken or cannot be written, or a wheel or an asset is missing.

    Example:
        optimizer = lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4)
        job = trainload.Job(model=model, batch=batch, optimizer=optimizer)
        package = trainload.freeze(job, "gpt.tl")
    """
    path, check = path_here(path), Check(check)
    check_name(path)
    check_new_folder(path)
    if abstract and reduced is None:
        raise no_reduced_job()
    recorded, small = (
        each if each is None or isinstance(each, RecordedJob) else recorded_job(each, values=values)
        for each, values in ((job, not abstract), (reduced, True))
    )
    assert recorded is not None
    return _freeze(
        recorded,
        path,
        check,
        strict,
        apply_suggested_fixes,
        on_fix,
        abstract,
        small,
        libraries,
        bundle_ops,
        _default_source(weights_from, abstract=abstract),
    )


@neutrally
def _freeze(
    recorded: RecordedJob,
    path: Path,
    check: Check,
    strict: bool | None,
    apply_suggested_fixes: bool,
    on_fix: Callable[[AppliedFix], None] | None,
    abstract: bool,
    reduced: RecordedJob | None,
    libraries: Libraries,
    bundle_ops: bool | Sequence[str | Path],
    weights_from: str | None,
) -> Package:
    """Freeze a job that was constructed; see `freeze`."""
    job = recorded.job
    check_job(job)
    asset_sources(job.assets)  # check them before the long part of the work
    if abstract and strict is not None:
        raise JobError(
            "an abstract package is always captured in the non-strict mode",
            where="freeze",
            got=f"strict={strict}",
            hint="Omit strict (--strict, --no-strict).",
        )
    import_libraries(libraries)
    if abstract or reduced is not None:
        if not abstract or apply_suggested_fixes:
            raise JobError(
                "reduced requires abstract, and apply_suggested_fixes cannot be combined with it",
                where="freeze",
                hint="See docs/guides/abstract.md.",
            )
        return freeze_abstract(
            recorded,
            path,
            reduced,
            check,
            libraries,
            bundle=_bundler(bundle_ops, libraries),
            weights_from=weights_from,
        )
    names = names_in_sources(job)
    job = arranged(job)
    bundle = _bundler(bundle_ops, libraries)
    declared, fixes = with_suggested_fixes(job) if apply_suggested_fixes else (job, ())
    for fix in fixes:
        if on_fix is not None:
            on_fix(fix)
    proven = prove(declared, check, strict)
    debug = {
        "batch": _batch_record(declared, fixes),
        "capture": {"check": check.value, "tracing": _tracing_record(proven.program)},
    }
    package = write_package(
        path,
        proven.program,
        proven.updates,
        proven.recipe,
        assets=job.assets,
        initialization=proven_values(recorded),
        weight_source=weight_source(names, proven.program, None),
        debug=debug,
        libraries=libraries,
        bundle=bundle,
    )
    keep_steps(package, proven.training_steps())
    return package


def _bundler(bundle_ops: bool | Sequence[str | Path], libraries: Libraries) -> Bundler | None:
    """Return what writes operator libraries into the package; None if nothing does."""
    if not bundle_ops:
        return None
    given = () if isinstance(bundle_ops, bool) else bundle_ops
    return Bundler(tuple(given_wheel(Path(wheel)) for wheel in given), libraries)


def _default_source(source: str | Path | None, *, abstract: bool) -> str | None:
    """Return the source of weights that a package names, which other machines can find."""
    if source is not None and not abstract:
        raise JobError(
            "a package with weights needs no source of them",
            where="weights_from",
            got=str(source),
            hint="Name it at the launch, or freeze without values (abstract=True).",
        )
    return source_of_weights(source)


def _tracing_record(program: Program) -> dict[str, dict[str, str]]:
    """Return graph -> how it was captured, for debug/capture.json."""
    graphs = program.graphs.items()
    return {
        name: {"mode": graph.tracing.mode, "why": graph.tracing.why}
        for name, graph in graphs
        if graph.tracing is not None
    }


def _batch_record(job: Job, fixes: Sequence[AppliedFix]) -> dict[str, object]:
    """Return the document of debug/batch.json."""
    leaves = {
        name: leaf
        for batch in (*job.variants.values(), job.batch)
        for name, leaf in leaves_of(batch).items()
    }
    shapes = declared_shapes(
        {name: dims for name, dims in job.dynamic.items() if name in leaves}, leaves
    )
    return {
        "constants": {
            name: value if value is None else str(value)
            for name, value in constants_of(job.batch).items()
        },
        "dynamic": {
            name: {str(dim): spelled(spec) for dim, spec in dims.items()}
            for name, dims in shapes.items()
        },
        "fixes": [{**asdict(fix), "dims": list(fix.dims)} for fix in fixes],
    }
