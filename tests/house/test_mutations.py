"""The breaks that `make mutate` applies match the code."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.breaks.mutation import Mutation
from tests.house.source import ROOT
from tests.mutations import MUTATIONS

LAWS = range(1, 8)


@pytest.mark.parametrize(
    "mutation", MUTATIONS, ids=lambda mutation: f"{mutation.law} {mutation.name}"
)
def test_what_a_break_replaces_occurs_once(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.new != mutation.old


@pytest.mark.parametrize(
    "mutation", MUTATIONS, ids=lambda mutation: f"{mutation.law} {mutation.name}"
)
def test_the_test_that_must_notice_a_break_is_one_of_its_law_or_of_a_stage(
    mutation: Mutation,
) -> None:
    file, _, node = mutation.test.partition("::")
    assert file == f"test_law_{mutation.law}.py" or file.startswith("../")
    assert f"def {node.partition('[')[0]}(" in (ROOT / "tests/laws" / file).read_text()


def test_every_law_has_two_breaks() -> None:
    count = Counter(mutation.law for mutation in MUTATIONS)
    assert set(count) == set(LAWS)
    assert min(count.values()) >= 2


def test_no_two_breaks_have_one_name() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
