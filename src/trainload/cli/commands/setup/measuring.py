"""The command that measures this machine for the planner."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainload.cli.commands.planning import KINDS
from trainload.cli.commands.shared import (
    LocalPath,
    OneOf,
    err,
    json_option,
    out,
    positive,
    print_json,
    write_text,
)
from trainload.cli.view import tables as view
from trainload.core.errors import StorageError
from trainload.core.processes import interrupted_by_signals

if TYPE_CHECKING:
    from trainload.sharding.plans.plan import DeviceKind


@click.command(short_help="Measure this machine.")
@click.option(
    "-o",
    "--output",
    type=LocalPath(),
    required=True,
    metavar="FILE",
    help="Profile to write, for `plan --device FILE`.",
)
@click.option(
    "--device",
    type=OneOf(KINDS),
    default="cpu",
    show_default=True,
    help="Kind of the devices to measure.",
)
@click.option(
    "--workers",
    type=positive,
    metavar="N",
    default=2,
    show_default=True,
    help="Number of processes that measure links.",
)
@click.option("--name", metavar="NAME", help="Name of the device. Default: FILE's.")
@json_option
def measure(
    output: Path, device: DeviceKind, workers: int, name: str | None, as_json: bool
) -> None:
    """Measure the speed of this machine's devices and links, and write a profile for `trainload
    plan --device FILE`.

    Takes a minute; nothing else should run at the same time.
    """
    if output.exists():
        raise StorageError(
            "it exists already", where=str(output), hint="Choose another path, or remove it."
        )
    from trainload.launching.node.measure import measure as measure_device

    with interrupted_by_signals():
        measured = measure_device(
            device,
            name or output.stem,
            workers,
            lambda subject: err().print(f"measuring {subject}", highlight=False),
        )
    write_text(output, measured.model_dump_json(indent=2) + "\n")
    if as_json:
        print_json(measured)
        return
    link = measured.node
    rates = ", ".join(f"{dtype} {rate / 1e9:.4g}" for dtype, rate in measured.flops.items())
    out().print(
        view.table(
            [
                ("products", f"{rates} GFLOP/s; attention {measured.attention:.0%} of it"),
                (
                    "memory",
                    (
                        f"{measured.memory_bytes / 2**30:.1f} GiB,"
                        f" {measured.memory_bytes_per_second / 1e9:.4g} GB/s"
                    ),
                ),
                ("kernel", f"{measured.kernel_seconds * 1e6:.3g} us"),
                ("links", f"{link.bytes_per_second / 1e9:.4g} GB/s, {link.seconds * 1e6:.3g} us"),
                ("figures", str(output)),
            ]
        )
    )
