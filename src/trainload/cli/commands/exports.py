"""The command that takes a model out of a package: export."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Literal, cast

import click

from trainload.cli.commands import shared
from trainload.cli.commands.shared import (
    LocalPath,
    OneOf,
    Place,
    json_option,
    located,
    out,
    print_json,
)
from trainload.cli.view import tables as view
from trainload.core.storage.places import is_url, local_path

_SUFFIXES = {
    "pt2": ".pt2",
    "aoti": ".aoti.pt2",
    "onnx": ".onnx",
    "huggingface": "-huggingface",
    "safetensors": ".safetensors",
    "dcp": "-dcp",
    "peft": "-peft",
}


def _run_of(source: str) -> tuple[str | None, int | None]:
    """Return the run that an argument names, and the step; None for a package."""
    from trainload.launching.run.run_directory import has_run

    place, at, step = source.rpartition("@")
    if at and step.isdecimal() and has_run(place):
        return place, int(step)
    return (source, None) if has_run(source) else (None, None)


@click.command(short_help="Export a model.")
@click.argument("source", metavar="PKG|RUN[@STEP]", type=Place())
@click.option("--to", required=True, type=OneOf(list(_SUFFIXES)), help="Format to write.")
@click.option(
    "-o",
    "--output",
    type=LocalPath(),
    metavar="PATH",
    help="Output path. Default: beside PKG.",
)
@click.option("--graph", metavar="NAME", help="Graph to export. Default: predict.")
@click.option("--variant", metavar="NAME", help="Variant of the graph. Default: the first.")
@click.option("--device", type=OneOf(["cpu", "cuda"]), help="Device of the graph. Default: cpu.")
@click.option(
    "--part", metavar="MODULE", help="Module whose weights are exported, without a graph."
)
@click.option("--check/--no-check", default=True, help="Load the result and compare it with PKG.")
@json_option
def export(
    source: str,
    to: str,
    output: Path | None,
    graph: str | None,
    variant: str | None,
    device: str | None,
    part: str | None,
    check: bool,
    as_json: bool,
) -> None:
    """Write the model of a package or a run's checkpoint for use without trainload.

    pt2: for torch.export.load. aoti: compiled, for torch's loader of AOTInductor packages.
    huggingface: a folder of safetensors, with config.json and tokenizer if the package has them.
    safetensors: one file. dcp: for torch.distributed.checkpoint. peft: the adapters of a run.
    """
    run, step = _run_of(source)
    package: Any = run
    if run is None:
        stored, folder = located(source)
        if stored is not None and output is None:
            raise click.UsageError(f"{source} is in a store: pass --output.")
        package = shared.open_package(folder)
    elif is_url(run) and output is None:
        raise click.UsageError(f"{source} is a URL: pass --output.")
    else:
        folder = local_path(run)
    from trainload.exporting.export_graphs import Kind
    from trainload.exporting.export_graphs import export as write

    path = (
        output
        if output is not None
        else folder.with_name(folder.name.removesuffix(".tl") + _SUFFIXES[to])
    )
    # compilers print
    with redirect_stdout(sys.stderr), shared.working("exporting"):
        exported = write(
            package,
            path,
            to=cast(Kind, to),
            graph=graph,
            variant=variant,
            device=cast(Literal["cpu", "cuda"] | None, device),
            part=part,
            step=step,
            check=check,
        )
    if as_json:
        print_json(exported)
        return
    rows: list[tuple[str, Any]] = [
        ("written", str(exported.path)),
        ("files", exported.files),
        ("bytes", exported.bytes),
    ]
    if exported.graph:
        rows += [
            ("graph", f"{exported.graph}, for {exported.device}"),
            (
                "takes",
                ("one dict: " if exported.to == "pt2" else "keywords: ")
                + ", ".join(f"{name} {kind}" for name, kind in exported.inputs.items()),
            ),
            ("returns", f"a tuple: {', '.join(exported.outputs)}"),
            (
                "difference",
                (
                    "not compared"
                    if exported.difference is None
                    else f"{exported.difference:.2g} from the package's own graph"
                ),
            ),
        ]
    if exported.lowered:
        rows.append(("traced away", ", ".join(exported.lowered)))
    for namespace, distribution in exported.libraries.items():
        rows.append(
            (
                "needs",
                (
                    f"the operators of {namespace}, from {distribution or 'a library of yours'}:"
                    " import it before opening"
                ),
            )
        )
    out().print(view.table(rows))
