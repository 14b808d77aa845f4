"""The command that writes manifests for Kubeflow Trainer: manifest trainjob."""

from __future__ import annotations

from pathlib import Path

import click

from trainload.cli.commands import shared
from trainload.cli.commands.deploy import (
    check_one_storage,
    devices_of,
    label_of,
    launch_options_of,
    make_placer,
    manifest,
    node_options,
    output_option,
    pod_options,
    pods_of,
    queue_of,
    queue_option,
    run_options,
    worker_arguments,
    write_manifests,
)
from trainload.cli.commands.overview import DenseCommand
from trainload.cli.commands.runs import launch
from trainload.cli.commands.shared import Place, Span, json_option


@manifest.command(cls=DenseCommand, short_help="A TrainJob of Kubeflow.")
@click.argument("package", metavar="PKG", type=Place())
@click.argument("options", metavar="[-- LAUNCH OPTIONS]", nargs=-1, type=click.UNPROCESSED)
@click.option("--data", required=True, metavar="PATH", help="Training data, as for launch.")
@click.option("--image", required=True, metavar="IMAGE", help="Image with trainload.")
@node_options
@click.option(
    "--nodes", type=Span(), default="1", metavar="N", help="Nodes; several need a --plan."
)
@run_options
@click.option(
    "--retries",
    type=click.IntRange(min=0),
    default=3,
    metavar="N",
    help="Restarts after failures. Default: 3.",
)
@queue_option
@pod_options
@output_option
@json_option
def trainjob(
    package: str,
    options: tuple[str, ...],
    data: str,
    image: str,
    claim: str | None,
    store: str | None,
    memory: str,
    workers: tuple[int, str],
    nodes: tuple[int, int],
    name: str | None,
    namespace: str | None,
    run_dir: str | None,
    retries: int,
    queue: str | None,
    patches: tuple[Path, ...],
    secrets: tuple[str, ...],
    env: tuple[str, ...],
    service_account: str | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Write a run under torchrun for Kubeflow Trainer. Relative paths start at its storage."""
    from trainload.deploy.kubeflow import torchrun_command, train_job

    check_one_storage(claim, store)
    pods = pods_of(
        claim,
        env,
        name=name or label_of(package),
        image=image,
        nodes=nodes,
        memory=memory,
        namespace=namespace,
        secrets=secrets,
        service_account=service_account,
        **devices_of(workers),
        **queue_of(queue),
    )
    place = make_placer(pods.mount if store is None else store)
    folder = place(run_dir or f"runs/{pods.name}")
    launch_arguments = launch_options_of(options, place)
    planned = "--plan" in launch_arguments
    if nodes[1] > 1 and not planned:
        raise click.UsageError(
            "Under torchrun several nodes need a plan for them: -- --plan PLAN (trainload plan)."
        )
    size = [] if planned else worker_arguments(workers)
    arguments = [place(package), "--data", place(data), *size, *launch_arguments]
    launch.make_context("launch", list(arguments))
    command = torchrun_command(folder, arguments, shared.program_options())
    write_manifests(train_job(pods, command, retries), patches, output, as_json=as_json)
