from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainload.core.canonical_json import canonical_json, parse_canonical
from trainload.core.errors import IntegrityError, PackageError, UnsafePackageError

_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(_VALUES)
def test_what_is_written_reads_back_as_the_same_value_and_bytes(value: object) -> None:
    data = canonical_json(value)
    again = parse_canonical(data, "x")
    assert again == value
    assert canonical_json(again) == data


def test_keys_are_sorted_and_nothing_is_spaced() -> None:
    assert canonical_json({"b": [1, 2.5], "a": "é"}) == '{"a":"é","b":[1,2.5]}'.encode()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800", {1, 2}, object()])
def test_what_json_cannot_say_is_refused(value: object) -> None:
    with pytest.raises(PackageError, match="cannot be written"):
        canonical_json([value])


def test_a_duplicate_key_is_refused_by_name() -> None:
    with pytest.raises(UnsafePackageError, match=r"duplicate key.*'size'"):
        parse_canonical(b'{"size":1,"size":2}', "m.json")


@pytest.mark.parametrize("text", [b"NaN", b"[Infinity]", b"[-Infinity]", b"1e999"])
def test_a_number_that_is_not_finite_is_refused(text: bytes) -> None:
    with pytest.raises(UnsafePackageError):
        parse_canonical(text, "m.json")


@pytest.mark.parametrize("text", [b"\xff", b'"\xed\xa0\x80"', b"{", b"", b"1 2", b"9" * 5000])
def test_what_is_no_json_in_utf8_is_refused(text: bytes) -> None:
    with pytest.raises(IntegrityError, match=r"m\.json"):
        parse_canonical(text, "m.json")


@pytest.mark.parametrize("text", [b'{ "a":1}', b'{"b":1,"a":2}', b"1.0e0", b'"\\u0041"', b"[1]\n"])
def test_json_in_another_form_is_refused(text: bytes) -> None:
    json.loads(text)
    with pytest.raises(IntegrityError, match="canonical"):
        parse_canonical(text, "m.json")


@pytest.mark.parametrize(
    "text", [b"[" * 1_000_000, b'{"a":' * 1_000_000, b"[" * 1000 + b"]" * 1000]
)
def test_deep_nesting_is_refused_without_recursion(text: bytes) -> None:
    with pytest.raises(UnsafePackageError, match="nested"):
        parse_canonical(text, "m.json")


def test_brackets_within_strings_are_not_nesting() -> None:
    text = canonical_json(["[" * 1000 + '\\"{{{'])
    assert parse_canonical(text, "m.json", max_depth=1) == ["[" * 1000 + '\\"{{{']


def test_a_large_file_is_refused_unread() -> None:
    with pytest.raises(UnsafePackageError, match="too large"):
        parse_canonical(b"[" * 101, "m.json", max_bytes=100)
