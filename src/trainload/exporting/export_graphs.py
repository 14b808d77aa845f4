"""Export of packages: `trainload.export` writes files for plain torch and Hugging Face's tools, and
verifies them by opening them.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from trainload.autograd_trace.compiling.inductor import compile_ahead, has_cpp_compiler, load_ahead
from trainload.autograd_trace.derivation.aot import add_size_conditions
from trainload.autograd_trace.derivation.plain import (
    custom_libraries,
    other_devices,
    own_operators,
    plain_graph,
)
from trainload.autograd_trace.derivation.size_checks import size_checks
from trainload.autograd_trace.derivation.step_module import draws
from trainload.capture.job.ambient import neutrally, one_at_a_time
from trainload.capture.job.synthesise import synthesise
from trainload.capture.parity.distance import relative_distance
from trainload.capture.parity.parity import replaying, tolerance_of
from trainload.capture.program import GraphCapture, Mode
from trainload.capture.source.quiet import ignore_torchs_warnings, quiet_torch
from trainload.core.canonical_json import canonical_json
from trainload.core.errors import ClusterError, DataError, PackageError, raised
from trainload.core.storage.places import path_here
from trainload.core.suggestions import did_you_mean
from trainload.core.versions import VERSION
from trainload.core.work_steps import begin_step
from trainload.exporting.onnx_model import HINT, check_onnx, load_onnx, write_onnx
from trainload.exporting.peft_folder import check_peft_folder, write_peft_folder
from trainload.exporting.state_files import (
    check_dcp,
    check_state_file,
    write_dcp,
    write_state_file,
)
from trainload.exporting.weights_folder import (
    check_folder,
    contents_of,
    transformers_part,
    write_folder,
)
from trainload.launching.api.run_weights import RunWeights, read_run_weights
from trainload.packaging.format.package_files import check_new_folder, new_file, new_folder, walk
from trainload.packaging.graphs.graph_json import serialisable_values
from trainload.packaging.graphs.graph_replacement import with_graph
from trainload.packaging.package import Package, check_weights

__all__ = ["Exported", "Kind", "export"]

Kind = Literal["pt2", "aoti", "huggingface", "onnx", "safetensors", "dcp", "peft"]
GraphKind = Literal["pt2", "aoti", "onnx"]
WEIGHTS_ONLY = ("huggingface", "safetensors", "dcp", "peft")
NOTE = "trainload.json"
"""Name of the note: an extra file of a .pt2, or metadata of a compiled graph or an ONNX model."""
_COMPILED = 10.0
"""Factor on the graph's tolerance for compiled code, which sums in another order."""
_SUFFIXES = {"pt2": ".pt2", "aoti": ".pt2", "onnx": ".onnx", "safetensors": ".safetensors"}
"""Suffixes that the files need; the other kinds are folders."""
_SEED = 20_240_229

Call = Callable[[dict[str, Tensor]], Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class Exported:
    """Result of an export.

    Attributes:
        path: the file or folder.
        to: kind of the export.
        graph: name of the graph; "" if only weights were exported.
        device: device of the graph; "" if only weights were exported.
        inputs: name -> dtype and shape of the entries of the dict that a .pt2 accepts, or of the
            keyword arguments of an AOTInductor package.
        outputs: names of the tensors in the tuple that the graph returns, in order.
        lowered: operators of trainload that plain torch lacks, which were replaced by torch's.
        libraries: namespace of custom operators -> distribution that must be imported before the
            export is opened.
        difference: largest relative L2 difference from the package's own graph, over its outputs
            and two synthetic batches; None if not compared.
        files: number of files.
        bytes: total size in bytes.

    Example:
        exported = trainload.export(package, "gpt.pt2", to="pt2")
        print(exported.inputs, exported.outputs, exported.difference)
    """

    path: Path
    to: Kind
    graph: str
    device: str
    inputs: dict[str, str]
    outputs: tuple[str, ...]
    lowered: tuple[str, ...]
    libraries: dict[str, str | None]
    difference: float | None
    files: int
    bytes: int


@one_at_a_time
@neutrally
def export(
    package: Package | str | Path,
    path: str | Path,
    *,
    to: Kind,
    graph: str | None = None,
    variant: str | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    part: str | None = None,
    step: int | None = None,
    check: bool = True,
) -> Exported:
    """Export a graph with the package's weights, or only the weights, for use without trainload.

    See docs/guides/export.md.

    Args:
        package: the package; or the folder or URL of a run, whose checkpoint is exported.
        path: a path that does not exist: a file whose name ends in .pt2, .onnx or .safetensors, or
            for "huggingface", "dcp" and "peft" a folder.
        to: "pt2": torch.export's archive, for torch.export.load. "aoti": compiled by AOTInductor,
            for torch._inductor.aoti_load_package. "onnx": an ONNX model. "huggingface":
            safetensors, with the configuration and tokenizer from the package's assets.
            "safetensors": one file. "dcp": a checkpoint for torch.distributed.checkpoint.load.
            "peft": the adapters of a run, for peft.PeftModel.from_pretrained.
        graph: name of a graph other than a training graph; None: "predict".
        variant: variant of the graph; None: the first.
        device: device of the exported graph; None: "cpu".
        part: for weights, the module of the job's model whose weights are exported, such as
            "student"; None: the transformers model if the package has one, otherwise everything.
        step: for a run, the number of updates of the checkpoint; None: the newest one.
        check: if True, open the export and compare it: a graph with the package's own on synthetic
            batches of two sizes, weights bit for bit.

    Raises:
        PackageError: the package has no such graph or module, is abstract, or the graph cannot be
            exported: the message says why.
        RequestError: the run has no such checkpoint.
        CheckpointError: the checkpoint is damaged.
        ClusterError: there is no GPU here.
        StorageError: the path is taken or cannot be written.

    Example:
        trainload.export(package, "gpt.pt2", to="pt2")
        logits, *_ = torch.export.load("gpt.pt2").module()({"tokens": tokens})
    """
    path = path_here(path)
    if to not in get_args(Kind):
        raise PackageError(
            "unknown export format",
            where="to",
            expected=", ".join(get_args(Kind)),
            got=repr(to),
            hint=did_you_mean(str(to), get_args(Kind)),
        )
    run = None
    if not isinstance(package, Package):
        run = read_run_weights(package, step)
        package = run.package
    elif step is not None:
        raise PackageError("a package has no steps", where="step", hint="Name a run.")
    check_weights(package)
    if to in WEIGHTS_ONLY:
        graph_options = {"graph": graph, "variant": variant, "device": device}
        if useless := [name for name, value in graph_options.items() if value is not None]:
            raise PackageError(
                "an export of weights contains no graph",
                where=", ".join(useless),
                hint="Omit it, or choose pt2, aoti or onnx.",
            )
        _check_suffix(path, to)
        check_new_folder(path)
        if to == "peft":
            return _export_adapters(package, run, path, part, check)
        return _export_weights(package, path, to, part, check)
    if part is not None:
        raise PackageError(
            "only weights can be exported in part",
            where="part",
            hint='Omit it, or choose "huggingface", "safetensors" or "dcp".',
        )
    _check_suffix(path, to)
    check_new_folder(path)
    capture = package.captured(_graph_name(package, graph, variant))
    target = _device(device or "cpu")
    if to == "onnx" and target.type != "cpu":
        raise PackageError(
            "an ONNX model is for no device: its runtime chooses one",
            where="device",
            got=device or "",
        )
    if to == "aoti" and not has_cpp_compiler():
        raise PackageError(
            "there is no C++ compiler here, and AOTInductor needs one",
            where="aoti",
            hint="Install g++ or clang++.",
        )
    return _export_graph(package, path, capture, cast(GraphKind, to), target, check)


def _check_suffix(path: Path, to: Kind) -> None:
    suffix = _SUFFIXES.get(to)
    if suffix is not None and path.suffix != suffix:
        raise PackageError(
            "the file would not be recognised by this name",
            where=str(path),
            expected=f"a name that ends in {suffix}",
            got=path.name,
        )


def _graph_name(package: Package, graph: str | None, variant: str | None) -> str:
    """Return the name of the graph to export."""
    manifest = package.manifest
    modes = manifest.modes()
    usable = [name for name, mode in modes.items() if mode is not Mode.TRAIN]
    base = graph or "predict"
    if variant and variant not in manifest.variants:
        variants = ", ".join(manifest.variants) or "only the first variant"
        raise PackageError(
            "the graph has no such variant",
            where=base,
            expected=variants,
            got=variant,
            hint=did_you_mean(variant, manifest.variants),
        )
    name = f"{base}-{variant}" if variant else base
    if name in usable:
        return name
    if name in modes:
        raise PackageError(
            "a training graph cannot be exported", where=name, expected=", ".join(usable), got=name
        )
    hint = (
        did_you_mean(name, usable)
        if graph
        else (
            "Specify Job(predict=...) before the freeze, or choose another graph: --graph eval"
            " gives the loss and metrics."
        )
    )
    raise PackageError(
        "the package has no such graph", where=name, expected=", ".join(usable), got=name, hint=hint
    )


def _device(name: str) -> torch.device:
    if name not in ("cpu", "cuda"):
        raise PackageError(
            "a graph cannot be exported for this device",
            where="device",
            expected="cpu or cuda",
            got=name,
        )
    if name == "cuda" and not torch.cuda.is_available():
        raise ClusterError(
            "there is no GPU here",
            where="device",
            expected="cuda",
            got="cpu",
            hint="Export it on a machine that has one.",
        )
    return torch.device(name)


def _export_weights(
    package: Package, path: Path, to: Kind, part: str | None, check: bool
) -> Exported:
    module = part if part is not None else transformers_part(package) or ""
    contents = contents_of(package.manifest, module)
    if to == "safetensors":
        with new_file(path) as file:
            write_state_file(file, package, contents)
            if check:
                begin_step("comparing the written values")
                check_state_file(file, package, contents)
        return _weights_exported(path, to)
    with new_folder(path) as root:
        if to == "dcp":
            write_dcp(root, package, contents)
            if check:
                check_dcp(root, package, contents)
        else:
            write_folder(root, package, contents, _origin(package))
            if check:
                check_folder(root, package, contents)
    return _weights_exported(path, to)


def _export_adapters(
    package: Package, run: RunWeights | None, path: Path, part: str | None, check: bool
) -> Exported:
    if part is not None:
        raise PackageError("adapters are exported whole", where="part", hint="Omit it.")
    if run is None:
        raise PackageError(
            "a package has no adapters: those of a run are merged into its output",
            where="to",
            got="peft",
            hint="Name the folder of the run: trainload export RUN --to peft.",
        )
    with new_folder(path) as root:
        tensors = write_peft_folder(root, run, _origin(package))
        if check:
            check_peft_folder(root, tensors)
    return _weights_exported(path, "peft")


def _weights_exported(path: Path, to: Kind) -> Exported:
    sizes = [status.st_size for _, status in walk(path)] if path.is_dir() else [path.stat().st_size]
    return Exported(path, to, "", "", {}, (), (), {}, None, len(sizes), sum(sizes))


def _export_graph(
    package: Package,
    path: Path,
    capture: GraphCapture,
    to: GraphKind,
    device: torch.device,
    check: bool,
) -> Exported:
    name, where = capture.name, f"graph {capture.name}"
    operators = own_operators(capture.exported.graph_module)
    libraries = custom_libraries(
        capture.exported.graph_module,
        {name: entry.distribution for name, entry in package.manifest.op_libraries.items()},
    )
    batches = _batches(capture, needed=check or to != "pt2")
    with quiet_torch(), warnings.catch_warnings():
        ignore_torchs_warnings()
        original, program = _plain_program(package, capture, device)
        inputs = {
            spec.name: f"{spec.dtype}[{', '.join(map(str, spec.shape))}]" for spec in capture.inputs
        }
        outputs = tuple(spec.name for spec in capture.outputs)
        if to == "onnx":
            check_onnx(program, where, list(inputs), outputs, compared=check)
        if batches:
            program.example_inputs = (
                ({key: value.to(device) for key, value in batches[0].items()},),
                {},
            )
        add_size_conditions(program, [] if capture.guard is None else size_checks(capture.guard))
        note = _origin(package) | {
            "graph": name,
            "device": device.type,
            "inputs": [
                {"name": i.name, "dtype": i.dtype, "shape": list(i.shape)} for i in capture.inputs
            ],
            "outputs": [{"name": o.name, "role": o.role.value} for o in capture.outputs],
            "takes": "" if capture.guard is None else str(capture.guard),
            "libraries": libraries,
            "torch": torch.__version__,
        }
        text = canonical_json(note).decode("utf-8")
        with new_file(path) as place:
            begin_step("compiling the graph" if to == "aoti" else "writing the graph")
            try:
                if to == "pt2":
                    with serialisable_values(program.graph_module):
                        torch.export.save(program, place, extra_files={NOTE: text})
                elif to == "onnx":
                    write_onnx(program, place, list(inputs), outputs, {NOTE: text}, where)
                else:
                    compile_ahead(program, place, {NOTE: text})
            except (OSError, PackageError):
                raise
            except Exception as error:  # torch's compiler may raise anything
                raise PackageError(
                    f"torch {torch.__version__} cannot export the graph: {raised(error)}",
                    where=where,
                    got=to,
                ) from error
            begin_step("comparing with the package's graph")
            difference = (
                _difference(capture, _ReferenceGraph(original, program), place, to, device, batches)
                if check
                else None
            )
    return Exported(
        path,
        to,
        name,
        device.type,
        inputs,
        outputs,
        operators,
        libraries,
        difference,
        files=1,
        bytes=path.stat().st_size,
    )


def _origin(package: Package) -> dict[str, Any]:
    return {
        "package": package.digest,
        "program": package.manifest.program_digest,
        "trainload": VERSION,
    }


def _batches(capture: GraphCapture, *, needed: bool) -> list[dict[str, Tensor]]:
    """Return synthetic batches of two sizes; [] if the package does not describe its inputs and
    none are needed.
    """
    try:
        return [synthesise(capture, 0), synthesise(capture, 1, 1)]
    except DataError as error:
        if not needed:
            return []
        hint = "Export a .pt2 without the comparison: --to pt2 --no-check, or check=False."
        raise PackageError(error.problem, where=error.where, hint=hint) from error


def _plain_program(
    package: Package, capture: GraphCapture, device: torch.device
) -> tuple[ExportedProgram, ExportedProgram]:
    """Return the graph with its weights twice: as in the package, on the CPU, and with only torch's
    operators, on `device`.
    """
    original = package.graph(capture.name)
    module = plain_graph(dataclasses.replace(capture, exported=original), device)
    program = with_graph(original, module, f"graph {capture.name}")
    copies: dict[int, Tensor] = {}
    for store in (program.state_dict, program.constants):
        for key, value in store.items():
            # tied weights stay tied
            store[key] = copies.setdefault(id(value), _export_tensor(value, device))
    return original, program


def _export_tensor(value: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the state for the export: on its device, without requires_grad."""
    other = value.detach().to(device)
    return (
        torch.nn.Parameter(other, requires_grad=False)
        if isinstance(value, torch.nn.Parameter)
        else other
    )


def _difference(
    capture: GraphCapture,
    reference: _ReferenceGraph,
    file: Path,
    to: GraphKind,
    device: torch.device,
    batches: Sequence[Mapping[str, Tensor]],
) -> float | None:
    """Return the relative difference of the export from the package's own graph, in outputs and in
    buffers that it writes.

    Raises:
        PackageError: the difference is too large, or torch cannot open the export.
    """
    if to != "pt2" and draws(capture):
        return None  # other code draws other random numbers
    where = f"graph {capture.name}"
    buffers: Mapping[str, Tensor] = {}
    call: Call
    try:
        if to == "pt2":
            loaded = torch.export.load(file).module()  # noqa: TID251  # this process has just written it
            buffers, call = dict(loaded.named_buffers()), loaded
        elif to == "onnx":
            call = load_onnx(file, [spec.name for spec in capture.outputs])
        else:
            compiled = load_ahead(file)
            call = lambda batch: compiled(**batch)  # noqa: E731  # parallel to the other branch
    except Exception as error:  # torch's loader may raise anything
        raise PackageError(
            f"the exported file cannot be opened: {raised(error)}",
            where=where,
            got=to,
            hint=HINT if to == "onnx" else "",
        ) from error
    tolerance = tolerance_of(capture) * (1.0 if to == "pt2" else _COMPILED)
    worst = 0.0
    for seed, batch in enumerate(batches, _SEED):
        with replaying(False, seed):
            expected = reference(batch)
        try:
            with replaying(False, seed):
                results = call({name: value.to(device) for name, value in batch.items()})
        except Exception as error:  # torch's code may raise anything, as above
            raise PackageError(
                f"the exported graph fails: {raised(error)}",
                where=where,
                got=to,
                hint=HINT if to == "onnx" else "",
            ) from error
        pairs = [
            (f"output {spec.name}", a, b)
            for spec, a, b in zip(capture.outputs, expected, results, strict=True)
        ]
        pairs += [
            (f"buffer {name}", value, buffers[name])
            for name, value in reference.buffers.items()
            if name in buffers
        ]
        for value_name, value, other in pairs:
            distance = relative_distance(value.detach(), other.detach().cpu())
            if not distance <= tolerance:
                raise PackageError(
                    f"the exported graph differs from the package's own in its {value_name}",
                    where=where,
                    expected=f"a relative difference of at most {tolerance:g}",
                    got=f"{distance:.2g}",
                )
            worst = max(worst, distance)
    return worst


class _ReferenceGraph:
    """The package's own graph, run unchanged with its own copies of buffers.

    A graph captured on a GPU is run in its lowered form.
    """

    def __init__(self, original: ExportedProgram, program: ExportedProgram) -> None:
        self._program = (
            program if other_devices(original.graph_module, torch.device("cpu")) else original
        )
        self.buffers: dict[str, Tensor] = {}

    def __call__(self, batch: Mapping[str, Tensor]) -> Sequence[Tensor]:
        state = {**self._program.state_dict, **self._program.constants}
        entries = iter(batch.values())
        arguments: list[Tensor] = []
        for spec in self._program.graph_signature.input_specs:
            name = str(spec.target)
            if spec.kind is InputKind.USER_INPUT:
                arguments.append(next(entries))
            elif spec.kind is InputKind.BUFFER:
                arguments.append(self.buffers.setdefault(name, state[name].clone()))
            else:
                arguments.append(state[name])
        results: Sequence[Tensor] = self._program.graph_module(*arguments)
        return results
