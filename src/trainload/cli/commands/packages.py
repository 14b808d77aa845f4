"""Commands for the bytes of a package: inspect, verify, sign, fill."""

from __future__ import annotations

import base64
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainload.cli.commands import shared
from trainload.cli.commands.shared import (
    FAILED,
    LocalPath,
    Place,
    any_package_argument,
    err,
    json_option,
    located,
    new_package_option,
    out,
    package_argument,
    print_json,
)
from trainload.cli.view import tables as view
from trainload.core.errors import PackageError, PolicyError
from trainload.core.formatting import size
from trainload.core.versions import check_supported_torch

if TYPE_CHECKING:
    from trainload.autograd_trace.graphs import GraphRecipe, TurnRecipe
    from trainload.packaging.format.field_types import Option
    from trainload.packaging.format.manifest import Manifest
    from trainload.packaging.format.manifest_records import OpLibraryEntry, WeightSourceEntry
    from trainload.packaging.package import Package


_pem = LocalPath()


@click.command(short_help="Show what it contains.")
@any_package_argument
@click.option("--asset", metavar="NAME", help="Name of an asset to write out instead.")
@click.option(
    "-o",
    "--output",
    type=LocalPath(),
    metavar="PATH",
    help="Path for --asset. Default: stdout.",
)
@json_option
def inspect(package: str, asset: str | None, output: Path | None, as_json: bool) -> None:
    """Show the contents of a package: inputs, parameters, graphs, recipe and assets.

    --asset NAME writes out one asset instead, checked against its digest.
    """
    if output is not None and asset is None:
        raise click.UsageError("-o is the path of an asset: pass --asset NAME.")
    _, folder = located(package)
    opened = _open_to_look(folder)
    manifest = opened.manifest
    if asset is not None:
        _write_asset(opened, asset, output, as_json)
        return
    if as_json:
        details = {
            "assets": opened.assets,
            "captured": _tracing_modes(folder),
            "signatures": _signatures(folder),
        }
        print_json({"path": folder, "digest": opened.digest, "manifest": manifest, **details})
        return
    rows = _summary(folder, opened.digest, manifest)
    rows += [
        ("asset", f"{a.name}  {a.media_type}, {size(a.size)}" + (f", {a.role}" if a.role else ""))
        for a in opened.assets
    ]
    for signature in _signatures(folder):
        status = (
            signature.get("problem") or f"{signature['kind']} {signature['signer']} (not verified)"
        )
        rows.append(("signature", f"{signature['file']}: {status}"))
    by_reason: dict[str, list[str]] = {}
    for name, (mode, why) in _tracing_modes(folder).items():
        by_reason.setdefault(f"{mode}: {why}", []).append(name)
    out().print(
        view.table(
            [
                *rows,
                *(("captured", f"{', '.join(names)}: {how}") for how, names in by_reason.items()),
            ]
        )
    )


def _open_to_look(folder: Path) -> Package:
    """Return the package without its graphs, so that its operators need neither be installed nor
    trusted; with them if libraries are named.
    """
    from trainload.packaging.package import open_to_look

    if shared.libraries() or shared.trusts_extensions():
        return shared.open_package(folder)
    if not folder.exists():
        raise PackageError("there is no such package", where=str(folder))
    return open_to_look(folder)


def _write_asset(package: Package, name: str, output: Path | None, as_json: bool) -> None:
    """Write assets to a path, or a single one to stdout."""
    if output is not None:
        saved = package.save_asset(name, output)
        if as_json:
            print_json({"written": output, "assets": saved})
        else:
            out().print(
                view.table(
                    [
                        ("written", str(output)),
                        ("files", len(saved)),
                        ("bytes", sum(a.size for a in saved)),
                    ]
                )
            )
        return
    data = package.asset(name)
    if not as_json:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
        return
    entry = next(a for a in package.assets if a.name == name)
    try:
        contents = {"text": data.decode("utf-8")}
    except UnicodeDecodeError:
        contents = {"base64": base64.b64encode(data).decode("ascii")}
    print_json({"asset": entry, **contents})


@click.command(short_help="Check every byte.")
@package_argument
@click.option(
    "--identity",
    "identities",
    multiple=True,
    type=LocalPath(),
    metavar="FILE",
    help="Public key or certificates of a signer.",
)
@json_option
def verify(package: Path, identities: tuple[Path, ...], as_json: bool) -> None:
    """Check every byte of a package against its manifest, and its graphs.

    FILE is a public key, or the certificates of an issuer, in PEM; all of them must have signed the
    package. With the program's --policy option, the policies must allow the package to run.

    Exits with 1 if the package is damaged, unsafe or lacks a signature, and names each file.
    """
    if not package.exists():
        raise PackageError("there is no such package", where=str(package))
    check_supported_torch()
    from trainload.packaging.signatures.verify import Problem
    from trainload.publishing import trust

    with shared.working("verifying"):
        report = trust.verify(package, identities)
    if not report.problems and (policy_file := shared.policy()) is not None:
        from trainload.packaging.signatures.policy import check_policies, find_policies

        try:
            check_policies(package, find_policies(policy_file))
        except PolicyError as error:
            report = replace(report, problems=(Problem("", str(error)),))
    if as_json:
        print_json(report)
    elif not report.problems:
        sound = (
            f"{package}: {report.files} files, {size(report.bytes)}: every byte matches the"
            " manifest"
        )
        out().print(sound, markup=False, highlight=False, soft_wrap=True)
    else:
        for problem in report.problems:
            err().print(
                f"{package / problem.file}: {problem.problem}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
    if not as_json:
        for state in report.signatures:
            who = (
                "not verified: pass --identity"
                if state.identity is None
                else f"verified: {state.identity}"
            )
            text = f"{package / state.file}: signed by {state.kind} {state.signer} ({who})"
            out().print(text, markup=False, highlight=False, soft_wrap=True)
    if report.problems:
        raise click.exceptions.Exit(FAILED)


@click.command(short_help="Sign a package.")
@package_argument
@click.option("--key", type=_pem, required=True, metavar="FILE", help="Private key, in PEM.")
@click.option("--name", metavar="NAME", help="Name of the signature. Default: fingerprint.")
@click.option("--certificate", type=_pem, metavar="FILE", help="Certificate of the key, in PEM.")
@click.option(
    "--chain", type=_pem, multiple=True, metavar="FILE", help="Intermediate certificates, in PEM."
)
@json_option
def sign(
    package: Path,
    key: Path,
    name: str | None,
    certificate: Path | None,
    chain: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Sign a package, or a folder that `trainload build` wrote: write signatures/NAME.sig into it.

    The digest and other signatures do not change. The password of an encrypted key is read from
    $TRAINLOAD_KEY_PASSWORD or from the terminal. Keys must be elliptic curve keys: openssl ecparam
    -name prime256v1 -genkey -noout -out key.pem
    """
    if chain and certificate is None:
        raise click.UsageError("--chain requires --certificate.")
    if not package.exists():
        raise PackageError("there is no such package", where=str(package))
    check_supported_torch()
    from trainload.publishing import trust

    signature = trust.sign(
        package, key, name=name, password=password_of(key), certificate=certificate, chain=chain
    )
    if as_json:
        print_json(
            {
                "package": package,
                "file": signature.file,
                "kind": signature.kind,
                "signer": signature.signer,
                "signed": len(signature.files),
            }
        )
        return
    rows = [
        ("signature", str(package / signature.file)),
        (signature.kind, signature.signer),
        ("signed", f"{len(signature.files)} files"),
    ]
    out().print(view.table(rows))


def password_of(key: Path) -> bytes | None:
    """Return the password of an encrypted key, from the environment or a terminal; None if there is
    none, or none is needed.
    """
    from trainload.packaging.signatures.keys import PASSWORD, is_encrypted

    password = os.environ.get(PASSWORD)
    if not password and sys.stdin.isatty() and is_encrypted(key):
        password = str(click.prompt(f"password of {key}", hide_input=True, err=True))
    return password.encode() if password else None


def _signatures(path: Path) -> list[dict[str, str]]:
    """Return the claims of the files in signatures/, none of which is verified."""
    from trainload.packaging.signatures.signature_file import read_signature, signature_paths

    claims: list[dict[str, str]] = []
    for file in signature_paths(path):
        try:
            signature = read_signature(path, file)
        except PackageError as error:
            claims.append({"file": file, "problem": error.problem})
        else:
            claims.append({"file": file, "kind": signature.kind, "signer": signature.signer})
    return claims


def _tracing_modes(path: Path) -> dict[str, tuple[str, str]]:
    """Return graph -> torch.export's mode and the reason for it, according to debug/; empty if it
    has no such entries.
    """
    from trainload.packaging.format.debug import read_debug

    document = read_debug(path, "capture")
    tracing = document.get("tracing") if isinstance(document, dict) else None
    return {
        str(name): (str(how.get("mode", "")), str(how.get("why", "")))
        for name, how in (tracing.items() if isinstance(tracing, dict) else ())
        if isinstance(how, dict)
    }


def _summary(path: Path, digest: str, manifest: Manifest) -> list[tuple[str, Any]]:
    tensors = [p for p in manifest.parameters if p.alias_of is None]
    aliases = len(manifest.parameters) - len(tensors)
    count = sum(math.prod(p.shape) for p in tensors)
    frozen = sum(math.prod(p.shape) for p in tensors if not p.trainable)
    recipe = manifest.recipe
    inputs = manifest.data_inputs().values()
    rows: list[tuple[str, Any]] = [
        ("package", str(path)),
        ("digest", digest),
        (
            "parameters",
            f"{count:,} in {len(tensors)} tensors" + (f", {aliases} tied" if aliases else ""),
        ),
        *(
            []
            if manifest.variants
            else [
                (
                    "inputs",
                    ", ".join(
                        f"{i.name} {i.dtype}[{', '.join(map(str, i.shape))}]" for i in inputs
                    ),
                )
            ]
        ),
        ("graphs", ", ".join(manifest.graphs)),
        ("optimizer", f"{recipe.optimizer}, {len(recipe.groups)} groups"),
        (
            "run",
            (
                f"{recipe.steps} {'rounds' if recipe.loop else 'steps'} of {recipe.global_batch}"
                f" rows, seed {recipe.seed}"
            ),
        ),
        ("operators", len(manifest.ops) + len(manifest.higher_order_ops)),
        ("bytes", sum(entry.size for entry in manifest.files.values())),
    ]
    if frozen:
        rows.insert(3, ("frozen", f"{frozen:,} parameters"))
    clips = {name: _clipping(recipe.graph(name)) for name in manifest.training_graphs()}
    if any(clips.values()):
        several = len(set(clips.values())) > 1
        listed = ", ".join(
            f"{name}: {clip}" if several else clip
            for name, clip in clips.items()
            if clip and (several or name == recipe.main)
        )
        rows.insert(-2, ("clipping", listed))
    if recipe.loop:
        rows.insert(-2, ("round", ", ".join(_format_turn(turn) for turn in recipe.loop)))
    if manifest.abstract is not None:
        proven = f"{manifest.abstract.reduced_parameters:,} parameters of a reduced job"
        rows.insert(
            2, ("abstract", f"no weights; proven on {proven}, check {manifest.abstract.check}")
        )
    if manifest.weight_source is not None:
        rows.insert(3, ("other weights", _format_weight_source(manifest.weight_source)))
    rows += _guard_rows(manifest)
    rows += [
        ("operator library", f"{namespace}: {_format_library(entry)}")
        for namespace, entry in manifest.op_libraries.items()
    ]
    if manifest.passes:
        rows.append(
            (
                "passes",
                ", ".join(
                    entry.name + ("" if entry.preserving else " (changes values)")
                    for entry in manifest.passes
                ),
            )
        )
    if manifest.parent is not None:
        rows.append(("parent", manifest.parent))
    if manifest.training is not None:
        rows.append(
            ("trained", f"{manifest.training.steps} steps on data {manifest.training.data}")
        )
        if manifest.training.weights is not None:
            given = manifest.training.weights
            rows.append(("begun with", f"{given.kind} {given.source}, {given.digest}"))
        for change in manifest.training.changed:
            settings = ", ".join(
                f"{name}={_format_setting(value)}" for name, value in change.settings.items()
            )
            rows.append((f"from step {change.step}" if change.step else "settings", settings))
    return rows


def _format_weight_source(source: WeightSourceEntry) -> str:
    """Return where a package's weights are found, and how many have another name there."""
    renamed = f"{len(source.names):,} with other names there" if source.names else ""
    return ", ".join(filter(None, (source.default, renamed)))


def _format_setting(value: Option) -> str:
    """Return the value of a setting in the notation of --set."""
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _format_library(entry: OpLibraryEntry) -> str:
    """Return the provider of a namespace's operators."""
    from trainload.packaging.package import told_library

    kernels = (
        f"; Triton kernels {', '.join(kernel.name for kernel in entry.kernels)}"
        if entry.kernels
        else ""
    )
    return f"{told_library(entry)}; {', '.join(entry.wheels) or 'not in the package'}{kernels}"


def _guard_rows(manifest: Manifest) -> list[tuple[str, Any]]:
    """Describe the batches of each training graph, in the order in which its variants are tried."""
    from trainload.capture.program import variant_of
    from trainload.packaging.format.entries import graph_guard

    order = ("", *manifest.variants)
    trained = sorted(manifest.training_graphs(), key=lambda name: order.index(variant_of(name)))
    return [("takes", f"{name}: {graph_guard(manifest.graphs[name])}") for name in trained]


def _clipping(graph: GraphRecipe) -> str:
    if graph.clip_norm is not None:
        return f"gradient norm {graph.clip_norm}"
    return f"gradient values {graph.clip_value}" if graph.clip_value is not None else ""


def _format_turn(turn: TurnRecipe) -> str:
    parts = [turn.graph]
    if turn.times > 1:
        parts.append(f"x {turn.times}")
    if turn.fresh:
        parts.append("on fresh batches" if turn.times > 1 else "on a fresh batch")
    if turn.every > 1:
        parts.append(f"every {turn.every} rounds")
    if turn.start:
        parts.append(f"from round {turn.start}")
    return " ".join(parts)


@click.command(short_help="Fill in its weights.")
@package_argument
@click.option(
    "--weights",
    "source",
    type=Place(),
    metavar="SOURCE",
    help="Source of the weights.  [default: the package's own source]",
)
@click.option("--partial-weights", is_flag=True, help="They may lack tensors or have others.")
@click.option("--seed", type=click.IntRange(min=0), help="Seed of init. Default: the package's.")
@new_package_option
@json_option
def fill(
    package: Path,
    source: str | None,
    partial_weights: bool,
    seed: int | None,
    output: Path,
    as_json: bool,
) -> None:
    """Write a package with the graphs of PKG and weights from elsewhere.

    PKG may be abstract. SOURCE is a safetensors file, a folder of them (as from Hugging Face), a
    checkpoint of torch.distributed.checkpoint, a package, a release, or "init": the first values
    that the model's code gives its tensors.
    """
    from trainload.launching.api.fill import fill as write

    with shared.working("filling in the weights"):
        filled = write(
            shared.open_package(package), source, output, partial=partial_weights, seed=seed
        )
    if as_json:
        print_json({"package": output, "digest": filled.digest})
    else:
        out().print(view.table([("package", str(output)), ("digest", filled.digest)]))
