"""Export of a graph as an ONNX model by torch's exporter, and its comparison by ONNX Runtime."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from trainload.core.errors import PackageError

LARGEST = 2**31 - 2**20
"""Bytes of weights in one file, whose format is a protocol buffer."""
_LIBRARIES = ("onnx", "onnxscript", "onnxruntime")


HINT = (
    "ONNX Runtime lacks operators on the CPU, many of them in bfloat16. Freeze the model in"
    " float32, or write the file without the comparison: --no-check, or check=False."
)
"""Hint for a model that ONNX Runtime cannot open."""


def check_onnx(
    program: ExportedProgram,
    where: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    compared: bool,
) -> None:
    """Check that a graph can be an ONNX model, before it is made.

    Args:
        program: the graph.
        where: the graph's name, for messages.
        inputs: names of its inputs.
        outputs: names of its outputs.
        compared: True if ONNX Runtime will compute it.

    Raises:
        PackageError: a library is not installed, an output has the name of an input, the graph
            writes buffers, or its weights are too large for one file.
    """
    missing = [
        name
        for name in _LIBRARIES[: 3 if compared else 2]
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise PackageError(
            "a library for ONNX is not installed",
            where="to",
            got=f"no {', '.join(missing)}",
            hint='pip install "trainload[onnx]"',
        )
    if both := [name for name in outputs if name in inputs]:
        raise PackageError(
            "an output has the name of an input, and names of an ONNX model are unique",
            where=where,
            got=", ".join(both),
            hint="Rename the output in the job's predict function, or export it with --to pt2.",
        )
    # the package's graph writes in place; only a functional form has the writes in its signature
    with _quiet():
        signature = program.run_decompositions({}).graph_signature
    written = [
        str(spec.target)
        for spec in signature.output_specs
        if spec.kind is OutputKind.BUFFER_MUTATION
    ]
    if written:
        raise PackageError(
            "the graph updates buffers, and an ONNX model has no state",
            where=where,
            got=", ".join(written[:5]),
            hint="Export it with --to pt2, or freeze a predict function that does not update them.",
        )
    size = sum({id(value): value.nbytes for value in program.state_dict.values()}.values())
    if size > LARGEST:
        raise PackageError(
            "the weights do not fit into one ONNX file",
            where=where,
            expected=f"at most {LARGEST:,} bytes",
            got=f"{size:,}",
            hint="Export it with --to pt2 or --to huggingface.",
        )


def write_onnx(
    program: ExportedProgram,
    path: Path,
    inputs: Sequence[str],
    outputs: Sequence[str],
    metadata: Mapping[str, str],
    where: str,
) -> None:
    """Write an ONNX model.

    Args:
        program: the graph, with example inputs.
        path: the new file.
        inputs: names of its inputs, in the graph's order.
        outputs: names of its outputs.
        metadata: entries of the model's metadata.
        where: the graph's name, for messages.

    Raises:
        PackageError: torch cannot translate an operator; the message names it.
        OSError: the disk is full.
    """
    from torch.onnx.errors import OnnxExporterError

    with _quiet():
        try:
            exported = torch.onnx.export(
                program,
                input_names=list(inputs),
                output_names=list(outputs),
                dynamo=True,
                verbose=False,
            )
        except OnnxExporterError as error:
            raise PackageError(
                f"torch {torch.__version__} cannot translate the graph to ONNX: {_cause(error)}",
                where=where,
                got="onnx",
                hint="Export it with --to pt2, or replace the operator in the model.",
            ) from error
    assert exported is not None, "dynamo=True returns a program"
    exported.model.metadata_props.update(metadata)
    exported.save(path)


def load_onnx(path: Path, outputs: Sequence[str]) -> Callable[[dict[str, Tensor]], list[Tensor]]:
    """Return a function that computes an ONNX model with ONNX Runtime, on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = {each.name for each in session.get_inputs()}

    def call(batch: dict[str, Tensor]) -> list[Tensor]:
        feeds = {name: value.numpy() for name, value in batch.items() if name in names}
        return [torch.from_numpy(value) for value in session.run(list(outputs), feeds)]

    return call


def _cause(error: BaseException) -> str:
    """Return the first line of the innermost error, which names the operator."""
    while error.__cause__ is not None:
        error = error.__cause__
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter: it warns about its own use of torch, and about torchvision."""
    logger: Any = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
