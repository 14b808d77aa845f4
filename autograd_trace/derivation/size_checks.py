"""Translate a guard on sizes into the checks that torch makes before it runs an exported program.
The inverse of torch_guards.py.
"""

from __future__ import annotations

import re

from trainload.capture.guard import Guard
from trainload.capture.guards.size_expressions import parse

_NAME = re.compile(r"[A-Za-z_][\w.]*", re.ASCII)
_WORDS = frozenset({"and", "or", "not", "max", "min"})


def size_checks(guard: Guard) -> list[str]:
    """Return Python expressions over "L['flat_args'][0].size()[1]", the size of dim 1 of the first
    input, for `aot.add_size_conditions`.

    Law: together with torch's own checks (of fixed sizes, and of ranges of sizes that are one
    symbol), they hold if and only if the guard's sizes, ranges and conditions hold, except that
    torch accepts 0 and 1 where a range begins at 2.
    """
    places = [
        (f"L['flat_args'][{place}].size()[{dim}]", size)
        for place, entry in enumerate(guard.inputs)
        for dim, size in enumerate(entry.sizes)
        if isinstance(size, str)
    ]
    sources: dict[str, str] = {}
    for source, size in sorted(places, key=lambda place: parse(place[1]).affine() != (1, 0)):
        line = parse(size).affine()
        if line is not None:
            sources.setdefault(
                parse(size).symbols[0],
                source if line == (1, 0) else f"(({source} - {line[1]}) // {line[0]})",
            )

    def said(text: str) -> str:
        return _NAME.sub(lambda name: name[0] if name[0] in _WORDS else sources[name[0]], text)

    checks = [f"{source} == {said(size)}" for source, size in places if said(size) != source]
    for symbol, (least, most) in guard.ranges.items():
        if not sources[symbol].startswith("L"):
            checks += [f"{sources[symbol]} >= {least}"] if least > 2 else []
            checks += [f"{sources[symbol]} <= {most}"] if most is not None else []
    return [*checks, *(said(condition) for condition in guard.conditions)]
