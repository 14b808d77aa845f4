"""Comparisons of compiled graphs with interpreted ones, stored beside the build."""

from __future__ import annotations

import logging
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from trainload.core.atomic import replace_file
from trainload.core.canonical_json import canonical_json, parse_canonical
from trainload.core.errors import PackageError
from trainload.core.logs import log_handled

_log = logging.getLogger(__name__)

_FOLDER = "verified"
EXPLAINED = 1e-5
"""Relative distance that float32 rounding explains in any graph; smaller distances need no runs."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Outcome of comparing a compiled graph with the interpreted one.

    Attributes:
        graph: its name within the build, such as "train.only".
        interpreted: True if it runs interpreted from now on.
        output: value that differs, such as "gradient of layer.weight"; "" if none does, or the
            graph cannot be compiled or called.
        distance: L2 distance relative to the norm of the interpreted value; None if it is not
            finite.
        explained: greatest distance that rounding explains.
        operator: operator at which the compiled graph diverges; "" if unknown.
        place: the user's line of that operator, such as `model.py:12: low = image.amin(1)`; "" if
            unknown.
        error: error of the compiler or of the compiled graph; "" if there is none.
    """

    graph: str
    interpreted: bool = False
    output: str = ""
    distance: float | None = None
    explained: float = EXPLAINED
    operator: str = ""
    place: str = ""
    error: str = ""

    def __str__(self) -> str:
        at = (f" at {self.operator}" if self.operator else "") + (
            f" ({self.place})" if self.place else ""
        )
        if self.error:
            return f"graph {self.graph} fails when compiled{at}: {self.error}"
        if not self.interpreted:
            return f"graph {self.graph} matches the interpreted one"
        far = "by NaN or infinity" if self.distance is None else f"by {self.distance:.2g}"
        return (
            f"compiled graph {self.graph} differs from the interpreted one in the {self.output}"
            f" {far}, where rounding explains {self.explained:.2g}{at}"
        )


def read_comparison(build: Path, graph: str) -> Comparison | None:
    """Return the stored comparison of a graph of a build; None if there is no readable one."""
    path = build / _FOLDER / f"{graph}.json"
    try:
        return Comparison(**parse_canonical(path.read_bytes(), str(path)))
    except FileNotFoundError:
        return None
    except (PackageError, TypeError) as error:
        log_handled(_log, f"{path} is damaged; the graph is verified again", error)
        return None


def write_comparison(build: Path, comparison: Comparison) -> None:
    """Store a comparison, unless the cache is read-only."""
    # a read-only cache, such as one in a container image: the next run compares again
    with suppress(OSError):
        (build / _FOLDER).mkdir(exist_ok=True)
        replace_file(
            build / _FOLDER / f"{comparison.graph}.json",
            canonical_json(asdict(comparison)),
            durable=False,
        )


def forget_comparisons(build: Path) -> None:
    """Remove the stored comparisons of a build, so that its graphs are compared again."""
    shutil.rmtree(build / _FOLDER, ignore_errors=True)
