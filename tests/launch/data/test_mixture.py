"""Mixtures: how they are read, the order of their batches, and what is rejected early."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.export import Dim

import trainload
from trainload.core.errors import DataError, PlanError
from trainload.launching.data.batch_order import LONGEST_CYCLE, BatchOrder, cycle_counts
from trainload.launching.data.mixture import parts_of
from trainload.launching.data.run_data import check_run_data, open_run_data
from trainload.launching.data.sampler import rows
from trainload.packaging.package import Package

ORDER = BatchOrder(7, (50, 9, 33), (3, 1, 2))


def test_one_part_is_read_as_without_a_mixture() -> None:
    order = BatchOrder(7, (50,))
    assert order.part(11) == (0, 11)
    assert np.array_equal(order.rows(0, 11, 24, 6, 5), rows(7, 50, 11 * 24 + 6, 5))


def test_every_cycle_has_each_parts_batches() -> None:
    for cycle in range(4):
        assert Counter(ORDER.part(number)[0] for number in range(6 * cycle, 6 * cycle + 6)) == {
            0: 3,
            1: 1,
            2: 2,
        }


def test_cycles_are_in_different_orders() -> None:
    orders = {
        tuple(ORDER.part(number)[0] for number in range(6 * cycle, 6 * cycle + 6))
        for cycle in range(10)
    }
    assert len(orders) > 3


def test_a_batch_knows_how_many_of_its_part_came_before() -> None:
    seen: Counter[int] = Counter()
    for number in range(40):
        part, before = ORDER.part(number)
        assert before == seen[part]
        seen[part] += 1


def test_every_row_of_a_part_comes_once_in_each_of_its_epochs() -> None:
    found = [
        ORDER.rows(part, before, 3, 0, 3)
        for part, before in map(ORDER.part, range(36))
        if part == 1
    ]
    stream = np.concatenate(found)
    assert [sorted(stream[start : start + 9]) for start in (0, 9)] == [list(range(9))] * 2


def test_another_seed_gives_another_order() -> None:
    other = BatchOrder(8, ORDER.sizes, ORDER.counts)
    assert [other.part(number) for number in range(24)] != [
        ORDER.part(number) for number in range(24)
    ]


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ((1.0,), (1,)),
        ((2.0, 1.0), (2, 1)),
        ((0.5, 0.25), (2, 1)),
        ((0.1, 0.2, 0.7), (1, 2, 7)),
        ((100, 300), (1, 3)),
        ((1, 1_000_000), (1, 1023)),
    ],
)
def test_weights_become_numbers_of_batches(
    weights: tuple[float, ...], counts: tuple[int, ...]
) -> None:
    assert cycle_counts(weights) == counts


@given(st.lists(st.one_of(st.integers(1, 10**12), st.floats(1e-6, 1e6)), min_size=1, max_size=40))
def test_the_numbers_are_near_the_weights(weights: list[float]) -> None:
    counts = cycle_counts(weights)
    assert min(counts) >= 1
    assert sum(counts) <= LONGEST_CYCLE
    for weight, count in zip(weights, counts, strict=True):
        assert (
            abs(count / sum(counts) - weight / sum(weights)) < len(weights) / LONGEST_CYCLE + 1e-9
        )


def write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_paths_start_at_the_mixtures_folder(tmp_path: Path) -> None:
    found = parts_of(
        write(
            tmp_path / "m.json",
            {"parts": [{"data": ["a.npz", "b.npz"]}, {"data": "/c.npz", "weight": 2.0}]},
        )
    )
    assert [part.source for part in found] == [
        [str(tmp_path / "a.npz"), str(tmp_path / "b.npz")],
        "/c.npz",
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not a valid mixture"),
        ({}, "parts"),
        ({"parts": []}, "parts"),
        ({"parts": [{}]}, "parts.0.data"),
        ({"parts": [{"data": "a.npz", "weight": 0}]}, "weight"),
        ({"parts": [{"data": "a.npz", "weight": -1.0}]}, "weight"),
        ({"parts": [{"data": "a.npz", "constant": {}}]}, "constant"),
        ({"parts": [{"data": "a.npz", "constants": {"a": [1]}}]}, "constants.a"),
        ('{"parts": [{"data": "a.npz", "weight": NaN}]}', "weight"),
        ({"parts": [{"data": "a.npz"}] * 257}, "parts"),
    ],
)
def test_what_is_no_mixture_is_refused(content: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=said):
        parts_of(write(tmp_path / "m.json", content))


def test_a_mixture_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such mixture"):
        parts_of(tmp_path / "m.json")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor, mask: Tensor | None = None, task: str = "a") -> Tensor:
        y = self.linear(x).squeeze(-1)
        y = y if mask is None else y * mask
        found: Tensor = y.square().mean() if task == "a" else y.abs().mean()
        return found


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    torch.manual_seed(0)
    x, mask = torch.randn(4, 6, 4), torch.ones(4, 6)
    job = trainload.Job(
        model=Model(),
        batch={"x": x, "task": "a"},
        variants={"masked": {"x": x, "mask": mask, "task": "a"}, "b": {"x": x, "task": "b"}},
        dynamic={name: {1: Dim("length", min=2, max=8)} for name in ("x", "mask")},
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    return trainload.freeze(job, tmp_path_factory.mktemp("mixture") / "job.tl")


def rows_file(path: Path, count: int = 5, length: int = 6, **more: Any) -> Path:
    columns: dict[str, Any] = {"x": np.ones((count, length, 4), np.float32), **more}
    np.savez(path, **columns)
    return path


def lists_file(path: Path, length: int) -> Path:
    kind = pa.list_(pa.list_(pa.float32()))
    pq.write_table(
        pa.table({"x": pa.array(np.ones((5, length, 4), np.float32).tolist(), type=kind)}), path
    )
    return path


def test_each_part_is_opened_for_the_variant_that_takes_it(
    package: Package, tmp_path: Path
) -> None:
    rows_file(tmp_path / "plain.npz")
    rows_file(tmp_path / "masked.npz", 3, 4, mask=np.ones((3, 4), np.float32))
    lists_file(tmp_path / "lists.parquet", 3)
    entries = [
        {"data": "plain.npz"},
        {"data": "masked.npz"},
        {"data": "lists.parquet", "constants": {"task": "b", "mask": None}},
    ]
    data = open_run_data(
        write(tmp_path / "m.json", {"parts": entries}), package, 2, tmp_path / "cache"
    )
    assert [part.variant for part in data.parts] == ["", "masked", "b"]
    assert data.rows == check_run_data(tmp_path / "m.json", package, 2) == 13
    assert {name: tuple(t.shape) for name, t in data.batch(1, np.array([2, 0])).items()} == {
        "mask": (2, 4),
        "x": (2, 4, 4),
    }


def test_without_weights_the_rows_weigh(package: Package, tmp_path: Path) -> None:
    rows_file(tmp_path / "a.npz", 4)
    rows_file(tmp_path / "b.npz", 12)
    mixture = write(tmp_path / "m.json", {"parts": [{"data": "a.npz"}, {"data": "b.npz"}]})
    assert open_run_data(mixture, package, 2, tmp_path / "cache").order(0).counts == (1, 3)


def test_the_fingerprint_is_of_rows_constants_and_weights(package: Package, tmp_path: Path) -> None:
    rows_file(tmp_path / "a.npz", 4)
    rows_file(tmp_path / "b.npz", 12)

    def fingerprint(*entries: dict[str, Any]) -> str:
        return open_run_data(
            write(tmp_path / "m.json", {"parts": entries}), package, 2, tmp_path / "cache"
        ).fingerprint

    one, two = {"data": "a.npz"}, {"data": "b.npz"}
    several = [
        fingerprint(one, two),
        fingerprint(two, one),
        fingerprint(one, {**two, "weight": 9.0}),
        fingerprint(one, {**two, "constants": {"task": "b"}}),
        fingerprint(one, one),
    ]
    assert len(set(several)) == len(several)


def test_a_part_alone_has_the_data_sets_fingerprint(package: Package, tmp_path: Path) -> None:
    path = rows_file(tmp_path / "a.npz")
    mixture = write(tmp_path / "m.json", {"parts": [{"data": "a.npz"}]})
    assert (
        len(
            {
                open_run_data(source, package, 2, tmp_path / "cache").fingerprint
                for source in (path, mixture)
            }
        )
        == 1
    )


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"data": "long.npz"}, r"part 2 .*long\.npz.*x\[1\]: expected 2 to 8, got 9"),
        ({"data": "long.parquet"}, r"part 2 .*x\[1\]: expected 2 to 8, got 9"),
        (
            {"data": "wrong.npz"},
            r"b: x: expected float32\[batch, x_1, 4\], got float64\[5, 6, 4\]|x: expected float32",
        ),
        ({"data": "fine.npz", "constants": {"task": "c"}}, "task: expected 'a', got 'c'"),
        (
            {"data": "fine.npz", "constants": {"color": 1}},
            "columns or constants that no graph takes: 'color'",
        ),
        ({"data": "more.npz"}, "columns or constants that no graph takes: 'y'"),
        (
            {"data": "uneven.npz"},
            r"mask\[1\]: expected 6, got 5|x\[1\]: expected 5, as mask\[1\], got 6",
        ),
        ({"data": "words.parquet"}, "dtype that inputs do not support"),
        ({"data": "null.parquet"}, "nulls"),
        ({"data": "empty.npz"}, "empty"),
        ({"data": "gone.npz"}, "no data was found"),
    ],
)
def test_data_that_fits_no_variant_is_refused_with_its_part(
    package: Package, entry: dict[str, Any], said: str, tmp_path: Path
) -> None:
    rows_file(tmp_path / "fine.npz")
    rows_file(tmp_path / "long.npz", length=9)
    rows_file(tmp_path / "wrong.npz", x=np.ones((5, 6, 4)))
    rows_file(tmp_path / "more.npz", y=np.ones(5, np.float32))
    rows_file(tmp_path / "uneven.npz", mask=np.ones((5, 5), np.float32))
    rows_file(tmp_path / "empty.npz", 0)
    lists_file(tmp_path / "long.parquet", 9)
    pq.write_table(pa.table({"x": ["a"]}), tmp_path / "words.parquet")
    pq.write_table(
        pa.table({"x": pa.array([None], type=pa.list_(pa.list_(pa.float32())))}),
        tmp_path / "null.parquet",
    )
    mixture = write(tmp_path / "m.json", {"parts": [{"data": "fine.npz"}, entry]})
    with pytest.raises(DataError, match=said):
        check_run_data(mixture, package, 2)


def test_a_length_outside_of_the_graphs_range_is_refused_without_variants_too(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    job = trainload.Job(
        model=Model(),
        batch={"x": torch.randn(4, 6, 4)},
        dynamic={"x": {1: Dim("length", max=8)}},
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    package = trainload.freeze(job, tmp_path / "job.tl")
    plan = trainload.plan(package, trainload.Cluster(), "single")
    with pytest.raises(DataError, match=r"x\[1\]: expected 0 to 8, got 9"):
        trainload.launch(
            package,
            plan,
            rows_file(tmp_path / "x.npz", length=9),
            run_dir=tmp_path / "run",
            backend="local",
        )
    assert not (tmp_path / "run").exists()


def test_more_rows_a_call_than_the_graph_takes_are_refused_by_the_plan(tmp_path: Path) -> None:
    torch.manual_seed(0)
    job = trainload.Job(
        model=Model(),
        batch={"x": torch.randn(4, 6, 4)},
        dynamic={"x": {0: Dim("rows", min=2, max=8)}},
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    package = trainload.freeze(job, tmp_path / "job.tl")
    cluster = trainload.Cluster(devices_per_node=2)
    assert trainload.plan(package, cluster, "zero0", global_batch=16).rows_per_call == 8
    with pytest.raises(PlanError, match=r"expected 2 to 8 rows, got 9"):
        trainload.plan(package, cluster, "zero0", global_batch=18)
