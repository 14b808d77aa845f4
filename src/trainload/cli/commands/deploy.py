"""Commands that write manifests for clusters: manifest kuberay."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

import click

from trainload.cli.commands import shared
from trainload.cli.commands.driving import drive, evict
from trainload.cli.commands.overview import DenseCommand
from trainload.cli.commands.planning import KINDS
from trainload.cli.commands.runs import launch
from trainload.cli.commands.shared import (
    Command,
    CountOf,
    LocalPath,
    OneOf,
    Place,
    Span,
    json_option,
    write_text,
)
from trainload.core.storage.places import is_url
from trainload.launching.settings.parse import parse_settings

if TYPE_CHECKING:
    from trainload.deploy.kuberay import Pods

_OWN_OPTIONS = {
    "run_dir": "--run-dir",
    "nodes": "--nodes",
    "workers": "--workers",
    "data": "--data",
}
"""Options of `launch` that this command has itself."""
_UNAVAILABLE = {"address", "backend", "detach", "dry_run", "as_json"}
"""Options of `launch` that a job of a cluster cannot use."""
_PATHS = {"package", "data", "eval_data", "output", "plan_file"}


def pod_options(command: Command) -> Command:
    """Add the options of the pods of all manifests."""
    for option in (
        click.option(
            "--patch",
            "patches",
            type=LocalPath(),
            multiple=True,
            metavar="FILE",
            help="Strategic merge or JSON patch; may be repeated.",
        ),
        click.option(
            "--service-account", metavar="NAME", help="Service account. Default: the namespace's."
        ),
        click.option(
            "--env",
            multiple=True,
            metavar="KEY=VALUE",
            help="Environment variable; not for secrets.",
        ),
        click.option(
            "--secret",
            "secrets",
            multiple=True,
            metavar="NAME",
            help="Secret to load as environment variables.",
        ),
        click.option("--namespace", help="Namespace. Default: kubectl's."),
    ):
        command = option(command)
    return command


class Devices(click.ParamType[tuple[int, str]]):
    """N, N/cuda or N/RESOURCE: the number of devices, and their resource; "" for CPUs."""

    name = "devices"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, str]:
        """Parse the value of the option."""
        if isinstance(value, tuple):
            return value
        from trainload.deploy.kuberay import NVIDIA

        _, slash, resource = str(value).partition("/")
        if "/" not in resource:
            count, kind = CountOf(KINDS).convert(value, param, ctx)
            return count, NVIDIA if kind == "cuda" else ""
        count, _ = CountOf(KINDS).convert(str(value).removesuffix(slash + resource), param, ctx)
        return count, resource


def node_options(command: Command) -> Command:
    """Add the options of the storage and the nodes of a run."""
    for option in (
        click.option(
            "--workers",
            type=Devices(),
            default="1",
            metavar="N[/cuda]",
            help="Devices per node, or N/amd.com/gpu. Default: 1.",
        ),
        click.option(
            "--memory", required=True, metavar="SIZE", help="Memory of each node, such as 64Gi."
        ),
        click.option("--store", metavar="URL", help="A URL in place of the claim."),
        click.option(
            "--claim", metavar="NAME[:PATH]", help="Volume claim for runs, packages and data."
        ),
    ):
        command = option(command)
    return command


def run_options(command: Command) -> Command:
    """Add the options that name a run's resource and folder."""
    run_dir = click.option(
        "--run-dir", metavar="DIR", help="Folder of the run. Default: runs/NAME."
    )
    name = click.option("--name", help="Resource name. Default: the package's.")
    return name(run_dir(command))


queue_option = click.option(
    "--queue", metavar="NAME[:CLASS]", help="LocalQueue of Kueue, and a workload's priority."
)
output_option = click.option(
    "-o", "--output", type=LocalPath(), metavar="FILE", help="Output file. Default: stdout."
)


@click.group(short_help="Make Kubernetes files.")
def manifest() -> None:
    """Write manifests that run something on a cluster."""


manifest.add_command(drive)
manifest.add_command(evict)


@manifest.command(cls=DenseCommand, short_help="A RayJob or RayCluster.")
@click.argument("package", metavar="[PKG]", type=Place(), required=False)
@click.argument("options", metavar="[-- LAUNCH OPTIONS]", nargs=-1, type=click.UNPROCESSED)
@click.option("--data", metavar="PATH", help="Training data, as for launch.")
@click.option("--image", required=True, metavar="IMAGE", help="Image with trainload and Ray.")
@node_options
@click.option(
    "--nodes",
    type=Span(),
    default="1",
    metavar="N or A:B",
    help="Nodes, or an elastic range. Default: 1.",
)
@click.option(
    "--kind",
    type=OneOf(["RayJob", "RayCluster"]),
    default="RayJob",
    help="Kind of resource. Default: RayJob.",
)
@run_options
@click.option(
    "--retries",
    type=click.IntRange(min=0),
    default=3,
    metavar="N",
    help="New clusters after failures. Default: 3.",
)
@queue_option
@pod_options
@output_option
@json_option
def kuberay(
    package: str | None,
    options: tuple[str, ...],
    data: str | None,
    image: str,
    claim: str | None,
    store: str | None,
    memory: str,
    workers: tuple[int, str],
    nodes: tuple[int, int],
    kind: Literal["RayJob", "RayCluster"],
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
    """Write a run or a cluster for KubeRay. Relative paths start at its storage."""
    from trainload.deploy.kuberay import entrypoint, ray_cluster, ray_job

    if kind == "RayCluster" and (
        package is not None or data is not None or run_dir is not None or options
    ):
        raise click.UsageError(
            "--kind RayCluster does not start a run: omit the package, --data, --run-dir and launch"
            " options."
        )
    check_one_storage(claim, store)
    if kind == "RayJob" and (package is None or data is None):
        raise click.UsageError("--kind RayJob needs a package and --data.")
    pods = pods_of(
        claim,
        env,
        name=name or (label_of(package) if package is not None else "trainload"),
        image=image,
        nodes=nodes,
        memory=memory,
        namespace=namespace,
        secrets=secrets,
        service_account=service_account,
        **devices_of(workers),
        **queue_of(queue),
    )
    if package is None or data is None:
        document = ray_cluster(pods)
    else:
        place = make_placer(pods.mount if store is None else store)
        folder = place(run_dir or f"runs/{pods.name}")
        launch_arguments = launch_options_of(options, place)
        arguments = [
            place(package),
            "--data",
            place(data),
            *_size_options(pods.nodes, workers, planned="--plan" in launch_arguments),
            *launch_arguments,
        ]
        launch.make_context("launch", list(arguments))
        document = ray_job(
            pods, folder, entrypoint(folder, arguments, shared.program_options()), retries
        )
    write_manifests([document], patches, output, as_json=as_json)


def write_manifests(
    documents: Sequence[dict[str, Any]],
    patches: Sequence[Path],
    output: Path | None,
    *,
    as_json: bool,
) -> None:
    """Apply patches to manifests, and write them to a file or stdout.

    As JSON, several manifests are a List of Kubernetes.
    """
    from trainload.deploy.kuberay import as_yaml

    documents = _patched(documents, patches)
    if as_json:
        several = {"apiVersion": "v1", "kind": "List", "items": list(documents)}
        document = documents[0] if len(documents) == 1 else several
        text = json.dumps(document, indent=2) + "\n"
    else:
        text = as_yaml(*documents)
    if output is None:
        click.echo(text, nl=False)
    else:
        write_text(output, text)


def _patched(
    documents: Sequence[dict[str, Any]], paths: Sequence[Path]
) -> Sequence[dict[str, Any]]:
    if not paths:
        return documents
    from trainload.deploy.patches import patched, read_patches

    return patched(documents, [patch for path in paths for patch in read_patches(path)])


def check_one_storage(claim: str | None, store: str | None) -> None:
    """Raise UsageError unless exactly one of --claim and --store was passed."""
    if (claim is None) == (store is None):
        raise click.UsageError("Pass either --claim or --store, where all nodes find their files.")


def devices_of(workers: tuple[int, str]) -> dict[str, Any]:
    """Return the fields of `Pods` for --workers."""
    count, resource = workers
    gpus = {"gpu_resource": resource} if resource else {}
    return {"devices": count, "gpu": bool(resource), **gpus}


def queue_of(queue: str | None) -> dict[str, str | None]:
    """Return the fields of `Pods` for --queue."""
    if queue is None:
        return {}
    name, colon, priority = queue.partition(":")
    return {"queue": name, "priority": priority if colon else None}


def label_of(package: str) -> str:
    """Return the name of a package as a Kubernetes object name."""
    return re.sub(r"[^a-z0-9]+", "-", PurePosixPath(package).stem.lower()).strip("-")


def pods_of(claim: str | None, env: Sequence[str], **others: Any) -> Pods:
    """Return pods with the volume and variables of a command; `others` are fields of `Pods`."""
    from trainload.deploy.kuberay import Pods

    if claim is None:
        return Pods(claim=None, env=_parse_variables(env), **others)
    volume, _, mount = claim.partition(":")
    return Pods(claim=volume, mount=mount or "/trainload", env=_parse_variables(env), **others)


def _parse_variables(texts: Sequence[str]) -> dict[str, str]:
    """Parse --env."""
    variables = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.UsageError("--env: expected KEY=VALUE.")
        variables[name] = value
    return variables


def make_placer(mount: str) -> Callable[[str], str]:
    """Return a path as the pods see it, in a volume or below a URL. URLs and references stay as
    they are.
    """
    from trainload.core.credentials import check_no_credentials

    check_no_credentials(mount)

    def place(path: str) -> str:
        check_no_credentials(path)
        if "://" in path or path.startswith(("${", "python:")):
            return path
        if not is_url(mount):
            return str(PurePosixPath(mount, path))
        return path if path.startswith("/") else f"{mount.rstrip('/')}/{path}"

    return place


def launch_options_of(arguments: Sequence[str], place: Callable[[str], str]) -> list[str]:
    """Return the options of `launch`, parsed by its own parser, with paths as the pods see them."""
    values, extra, order = launch.make_parser(click.Context(launch, info_name="launch")).parse_args(
        ["PKG", *arguments]
    )
    if extra:
        raise click.UsageError(
            f"{shlex.join(extra)} is not an option of launch. Pass launch options as in: -- --steps"
            " 1000 --set lr=3e-4."
        )
    options: list[str] = []
    for option in dict.fromkeys(order):
        if not isinstance(option, click.Option) or option.name is None:
            continue
        if option.name in _OWN_OPTIONS:
            raise click.UsageError(
                f"{_OWN_OPTIONS[option.name]} is an option of this command: pass it before the --."
            )
        if option.name in _UNAVAILABLE:
            raise click.UsageError(f"{option.opts[0]} cannot be used in a cluster's job: omit it.")
        value: Any = values[option.name]
        if option.is_flag:
            options.append(option.opts[0])
            continue
        for each in value if isinstance(value, list | tuple) else (value,):
            options += [option.opts[0], place(each) if option.name in _PATHS else each]
    parse_settings([each for option, each in pairwise(options) if option == "--set"])
    return options


def worker_arguments(workers: tuple[int, str]) -> list[str]:
    """Return --workers of the launch, which calls GPUs of every vendor cuda, as torch does."""
    count, resource = workers
    return ["--workers", f"{count}/cuda" if resource else str(count)]


def _size_options(nodes: tuple[int, int], workers: tuple[int, str], *, planned: bool) -> list[str]:
    """Return --nodes and --workers of the launch, or those of its plan."""
    least, most = nodes
    options = [] if planned else worker_arguments(workers)
    if most > 1 and not (planned and least == most):
        options += ["--nodes", str(most) if least == most else f"{least}:{most}"]
    return options
