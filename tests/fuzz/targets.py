"""Coverage-guided fuzzing with Atheris of one parser, or of the reader of whole packages.

    python -m tests.fuzz.targets TARGET CORPUS [options of libFuzzer]

A parser's input is the fuzzer's bytes; for `package` they are the random numbers from which
tests/fuzz/mutants.py makes a mutant.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(
    include=["trainload.packaging", "trainload.capture.guards.size_expressions"]
):
    from tests.fuzz.judge import judge
    from tests.fuzz.mutants import files_of, mutant, restore
    from tests.hostile.prepared import make_base

    from trainload.capture.guards.size_expressions import GrammarError, parse
    from trainload.core.canonical_json import canonical_json, parse_canonical, sha256_bytes
    from trainload.packaging.format.manifest import Manifest
    from trainload.packaging.graphs.expressions import check_expression
    from trainload.packaging.graphs.validate import parse_graph, validate_graph
    from trainload.packaging.tensors.safetensors_file import TensorSpec, tensor_places

from trainload.core.errors import PackageError

Target = Callable[[bytes], None]


class Given(random.Random):
    """Random numbers that are the fuzzer's bytes, followed by zeros."""

    def __init__(self, data: bytes) -> None:
        self._left = data
        super().__init__()

    def seed(self, *args: object, **kwargs: object) -> None:
        """Ignore the seed."""

    def getrandbits(self, k: int) -> int:
        count = (k + 7) // 8
        taken, self._left = self._left[:count], self._left[count:]
        return int.from_bytes(taken.ljust(count, b"\0"), "little") & ((1 << k) - 1)

    def random(self) -> float:
        return self.getrandbits(24) / 2**24


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def canonical(data: bytes) -> None:
    """Check that accepted bytes are canonical."""
    try:
        value = parse_canonical(data, "x")
    except PackageError:
        return
    assert canonical_json(value) == data


def expression(data: bytes) -> None:
    """Check that an accepted expression has only characters for functions of sizes."""
    text = _text(data)
    try:
        check_expression(text, "x")
    except PackageError:
        return
    assert not set(text) & set('[]{}:;@!\\"`$%&|<>?~^')
    assert "__" not in text


def guard(data: bytes) -> None:
    """Check that an accepted guard can be evaluated."""
    try:
        parsed = parse(_text(data))
        parsed.value(dict.fromkeys(parsed.symbols, 3))
    except (GrammarError, ZeroDivisionError):
        return


_SPECS = [
    TensorSpec("a", "float32", (2, 3)),
    TensorSpec("b", "int64", ()),
    TensorSpec("c", "bool", (0,)),
]


def header(data: bytes) -> None:
    """Check that an accepted header places its tensors side by side within the file."""
    try:
        places = tensor_places(data, "x", _SPECS)
    except PackageError:
        return
    assert sum(place.stop - place.start for place in places.values()) == 32
    assert max(place.stop for place in places.values()) == len(data)


def graph(data: bytes) -> None:
    """Check that the validator ends with a verdict."""
    try:
        validate_graph(parse_graph(data, "x"), "x")
    except PackageError:
        return


def manifest(data: bytes) -> None:
    """Check that an accepted manifest stays the same when it is written and read again."""
    try:
        fields = json.loads(data)
        fields.pop("checksum", None)
        sealed = canonical_json({**fields, "checksum": sha256_bytes(canonical_json(fields))})
    except (ValueError, AttributeError, TypeError, RecursionError):
        return
    try:
        read = Manifest.from_bytes(sealed, "x")
    except PackageError:
        return
    assert Manifest.from_bytes(read.to_bytes(), "x") == read


def whole_package() -> Target:
    """Return the target that checks that a mutant is rejected, or read as what its files say."""
    folder = make_base(Path(tempfile.mkdtemp()))
    files = files_of(folder)

    def package(data: bytes) -> None:
        changed = mutant(files, Given(data))
        changed.apply(folder)
        try:
            outcome, why = judge(folder, files, changed)
        finally:
            restore(folder, files, changed)
        if outcome == "wrong":
            Path(tempfile.gettempdir(), f"mutant-{sha256_bytes(data)[:16]}.json").write_text(
                changed.to_json(), encoding="utf-8"
            )
            raise AssertionError(f"{changed.how}: {why}")

    return package


PARSERS: dict[str, Target] = {
    "canonical": canonical,
    "expression": expression,
    "guard": guard,
    "header": header,
    "graph": graph,
    "manifest": manifest,
}


def main() -> None:
    name = sys.argv.pop(1)
    atheris.Setup(sys.argv, PARSERS[name] if name in PARSERS else whole_package())
    atheris.Fuzz()


if __name__ == "__main__":
    main()
