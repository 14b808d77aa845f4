"""A rank's reports of its activity."""

from __future__ import annotations

import threading

from trainload.launching.run.activity import Activity, Doing, Phase
from trainload.sharding.analysis.collectives import Collective

GATHER = Collective("all_gather_into_tensor", "data", "float32", 8)
SCATTER = Collective("reduce_scatter_tensor", "data", "float32", 16, "sum")
SUM = Collective("all_reduce", "tensor", "float32", 4, "sum")
CALLS = {"train": (GATHER, SUM, GATHER, SCATTER), "update": (SUM,)}


class Groups:
    """Fake count of collectives per process group."""

    def __init__(self) -> None:
        self.begun = {"data": 5, "tensor": 1}

    def __call__(self) -> dict[str, int]:
        return dict(self.begun)


def active() -> tuple[Activity, Groups]:
    activity, groups = Activity(), Groups()
    activity.know(CALLS, groups)
    return activity, groups


def test_a_rank_that_has_begun_nothing_says_so() -> None:
    assert str(Activity().now()).startswith("starting, last collective: no collective yet, at ")


def test_the_last_collective_is_named_with_its_place_in_the_graph() -> None:
    activity, groups = active()
    activity.at(Phase.STEP, 3)
    activity.calling("train")
    groups.begun["data"] += 2
    groups.begun["tensor"] += 1
    doing = activity.now()
    assert (doing.phase, doing.step, doing.issued) == (Phase.STEP, 3, 3)
    assert doing.collective == "all_gather_into_tensor of 8 float32 in data (3 of 4 of train)"


def test_groups_are_counted_apart() -> None:
    activity, groups = active()
    activity.calling("train")
    groups.begun["data"] += 1
    assert (
        activity.now().collective == "all_gather_into_tensor of 8 float32 in data (1 of 4 of train)"
    )


def test_before_a_call_has_begun_any_the_last_one_of_the_call_before_is_named() -> None:
    activity, groups = active()
    activity.calling("train")
    groups.begun["data"] += 3
    groups.begun["tensor"] += 1
    activity.calling("update")
    doing = activity.now()
    assert (doing.graph, doing.issued) == ("update", 0)
    assert doing.collective == "reduce_scatter_tensor sum of 16 float32 in data (4 of 4 of train)"


def test_every_mark_is_a_move() -> None:
    activity, _ = active()
    seen = []
    activity.at(Phase.DATA, 1)
    seen.append(activity.now().marks)
    activity.at(Phase.STEP)
    seen.append(activity.now().marks)
    activity.calling("train")
    seen.append(activity.now().marks)
    assert seen == [1, 2, 3]


def test_the_place_is_of_the_thread_that_made_it() -> None:
    activity, _ = active()
    found: list[Doing] = []
    here = threading.Event()

    def look() -> None:
        here.wait()
        found.append(activity.now())

    thread = threading.Thread(target=look)
    thread.start()
    here.set()
    thread.join()
    assert "look" not in found[0].place
    assert "test_activity.py" in found[0].place or "threading.py" in found[0].place
