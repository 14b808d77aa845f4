"""The code in an error's page, written from the user's own expressions.

Every kind of statement is covered, without a capture.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from trainload.capture.source import control_flow_rewrite, state_rewrite
from trainload.capture.source.control_flow_rewrite import text_of
from trainload.capture.source.expression_spot import Spot, spot_of
from trainload.capture.source.operator_registration import derivative, fake_kernel
from trainload.capture.source.source_place import place_at

Writer = Callable[[Spot | None], str]
GUARD = "if not torch.compiler.is_exporting():  # in eager mode only"
ROUNDS = "in range(10):  # an upper bound of the number of iterations"


def spot_in(source: str, path: Path) -> Spot:
    """Return the expression between « and », which are in one line of the body of a function."""
    lines = ["def middle(self, x, y, n):", *(f"    {line}" for line in source.splitlines())]
    number = next(at for at, line in enumerate(lines) if "«" in line)
    start, end = lines[number].index("«"), lines[number].index("»") - 1
    path.write_text("".join(f"{line}\n" for line in lines).replace("«", "").replace("»", ""))
    spot = spot_of(place_at(str(path), "middle", (number + 1, start, number + 1, end)))
    assert spot is not None
    return spot


BRANCHES = {
    "an assignment": ("if «x.sum() > 0»:\n    x = x * 2", "x = torch.where(x.sum() > 0, x * 2, x)"),
    "one of two assignments": (
        "if «x.sum() > 0»:\n    z = x * 2\nelse:\n    z = x",
        "z = torch.where(x.sum() > 0, x * 2, x)",
    ),
    "one of two returns": (
        "if «x.sum() > 0»:\n    return x\nelse:\n    return y",
        "return torch.where(x.sum() > 0, x, y)",
    ),
    "a return before a return": (
        "if «x.sum() > 0»:\n    return x\nreturn y",
        "return torch.where(x.sum() > 0, x, y)",
    ),
    "a return before other statements": (
        "if «x.sum() > 0»:\n    return x\ny = y * 2\nreturn y",
        control_flow_rewrite._WHERE,
    ),
    "what ends a loop": (
        "for row in y:\n    if «row.sum() > 0»:\n        break\n    x = x + row",
        control_flow_rewrite._WHERE,
    ),
    "several statements": (
        "if «x.sum() > 0»:\n    x = x * 2\n    y = x + 1",
        (
            "def when_true(x, y):\n"
            "    x = x * 2\n"
            "    y = x + 1\n"
            "    return x, y\n"
            "x, y = torch.cond(x.sum() > 0, when_true, lambda x, y: (x.clone(), y.clone()), (x,"
            " y,))"
        ),
    ),
    "many statements with others": (
        (
            "if «x.sum() > 0»:\n"
            "    x = x * 2\n"
            "    x = x * 2\n"
            "    x = x * 2\n"
            "    x = x * 2\n"
            "else:\n"
            "    x = y\n"
            "    x = -x"
        ),
        (
            "def when_true(x):\n"
            "    ...  # the lines under the if\n"
            "    return x\n"
            "x = torch.cond(x.sum() > 0, when_true, when_false, (x,))"
        ),
    ),
    "a check": (
        "if «x.isnan().any()»:\n    raise ValueError('nan')",
        f"{GUARD}\n    if x.isnan().any():\n        raise ValueError('nan')",
    ),
    "an assertion": (
        "assert «(x > 0).all()», 'negative'",
        f"{GUARD}\n    assert (x > 0).all(), 'negative'",
    ),
    "a conditional expression": (
        "z = (x if «x.sum() > 0» else y) * 2",
        "z = torch.where(x.sum() > 0, x, y) * 2",
    ),
    "a loop": (
        "while «x.max() > 1»:\n    x = x / 2",
        f"for _ {ROUNDS}\n    x = torch.where(x.max() > 1, x / 2, x)",
    ),
    "a loop of several statements": (
        "while «x.max() > 1»:\n    x = x / 2\n    y = y + 1",
        f"for _ {ROUNDS}\n    x = torch.where(x.max() > 1, after_a_round, x)",
    ),
    "and": (
        "if «x.sum() > 0» and not bool(y.any()):\n    x = y",
        "x = torch.where((x.sum() > 0) & torch.logical_not(y.any()), y, x)",
    ),
    "or": (
        "if «x.sum() > 0» or -y.sum() > 1:\n    x = y",
        "x = torch.where((x.sum() > 0) | (-y.sum() > 1), y, x)",
    ),
    "torch.equal": ("if «torch.equal(x, y)»:\n    x = y", "x = torch.where((x == y).all(), y, x)"),
    "torch.allclose": (
        "if «torch.allclose(x, y)»:\n    x = y",
        "x = torch.where(torch.isclose(x, y).all(), y, x)",
    ),
    "a number that was taken out": (
        "n = x.max().item()\nif «n > 1»:\n    x = y",
        "n = x.max()  # a 0-dim tensor\nx = torch.where(n > 1, y, x)",
    ),
    "a number of entries": ("if «len(x[x > 0]) > 1»:\n    x = y", control_flow_rewrite._MASK),
    "a membership": ("if «x.sum() in (1, 2)»:\n    x = y", control_flow_rewrite._WHERE),
    "a value that nothing branches on": ("z = [«x.sum()»]", control_flow_rewrite._WHERE),
}
NUMBERS = {
    "a number": ("z = float(«x.max()»)", "z = x.max()  # a 0-dim tensor"),
    "a size": (
        "k = «int(x.max())»",
        (
            "k = x.max()  # a 0-dim tensor\n"
            "counted = torch.arange(most, device=k.device) < k  # instead of a size: a mask over"
            " `most` entries"
        ),
    ),
    "rounds": (
        "n = x.max().item()\nfor i in «range(n + 1)»:\n    y = y + 1",
        f"n = x.max()  # a 0-dim tensor\nfor i {ROUNDS}\n    y = torch.where(i < n + 1, y + 1, y)",
    ),
    "an index": ("return y[«x.argmax().item()»]", control_flow_rewrite.number(None)),
}
VALUES = {
    "a file": (
        "z = x * torch.load(«path»)",
        (
            'self.register_buffer("loaded", torch.load(path))  # in __init__\nself.loaded  # in'
            " forward"
        ),
    ),
    "a print": ("print(«x.sum()»)", f"{GUARD}\n    print(x.sum())"),
    "numpy": (
        "z = x * float(np.mean(«x.detach().cpu().numpy()», axis=0))",
        "z = x * torch.mean(x, axis=0)",
    ),
    "from numpy": ("z = torch.from_numpy(«numpy.exp(x.numpy())»)", "z = torch.exp(x)"),
    "a deep copy": (
        "z = «copy.deepcopy(x)»",
        "z = x.clone()  # a tensor; a module is copied in __init__",
    ),
    "a function of another library": (
        "z = «plot(x)»",
        f"{GUARD}\n    ...  # what needs values: prints, logs, plots",
    ),
}
DATA = {
    "an assignment": (
        "«self.seen.data» = x.data * 2",
        "with torch.no_grad():\n    self.seen.copy_(x * 2)",
    ),
    "a call": ("«self.seen.data».copy_(x)", "with torch.no_grad():\n    self.seen.copy_(x)"),
    "a read": ("z = «x.data» + 1", "z = x.detach() + 1"),
    "a read in a loop's head": ("for row in «x.data»:\n    y = y + row", "x.detach()"),
}
ATTRIBUTES = {
    "counting": (
        "«self.seen» += x.shape[0]",
        (
            'self.register_buffer("seen", torch.tensor(0))  # in __init__, with its first'
            " value\nself.seen.add_(x.shape[0])  # in forward"
        ),
    ),
    "an assignment": (
        "«self.last» = 3",
        (
            'self.register_buffer("last", torch.tensor(0))  # in __init__, with its first'
            " value\nself.last.copy_(3)  # in forward"
        ),
    ),
}
OUTSIDE = {
    "random": ("z = x * «random.random()»", "z = x * torch.rand(())"),
    "a number of numpy's draw": ("z = x * float(«np.random.randn()»)", "z = x * torch.randn(())"),
    "a seed": (
        "«torch.manual_seed(0)»",
        "Job(..., seed=0)  # the run draws from it; leave this line out",
    ),
    "a call": ("«SEEN.append(1)»", f"{GUARD}\n    SEEN.append(1)"),
    "a setting": (
        "z = x * «os.environ.get('GAIN')»",
        "self.setting = os.environ.get('GAIN')  # in __init__, once\nz = x * self.setting",
    ),
    "a name": (
        "z = x * «COUNT»",
        'batch["seen"]  # pass it in the batch, or keep it in a buffer of the model',
    ),
}
INPUT_WRITES = {
    "a statement": ("«x.add_(1, alpha=2)»", "x = x.add(1, alpha=2)"),
    "an expression": ("z = «x.mul_(2)» + y", "z = x.mul(2) + y"),
    "an element": ("«x[0]» = 1", "x = x.clone()\nx[0] = 1"),
    "an attribute": ("«self.seen» = x", "x = x.clone()  # before it is written to"),
}
PARAMETER_WRITES = {
    "a parameter": (
        "«self.gain».clamp_(-1, 1)",
        'register_parametrization(self, "gain", Constrained())  # in __init__',
    ),
}
WRITERS: dict[Writer, dict[str, tuple[str, str]]] = {
    control_flow_rewrite.branch: BRANCHES,
    control_flow_rewrite.number: NUMBERS,
    state_rewrite.values: VALUES,
    state_rewrite.data: DATA,
    state_rewrite.attribute: ATTRIBUTES,
    state_rewrite.outside: OUTSIDE,
    state_rewrite.input_write: INPUT_WRITES,
    state_rewrite.parameter_write: PARAMETER_WRITES,
}
CASES = [
    pytest.param(writer, *case, id=f"{writer.__name__}-{name}")
    for writer, cases in WRITERS.items()
    for name, case in cases.items()
]


@pytest.mark.parametrize(("writer", "source", "expected"), CASES)
def test_code_is_written_out_of_the_user_s_own_expressions(
    writer: Writer, source: str, expected: str, tmp_path: Path
) -> None:
    written = writer(spot_in(source, tmp_path / "model.py"))
    assert (
        written.endswith(expected)
        if writer is state_rewrite.parameter_write
        else written == expected
    )


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
def test_without_a_place_an_example_is_written(writer: Writer) -> None:
    compile(writer(None).replace("...,", ""), "example", "exec")


FIXED, DECLARED = "\n  rows = 4\n", "\n  rows = Dim('rows', max=8)\n"
SIZES = {
    "a length": (
        "z = x * «len(x)»",
        "",
        [
            "z = x * x.shape[0]",
            'Job(..., dynamic={"x": {0: Dim.STATIC}})  # the size of Job.batch and no other',
        ],
    ),
    "an int": ("z = x * «int(x.shape[0])»", "", ["z = x * x.shape[0]"]),
    "a float": ("z = x * «float(x.shape[0])»", "", ["z = x * torch.sym_float(x.shape[0])"]),
    "a loop over rows": (
        "for row in «x»:\n    y = y + row",
        "",
        ["x.sum(0)  # an operator over the dim, or torch.vmap(f)(x), in place of the loop"],
    ),
    "a number that was written out": (
        "z = «x.view(4, 2, 4)»",
        FIXED,
        ["z = x.view(x.shape[0], 2, 4)"],
    ),
    "what torch suggests": (
        "z = «x.view(4, 8)»",
        DECLARED + "L['batch']['tokens'].size()[1]",
        [
            "Job(..., dynamic={\"tokens\": {1: Dim('rows', max=8)}})  # these sizes and no others",
            (
                "freeze(job, path, apply_suggested_fixes=True)  # --apply-suggested-fixes: declares"
                " what torch suggests"
            ),
        ],
    ),
    "a list of numbers": (
        "for n in «x.tolist()»:\n    y = y + n",
        "",
        [control_flow_rewrite.number(None)],
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_size_follows_the_input_or_is_declared(name: str, tmp_path: Path) -> None:
    source, said, expected = SIZES[name]
    written = control_flow_rewrite.size(spot_in(source, tmp_path / "model.py"), said, "x")
    assert all(each in written for each in expected), written


def test_a_condition_is_found_from_the_whole_branch(tmp_path: Path) -> None:
    spot = spot_in("«assert not x.isnan().any()»", tmp_path / "model.py")
    assert (text_of(spot.node), type(spot.test_of).__name__) == ("x.isnan().any()", "Assert")


def test_a_file_that_is_no_python_has_no_expressions(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("def middle(:\n")
    assert spot_of(place_at(str(tmp_path / "model.py"), "middle", (1, 0, 1, 3))) is None


@pytest.mark.parametrize(
    ("said", "operator"),
    [
        ("no fake impl registered for mine::part.default", "mine::part"),
        ("Unsupported: torch.ops.mine.part", "mine::part"),
        ("nothing of the kind", "my_library::my_operator"),
    ],
)
def test_a_kernel_is_written_for_the_operator_that_torch_names(said: str, operator: str) -> None:
    assert f'@torch.library.register_fake("{operator}")' in fake_kernel(said)
    assert f'torch.library.register_autograd("{operator}", backward' in derivative(said)


def test_an_operator_of_torch_is_wrapped_in_one_of_the_user_s_own() -> None:
    assert re.search(r'custom_op\("my_library::fft_c2c"', fake_kernel("aten::_fft_c2c"))
