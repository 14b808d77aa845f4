"""Convert Arrow columns to arrays: scalars, lists of equal length, nested to any depth, and tensors
of a fixed shape.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainload.core.canonical_json import parse_json
from trainload.core.errors import DataError
from trainload.launching.data.columns import Array, ColumnType, Sizes

_DTYPE_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}
_MAX_ITEM_BYTES = 8
"""Item size of the largest dtype in bytes."""
_ARRAYS = "datasets.features.features.Array"
"""Start of the names of Array2D to Array5D of Hugging Face datasets."""
_TENSOR_TYPES = frozenset(
    {"arrow.fixed_shape_tensor", "ray.data.arrow_tensor", "ray.data.arrow_tensor_v2"}
)
"""Extension types with the same shape in all rows. pyarrow knows Ray's types only in processes that
have imported Ray Data.
"""


def column_types(schema: Any, where: str) -> dict[str, ColumnType]:
    """Return the columns of an Arrow schema. Raises DataError if two have the same name."""
    columns = {field.name: _column_type(field) for field in schema}
    if len(columns) < len(schema):
        raise DataError("two columns have the same name", where=where, hint="Rename one of them.")
    return columns


def first_row_types(batch: Any, where: str) -> dict[str, ColumnType]:
    """Return the columns of a record batch, with the shapes of its first row.

    Raises DataError if the first row has nulls.
    """
    columns = column_types(batch.schema, where)
    for name, kind in columns.items():
        if None in kind.dims:
            column, dims = _decode(batch.column(name).slice(0, 1)), list[int]()
            while _is_list(column.type):
                _check_no_nulls(column, f"{where}, column {name!r}", 0, 1)
                dims.append(len(column[0]) if len(column) else 0)
                column = _decode(column.flatten())
            columns[name] = ColumnType(kind.dtype, tuple(dims))
    return columns


def dense(batch: Any, name: str, where: str, start: int, sizes: Sizes) -> Array:
    """Return a column of a record batch of n rows as an array (n, *dims).

    Args:
        batch: the record batch.
        name: name of the column.
        where: name of the file in errors.
        start: number of the batch's first row in the file.
        sizes: declared lengths, to which those of the rows are compared.

    Raises:
        DataError: there are nulls, or a row does not have the declared lengths.
    """
    column, place = _decode(batch.column(name)), f"{where}, column {name!r}"
    tensor = _tensor_shape(batch.schema.field(name))
    if tensor is not None:
        return _dense_tensors(column, tensor, place, start)
    shape = [len(column)]
    while _is_list(column.type):
        lists_per_row = prod(shape[1:])
        _check_no_nulls(column, place, start, lists_per_row)
        if pa.types.is_fixed_size_list(column.type):
            length = int(column.type.list_size)
            sizes.expect(name, len(shape), length, place)
        else:
            length = _common_length(column, name, len(shape), place, start, lists_per_row, sizes)
        shape.append(length)
        column = _decode(column.flatten())
    return _to_array(column, shape, place, start)


def block_of(
    batch: Any, names: list[str], where: str, start: int, sizes: Sizes
) -> dict[str, Array]:
    """Return some columns of a record batch; see `dense`."""
    return {name: dense(batch, name, where, start, sizes) for name in names}


def _column_type(field: Any) -> ColumnType:
    tensor, kind = _tensor_shape(field), field.type
    if tensor is not None:
        kind = (
            kind.storage_type.value_type
            if isinstance(kind, pa.BaseExtensionType)
            else kind.value_type
        )
        return ColumnType(_DTYPE_NAMES.get(str(kind), str(kind)), tensor)
    dims: list[int | None] = []
    kind = _decoded_type(kind)
    while _is_list(kind):
        dims.append(kind.list_size if pa.types.is_fixed_size_list(kind) else None)
        kind = _decoded_type(kind.value_type)
    return ColumnType(_DTYPE_NAMES.get(str(kind), str(kind)), tuple(dims))


def _is_list(kind: Any) -> bool:
    """Return True if a type's values are lists.

    Structs and maps are nested, too, but are not arrays.
    """
    return bool(
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or pa.types.is_fixed_size_list(kind)
        or _is_view(kind)
    )


def _is_view(kind: Any) -> bool:
    """Return True if a type is a list view, whose lists may be in any order in memory, and may
    overlap.
    """
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def _is_array_of_datasets(kind: Any) -> bool:
    """Return True for the nested lists of Hugging Face datasets, an extension type in processes
    that have imported it.
    """
    return isinstance(kind, pa.BaseExtensionType) and kind.extension_name.startswith(_ARRAYS)


def _is_encoded(kind: Any) -> bool:
    return bool(
        pa.types.is_run_end_encoded(kind)
        or pa.types.is_dictionary(kind)
        or _is_array_of_datasets(kind)
    )


def _decoded_type(kind: Any) -> Any:
    while _is_encoded(kind):
        kind = kind.storage_type if _is_array_of_datasets(kind) else kind.value_type
    return kind


def _decode(column: Any) -> Any:
    """Return a column without run-end or dictionary encoding."""
    while _is_encoded(column.type):
        if _is_array_of_datasets(column.type):
            column = column.storage
        else:
            column = (
                pc.run_end_decode(column)
                if pa.types.is_run_end_encoded(column.type)
                else column.dictionary_decode()
            )
    return column


def decoded_bytes(batch: Any) -> int:
    """Return the approximate size in bytes of a record batch's columns as arrays, independent of
    their encoding.
    """
    total = 0
    for column in batch.columns:
        entries = column.storage if isinstance(column.type, pa.BaseExtensionType) else column
        while _is_list(_decoded_type(entries.type)):
            entries = _decode(entries).flatten()
        kind = _decoded_type(entries.type)
        total += len(entries) * (
            max(1, kind.bit_width // 8) if pa.types.is_primitive(kind) else _MAX_ITEM_BYTES
        )
    return max(total, int(batch.nbytes))


def _tensor_shape(field: Any) -> tuple[int, ...] | None:
    """Return the shape of a row if the column's type is one of tensors in C order; None
    otherwise.
    """
    if isinstance(field.type, pa.BaseExtensionType):
        order = getattr(field.type, "permutation", None)
        in_order = order is None or list(order) == sorted(order)
        return (
            tuple(field.type.shape)
            if field.type.extension_name in _TENSOR_TYPES and in_order
            else None
        )
    about = field.metadata or {}
    if about.get(b"ARROW:extension:name", b"").decode() not in _TENSOR_TYPES:
        return None
    try:
        shape = parse_json(about[b"ARROW:extension:metadata"])
    except (KeyError, ValueError):
        return None  # treated as lists, whose lengths are known from their values
    return (
        tuple(shape)
        if isinstance(shape, list) and all(isinstance(length, int) for length in shape)
        else None
    )


def _dense_tensors(column: Any, shape: tuple[int, ...], place: str, start: int) -> Array:
    storage = column.storage if isinstance(column.type, pa.BaseExtensionType) else column
    _check_no_nulls(storage, place, start, 1)
    flat = storage.flatten()
    values_per_row = prod(shape)
    lengths = (
        np.full(1, storage.type.list_size)
        if pa.types.is_fixed_size_list(storage.type)
        else np.diff(storage.offsets.to_numpy())
    )
    wrong = np.flatnonzero(lengths != values_per_row)
    if wrong.size:
        raise DataError(
            "a tensor does not have the shape that its column declares",
            where=f"{place}, row {start + int(wrong[0])}",
            expected=f"{values_per_row} values, shape {shape}",
            got=f"{int(lengths[wrong[0]])} values",
            hint="Write the file again.",
        )
    return _to_array(flat, [len(storage), *shape], place, start)


def _to_array(column: Any, shape: list[int], place: str, start: int) -> Array:
    _check_no_nulls(column, place, start, prod(shape[1:]))
    values: Array = column.to_numpy(zero_copy_only=False)
    return values.reshape(shape)


def _common_length(
    column: Any, name: str, dim: int, place: str, start: int, lists_per_row: int, sizes: Sizes
) -> int:
    """Return the common length of all lists of a list array.

    Raises DataError for the first row with another length.
    """
    lengths = (
        pc.list_value_length(column).to_numpy()
        if _is_view(column.type)
        else np.diff(column.offsets.to_numpy())
    )
    if not lengths.size:
        return sizes.bind(name, dim, 0)
    common = sizes.bind(name, dim, int(lengths[0]))
    wrong = np.flatnonzero(lengths != common)
    if wrong.size:
        sizes.expect(
            name,
            dim,
            int(lengths[wrong[0]]),
            f"{place}, row {start + int(wrong[0]) // lists_per_row}",
        )
    return common


def _check_no_nulls(column: Any, place: str, start: int, entries_per_row: int) -> None:
    if column.null_count:
        first = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise DataError(
            "the data contains nulls",
            where=f"{place}, row {start + first // max(1, entries_per_row)}",
            expected="no nulls",
            got=f"{column.null_count} nulls in one block of rows",
            hint="Fill them in or drop the rows.",
        )
