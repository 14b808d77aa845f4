"""Probes of nodes: a node that responds late is not considered lost forever."""

from __future__ import annotations

from typing import Any

import pytest

from trainload.launching.cluster import tasks
from trainload.launching.cluster.tasks import NodeProbe


class Task:
    """A fake remote task that probes a node."""

    def __init__(self, node: str, asked: list[str]) -> None:
        self.node, self._asked = node, asked

    def options(self, **_: int) -> Task:
        return self

    def remote(self) -> Task:
        self._asked.append(self.node)
        return Task(self.node, self._asked)


class Cluster:
    """Fake cluster in which the nodes in `answering` respond to probes.

    `asked`: the probed nodes, in order. `taken_back`: nodes whose probes were cancelled.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.taken_back: list[str] = []
        self.answering: set[str] = set()

        def wait(questions: list[Task], **_: float) -> tuple[list[Any], list[Any]]:
            return [each for each in questions if each.node in self.answering], []

        monkeypatch.setattr(tasks, "on_node", lambda node: lambda _function: Task(node, self.asked))
        monkeypatch.setattr("ray.wait", wait)
        monkeypatch.setattr("ray.get", lambda question: True)
        monkeypatch.setattr("ray.cancel", lambda question: self.taken_back.append(question.node))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def test_a_node_that_answers_late_is_there_again_without_another_question(cluster: Cluster) -> None:
    questions = NodeProbe()
    cluster.answering = {"a"}
    assert questions.unreachable(["a", "b"]) == {"b"}
    assert questions.unreachable(["b"]) == {"b"}
    cluster.answering = {"b"}
    assert questions.unreachable(["b"]) == set()
    assert (sorted(cluster.asked), cluster.taken_back) == (["a", "b"], [])


def test_one_that_has_answered_is_asked_anew(cluster: Cluster) -> None:
    questions = NodeProbe()
    cluster.answering = {"a"}
    assert questions.unreachable(["a"]) == set()
    cluster.answering = set()
    assert questions.unreachable(["a"]) == {"a"}
    assert cluster.asked == ["a", "a"]


def test_nodes_that_are_gone_are_waited_for_no_more(cluster: Cluster) -> None:
    questions = NodeProbe()
    questions.unreachable(["a", "b"])
    questions.forget(["b"])
    questions.forget(["b"])
    assert cluster.taken_back == ["a"]
