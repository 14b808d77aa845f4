"""A model that cannot be captured gets one page with its line, the cause and the rewrite."""

from __future__ import annotations

import functools
import inspect
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.capture import refused
from tests.capture.diagnostics.test_docs import ANCHORS
from tests.capture.jobs import Model, job
from tests.capture.refused import CAPTURED, REFUSED, Refused
from torch import nn

from trainload.capture.source.source_place import place_of_error
from trainload.capture.tracing.trace import capture
from trainload.core.errors import CaptureError
from trainload.core.finding import LINES, LONGEST, WIDTH, Finding, Place, page

one_of_each_cause = pytest.mark.matrix(kind=lambda case: case.cause)
every = pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.function.__name__)


@functools.cache
def error_of(case: Refused) -> CaptureError:
    """Return the error that capturing such a model raises."""
    model = Model(case.function, gain=nn.Parameter(torch.ones(8)), seen=torch.zeros(8))
    parts: Any = model
    parts.calls, parts.history = 0, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CaptureError) as raised:
            capture(job(model), strict=False)  # the strict mode captures some of them
    return raised.value


def blamed(case: Refused) -> tuple[int, str]:
    """Return the line at fault and the expression in it, from the comment above it."""
    lines, first = inspect.getsourcelines(case.function)
    number, line = next((n, line) for n, line in enumerate(lines, first) if "# -> " in line)
    return number + 1, line.partition("# -> ")[2].strip()


@one_of_each_cause
@every
def test_the_cause_is_named(case: Refused) -> None:
    assert error_of(case).findings[0].cause == case.cause


@one_of_each_cause
@every
def test_the_line_is_the_one_to_blame(case: Refused) -> None:
    place = error_of(case).findings[0].place
    assert place is not None
    assert Path(place.file).name == "refused.py"
    assert place.line == blamed(case)[0]
    assert str(place) in str(error_of(case))


@one_of_each_cause
@every
def test_the_caret_stands_under_the_expression(case: Refused) -> None:
    place = error_of(case).findings[0].place
    assert place is not None
    assert place.expression == blamed(case)[1]
    source, carets = next(
        (a, b)
        for a, b in zip(*[str(error_of(case)).splitlines()[n:] for n in (0, 1)], strict=False)
        if "^^" in b
    )
    assert source[carets.index("^") : len(carets)] == blamed(case)[1]


@one_of_each_cause
@every
def test_the_rewrite_is_there(case: Refused) -> None:
    assert case.rewrite in error_of(case).findings[0].rewrite
    lines = [line for line in case.rewrite.splitlines() if line]
    assert [line for line in lines if line not in str(error_of(case))] == []


@one_of_each_cause
@every
def test_the_message_fits_a_page(case: Refused) -> None:
    lines = str(error_of(case)).splitlines()
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= LONGEST


@one_of_each_cause
@every
def test_the_first_sentence_ends(case: Refused) -> None:
    text = str(error_of(case))
    assert re.match(r"[^\n]*(\n[^\n]+)??\.\n", text)


@one_of_each_cause
@every
def test_the_link_leads_to_a_section(case: Refused) -> None:
    found = re.findall(r"docs/guides/capture\.md#([\w-]+)", str(error_of(case)))
    assert found[0] == case.cause
    assert set(found) <= ANCHORS


@one_of_each_cause
@every
def test_the_page_survives_pickling(case: Refused) -> None:
    error = error_of(case)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.findings) == (type(error), str(error), error.findings)


@pytest.mark.matrix(when=lambda function: CAPTURED.index(function) % 4 == 0)
@pytest.mark.parametrize("function", CAPTURED, ids=lambda function: function.__name__)
def test_what_looks_suspicious_and_is_sound_is_captured(function: Any) -> None:
    capture(job(Model(function)))


# A rewrite is code to be pasted

PASTED = {
    "an if": "    if x.sum() > 0:\n        x = x * 2\n",
    "an if with an else": (
        "    if x.sum() > 0:\n        y = x * 2\n    else:\n        y = x * 3\n    x = y\n"
    ),
    "an if of two lines": "    if x.sum() > 0:\n        x = x * 2\n        x = x + 1\n",
    "a conditional expression": "    x = x * 2 if x.mean() > 0 else x + 1\n",
    "a while": "    while x.abs().max() > 0.5:\n        x = x / 2\n",
    "an assertion": "    assert (x.abs() < 1e6).all(), 'overflow'\n",
    "a check": "    if x.isnan().any():\n        raise ValueError('nan')\n",
    "a conjunction": "    if m.training and x.mean() > -1e9:\n        x = x * 3\n",
    "an equality": "    x = x if torch.equal(x, x * 2) else x * 2\n",
    "an item": "    n = x.detach().abs().max().item()\n    if n > 0.1:\n        x = x * 2\n",
    "rounds": (
        "    n = x.detach().abs().max().long().item()\n"
        "    for i in range(n + 1):\n"
        "        x = x + 1\n"
    ),
    "numpy": "    x = x * float(np.mean(x.detach().numpy()))\n",
    "a formatted print": "    print(f'{x.sum():.2f}')\n",
    "a deep copy": "    x = x * copy.deepcopy(m.gain)\n",
    ".data": "    m.seen.data.copy_(x.detach().mean(0))\n    x = x + m.seen\n",
    "a size": "    x = x.view(4, 2, 4).flatten(1)\n",
    "an int of a size": "    x = x * int(x.shape[0])\n",
    "a float of a size": "    x = x * float(x.shape[0])\n",
    "a length": "    x = x * len(x)\n",
}


@pytest.mark.matrix("an if with an else", "an assertion")
@pytest.mark.parametrize("name", PASTED)
# Not every statement uses the model's gain.
@pytest.mark.filterwarnings("ignore:1 parameters get no gradient")
# torch itself causes this warning in torch.cond.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_pasted_rewrite_mends_the_model_and_computes_the_same(name: str, tmp_path: Path) -> None:
    statements = PASTED[name]
    failing = function_of(statements, tmp_path / "failing.py")
    with pytest.raises(CaptureError) as raised:
        capture(job(model_of(failing)), strict=False)
    place, rewrite = raised.value.findings[0].place, raised.value.findings[0].rewrite
    assert place is not None
    pasted = "".join(
        f"    {line}\n" for line in rewrite.splitlines() if not line.startswith("Job(")
    )
    mended = function_of(replaced(statements, place.line - 5, pasted), tmp_path / "mended.py")
    capture(job(model_of(mended)))
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    before, after = model_of(failing), model_of(mended)
    torch.testing.assert_close(after(x), before(x))


def function_of(statements: str, path: Path) -> Any:
    """Return a function of (m, x) with these statements; the first one is in line 5 of a file."""
    path.write_text(
        "import copy\n"
        "import numpy as np\n"
        "import torch\n"
        "def middle(m, x):\n"
        f"{statements}    return x\n"
    )
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    return names["middle"]


def replaced(statements: str, line: int, pasted: str) -> str:
    """Return `statements` with the one that begins at `line` replaced."""
    lines = statements.splitlines(keepends=True)
    end = line + 1
    while end < len(lines) and (lines[end].startswith("     ") or lines[end].strip() == "else:"):
        end += 1
    return "".join([*lines[:line], pasted, *lines[end:]])


def model_of(function: Any) -> Model:
    torch.manual_seed(0)
    return Model(function, gain=nn.Parameter(torch.ones(8)), seen=torch.zeros(8))


# Several causes at once


def three(m: Any, x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        x = x * 2
    n = int(x.detach().abs().max())
    for _ in range(n):
        x = x + 1
    m.calls += 1
    return x.view(4, 8)


def many(_: Any, x: torch.Tensor) -> torch.Tensor:
    if x[0, 0] > 0:
        x = x + 1
    if x[0, 1] > 0:
        x = x + 1
    if x[0, 2] > 0:
        x = x + 1
    if x[0, 3] > 0:
        x = x + 1
    if x[0, 4] > 0:
        x = x + 1
    if x[0, 5] > 0:
        x = x + 1
    return x


def raised_by(function: Any) -> CaptureError:
    model: Any = Model(function)
    model.calls = 0
    with pytest.raises(CaptureError) as raised:
        capture(job(model))
    return raised.value


def test_all_causes_of_a_model_are_found_in_one_go() -> None:
    first = inspect.getsourcelines(three)[1]
    found = [
        (f.cause, f.place.line - first) for f in raised_by(three).findings if f.place is not None
    ]
    assert found == [
        ("data-dependent-branch", 1),
        ("data-dependent-shape", 3),
        ("specialised-dim", 7),
        ("module-changed-in-forward", 6),
    ]


def test_at_most_five_are_shown_and_the_others_counted() -> None:
    error = raised_by(many)
    assert len(error.findings) == 6
    text = str(error)
    assert "  5. " in text
    assert "  6. " not in text
    assert "and 1 more" in text
    assert len(text.splitlines()) <= LINES


@pytest.mark.matrix("_collect_findings")
@pytest.mark.parametrize("part", ["_collect_findings", "watch", "control_flow_rewrite.branch"])
def test_a_part_of_the_search_that_fails_does_not_hide_the_first_cause(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(f"trainload.capture.diagnostics.blame.{part}", fails)
    assert [f.cause for f in raised_by(refused.an_if).findings] == ["data-dependent-branch"]


@pytest.mark.slow  # output next to the page is harmless
def test_the_search_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    raised_by(refused.a_branch_on_the_size)
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")


def test_a_branch_that_the_model_catches_is_named() -> None:
    def swallowed(_: Any, x: torch.Tensor) -> torch.Tensor:
        try:
            return x * 2 if x.sum() > -1e9 else x
        except RuntimeError:
            return x

    error = raised_by(swallowed)
    assert [(f.cause, f.place.expression) for f in error.findings if f.place is not None] == [
        ("data-dependent-branch", "x.sum() > -1e9")
    ]


def test_an_error_that_eager_mode_raises_too_may_be_caught() -> None:
    def tries(_: Any, x: torch.Tensor) -> torch.Tensor:
        try:
            return torch.cat([x, x[:, :4]])
        except RuntimeError:
            return x * 2

    capture(job(Model(tries)))


# The page itself


def test_a_page_of_long_lines_is_cut_at_the_width_and_keeps_the_caret() -> None:
    source = "x = " + " + ".join(f"part_{n}" for n in range(60)) + " + culprit"
    place = Place("model.py", 3, "forward", source, source.index("culprit"), len(source))
    finding = Finding(
        "data-write",
        "something happens",
        "Do " + "this and " * 40 + "that.",
        "\n".join(["line"] * 40),
        place,
    )
    text = page(
        "model.py:3: it cannot be captured: something happens.",
        [finding] * 9,
        "torch says: " + "no " * 200,
    )
    lines = text.splitlines()
    assert len(lines) <= LINES
    assert max(len(line) for line in lines if line.startswith("    ")) <= WIDTH
    caret = next(line for line in lines if "^" in line)
    assert lines[lines.index(caret) - 1][caret.index("^") :] == "culprit"


def test_a_sentence_can_be_searched_for_however_long_its_paths_are() -> None:
    for length in range(1, 300):
        place = Place("d" * length + ".py", 3, "forward")
        finding = Finding(
            "data-write", "two tensors share memory", "Clone one of them.", place=place
        )
        text = page(f"the tensor at {place} and another one share memory.", [finding], "")
        assert "share memory" in text and "Clone one of them." in text


def test_a_place_counts_characters_not_bytes(tmp_path: Path) -> None:
    path = tmp_path / "wide.py"
    path.write_text("def f(x):\n    größe = 'äöü'; x.missing()\n", encoding="utf-8")
    names: dict[str, Any] = {}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), names)
    with pytest.raises(AttributeError) as raised:
        names["f"](1)
    place = place_of_error(raised.value)
    assert place is not None
    assert place.expression == "x.missing"


def test_a_place_in_the_current_folder_is_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text("def f(x):\n    return x.missing\n")
    names: dict[str, Any] = {}
    exec(compile((tmp_path / "model.py").read_text(), str(tmp_path / "model.py"), "exec"), names)
    with pytest.raises(AttributeError) as raised:
        names["f"](1)
    assert str(place_of_error(raised.value)) == "model.py:2"
