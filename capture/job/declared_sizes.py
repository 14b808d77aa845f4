"""A job's declarations of input sizes: checks, the batch dim, and torch.export's form of them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.export import Dim

from trainload.core.errors import JobError
from trainload.core.suggestions import did_you_mean

Shapes = dict[str, dict[int, Any]]
"""Input name -> {dim: torch.export.Dim, or one of its hints}, as in torch's `dynamic_shapes`.

Dims that are not listed are fixed.
"""

_HINT: type = type(Dim.AUTO)
_WORDS = "a torch.export.Dim, Dim.AUTO, Dim.DYNAMIC, Dim.STATIC, the size itself, or None"


def declared_shapes(dynamic: Mapping[str, Any], leaves: Mapping[str, Tensor]) -> Shapes:
    """Check `Job.dynamic` against the example batch, and add the batch dim.

    Args:
        dynamic: value of `Job.dynamic`.
        leaves: input name -> tensor of the example batch.

    Returns:
        Declarations for every input; dim 0 is always there, and the same for all. Sizes and None
        have become Dim.STATIC.

    Raises:
        JobError: if it names inputs that the batch lacks, contradicts itself or the example, or
            makes rows depend on each other.
    """
    unknown = sorted(set(dynamic) - set(leaves))
    if unknown:
        raise JobError(
            "names inputs that are not in the batch",
            where="Job.dynamic",
            expected=f"some of {sorted(leaves)}",
            got=", ".join(map(repr, unknown)),
            hint=did_you_mean(str(unknown[0]), leaves),
        )
    _check_rows(leaves)
    shapes = {name: declared_dims(name, dynamic.get(name), leaf) for name, leaf in leaves.items()}
    rows = _batch_dim(shapes)
    count = next(iter(leaves.values())).shape[0]
    if count < 2 and rows is not Dim.STATIC:
        raise JobError(
            "the example batch is too small for a dynamic batch dim, since torch treats sizes 0 and"
            " 1 as special",
            where="Job.batch",
            expected="2 rows or more",
            got=f"{count}",
            hint="Use more rows, or fix the size with dynamic={name: {0: Dim.STATIC}}.",
        )
    for dims in shapes.values():
        dims[0] = rows
    _check_named_dims(shapes, leaves)
    return shapes


def warn_of_special_lengths(shapes: Shapes, leaves: Mapping[str, Tensor]) -> None:
    """Warn of dynamic dims that have length 0 or 1 in the example.

    torch treats these lengths as constants.
    """
    for name, dims in shapes.items():
        for dim, spec in sorted(dims.items()):
            length = leaves[name].shape[dim]
            if dim > 0 and spec is not Dim.STATIC and length < 2:
                warnings.warn(
                    f"Job.batch: {name} has length {length} in dim {dim}, which is declared as"
                    f" {spelled(spec)}; torch treats lengths 0 and 1 as constants, so the graph"
                    " would accept only this length. Use an example of length 2 or more.",
                    stacklevel=3,
                )


def is_hint(spec: Any) -> bool:
    """Return True for Dim.AUTO, Dim.DYNAMIC or Dim.STATIC, with or without a range."""
    return isinstance(spec, _HINT)


def spelled(spec: Any) -> str:
    """Return a declaration as a user writes it: "Dim('seq', max=64)", "2*half", "Dim.AUTO"."""
    if is_hint(spec):
        limits = [
            f"{word}={limit}"
            for word, limit in (("min", spec.min), ("max", spec.max))
            if limit is not None
        ]
        return f"Dim.{spec.type.name}" + (f"({', '.join(limits)})" if limits else "")
    if hasattr(spec, "root"):
        return str(spec.__name__)
    least, most = limits_of(spec)
    return (
        f"Dim({spec.__name__!r}"
        + (f", min={least}" if least else "")
        + (f", max={most}" if most is not None else "")
        + ")"
    )


def limits_of(spec: Any) -> tuple[int | None, int | None]:
    """Return the least and greatest allowed size; None: no limit."""
    if is_hint(spec):
        return spec.min, spec.max
    return int(spec.min), int(spec.max) if str(spec.max).isdigit() else None


def affine(spec: Any) -> tuple[int, int]:
    """Return (factor, offset) of a derived dim, which is factor * root + offset.

    (1, 0) for a dim that is its own root.
    """
    if not hasattr(spec, "root"):
        return 1, 0
    offset = int(spec.fn(0))
    return int(spec.fn(1)) - offset, offset


def _check_rows(leaves: Mapping[str, Tensor]) -> None:
    for name, leaf in leaves.items():
        if leaf.ndim == 0:
            raise JobError(
                "the input has no batch dim",
                where=f"Job.batch: {name}",
                expected="at least one dim",
                got="0 dims",
                hint=(
                    f"If it is the same for all rows, declare shared=[{name!r}]; otherwise add a"
                    " leading batch dim."
                ),
            )
    rows = {name: leaf.shape[0] for name, leaf in leaves.items()}
    if len(set(rows.values())) != 1:
        raise JobError(
            "inputs have different numbers of rows",
            where="Job.batch",
            expected="the same leading size for all",
            got=str(rows),
            hint=_leading_size_hint(leaves),
        )


def _leading_size_hint(leaves: Mapping[str, Tensor]) -> str:
    """Return a hint for inputs with different leading sizes.

    The number of rows is assumed to be a size that most inputs have in some dim.
    """
    leading = Counter(leaf.shape[0] for leaf in leaves.values())
    rows = max(
        leading,
        key=lambda size: (sum(size in leaf.shape for leaf in leaves.values()), leading[size]),
    )
    advice = []
    for name, leaf in leaves.items():
        if leaf.shape[0] != rows:
            shared = f"shared=[{name!r}] if it is the same for all rows"
            place = list(leaf.shape).index(rows) if rows in leaf.shape else None
            declared = f"dynamic={{{name!r}: {{{place}: Dim('batch')}}}}"
            advice.append(
                shared if place is None else f"{declared} if its rows are dim {place}, or {shared}"
            )
    return f"Declare {'; '.join(advice[:3])}. See docs/guides/shapes.md."


def declared_dims(name: str, declaration: Any, leaf: Tensor) -> dict[int, Any]:
    """Return the declarations of `Job.dynamic` for one input, by non-negative dim.

    Sizes and None have become Dim.STATIC.

    Raises:
        JobError: if it contradicts itself or the example.
    """
    if declaration is None:
        return {}
    where = f"Job.dynamic[{name!r}]"
    if isinstance(declaration, Mapping):
        entries = list(declaration.items())
    elif isinstance(declaration, Sequence) and not isinstance(declaration, str):
        if len(declaration) != leaf.ndim:
            raise JobError(
                "declares a different number of dims from the example",
                where=where,
                expected=f"{leaf.ndim} entries",
                got=str(len(declaration)),
            )
        entries = list(enumerate(declaration))
    else:
        raise JobError(
            "does not declare sizes by dim",
            where=where,
            expected="{dim: ...}, or one entry for each dim",
            got=repr(declaration),
        )
    dims: dict[int, Any] = {}
    for dim, spec in entries:
        if type(dim) is not int or not -leaf.ndim <= dim < leaf.ndim:
            raise JobError(
                "the input has no such dim",
                where=where,
                expected=f"0 to {leaf.ndim - 1}",
                got=repr(dim),
            )
        place = dim % leaf.ndim
        if place in dims:
            raise JobError(
                "declares one dim twice", where=f"{where}[{dim}]", got=f"{place} and {dim}"
            )
        dims[place] = _check_spec(spec, leaf.shape[place], f"{where}[{dim}]")
    return dims


def _check_spec(spec: Any, size: int, where: str) -> Any:
    if spec is None:
        return Dim.STATIC
    if type(spec) is int:
        if spec != size:
            raise JobError(
                "fixes a size that differs from the example's",
                where=where,
                expected=str(size),
                got=str(spec),
                hint="Use the same size in both.",
            )
        return Dim.STATIC
    if not isinstance(spec, Dim) and not is_hint(spec):
        hint = f"Write Dim({spec!r})." if isinstance(spec, str) and spec.isidentifier() else ""
        raise JobError(
            "not a valid declaration of a dim",
            where=where,
            expected=_WORDS,
            got=repr(spec),
            hint=hint,
        )
    if hasattr(spec, "root"):
        factor, offset = affine(spec)
        if factor * int(spec.root.min) + offset < 0:
            raise JobError(
                f"{spelled(spec)} is negative for the smallest {spec.root.__name__}",
                where=where,
                expected="0 or more",
                got=f"{spec.root.__name__} from {int(spec.root.min)}",
                hint=(
                    f"Give the root a minimum size: Dim({spec.root.__name__!r},"
                    f" min={-(offset // factor)})."
                ),
            )
    least, most = limits_of(spec)
    if (least is not None and size < least) or (most is not None and size > most):
        raise JobError(
            "the example's size is outside of the declared range",
            where=where,
            expected=f"{least or 0} to {'any size' if most is None else most}",
            got=str(size),
            hint="Widen the range, or use another example.",
        )
    return Dim.STATIC if is_hint(spec) and spec.type.name == "STATIC" else spec


def _batch_dim(shapes: Shapes) -> Any:
    """Return the common declaration of all leading dims: the one that the job has for any."""
    declarations = {
        f"Job.dynamic[{name!r}][0]": dims[0] for name, dims in shapes.items() if 0 in dims
    }
    if any(spec is Dim.STATIC for spec in declarations.values()):
        return Dim.STATIC
    if len({spelled(spec) for spec in declarations.values()}) > 1:
        raise JobError(
            "declares the batch dim in different ways",
            where="Job.dynamic",
            expected="one Dim for dim 0",
            got=", ".join(map(spelled, declarations.values())),
            hint="Every input has the same rows: declare dim 0 once.",
        )
    if not declarations:
        return Dim("batch", min=1)
    where, spec = next(iter(declarations.items()))
    if hasattr(spec, "root"):
        raise JobError(
            "the batch dim is derived from another dim",
            where=where,
            expected="a dim that accepts any number of rows",
            got=spelled(spec),
            hint=(
                "A batch can have any number of rows. Give each row an extra dim: (rows, 2, ...)"
                " instead of (2*rows, ...)."
            ),
        )
    return spec


def _check_named_dims(shapes: Shapes, leaves: Mapping[str, Tensor]) -> None:
    """Check that each name has one range and one size in the example.

    No other dim may have the batch dim's name.
    """
    ranges: dict[str, tuple[str, Any]] = {}
    sizes: dict[str, tuple[str, int]] = {}
    rows = next(iter(shapes.values()))[0]
    for name, dims in shapes.items():
        for dim, spec in sorted(dims.items()):
            if is_hint(spec):
                continue
            where = f"Job.dynamic[{name!r}][{dim}]"
            root: Any = getattr(spec, "root", spec)
            if dim > 0 and not is_hint(rows) and root.__name__ == rows.__name__:
                raise JobError(
                    f"the batch dim {rows.__name__!r} is also used for another dim",
                    where=where,
                    expected="a different name",
                    got=spelled(spec),
                    hint=(
                        "A batch can have any number of rows, so the length of a row cannot depend"
                        " on it."
                    ),
                )
            other, first_root = ranges.setdefault(root.__name__, (where, root))
            if spelled(first_root) != spelled(root):
                raise JobError(
                    f"the dim {root.__name__!r} has two ranges",
                    where=where,
                    expected=f"{spelled(first_root)}, as in {other}",
                    got=spelled(root),
                )
            factor, offset = affine(spec)
            size = leaves[name].shape[dim]
            length, rest = divmod(size - offset, factor)
            if rest:
                raise JobError(
                    "the example's size is not possible for the derived dim",
                    where=where,
                    expected=spelled(spec),
                    got=f"{size}",
                )
            other, known_length = sizes.setdefault(root.__name__, (where, length))
            if known_length != length:
                raise JobError(
                    f"the dim {root.__name__!r} has two sizes in the example",
                    where=where,
                    expected=f"{known_length}, as in {other}",
                    got=f"{length}",
                    hint="Give the dims different names, or use an example that fits.",
                )
