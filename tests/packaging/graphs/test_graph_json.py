from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.packaging.jobs import Job, batch_of, exported
from torch.export import Dim, ExportedProgram

from trainload.core.canonical_json import canonical_json, parse_canonical
from trainload.core.errors import PackageError
from trainload.packaging.graphs.graph_json import graph_from_json, graph_to_json
from trainload.packaging.graphs.torch_operators import running_schema, schema_still_fits
from trainload.packaging.graphs.validate import validate_graph


def through_json(exported: ExportedProgram) -> ExportedProgram:
    """Serialise a program, and read it back with its own tensors."""
    document = parse_canonical(canonical_json(graph_to_json(exported).document), "graph")
    validate_graph(document, "graph")
    tensors = {n: t for n, t in exported.constants.items() if isinstance(t, torch.Tensor)}
    return graph_from_json(document, {**exported.state_dict, **tensors}, tensors)


def run(
    exported: ExportedProgram, *args: object, seed: int = 1
) -> tuple[Any, dict[str, torch.Tensor | None], dict[str, torch.Tensor]]:
    """Call a copy. Return outputs, gradients by parameter, and the state after the call."""
    module = exported.module(check_guards=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        module = copy.deepcopy(module)
    torch.manual_seed(seed)
    outputs = module(*args)
    outputs[0].sum().backward()
    return (
        outputs,
        {n: p.grad for n, p in module.named_parameters()},
        {n: b.detach() for n, b in module.named_buffers()},
    )


def assert_same(
    first: Mapping[str, torch.Tensor | None], second: Mapping[str, torch.Tensor | None]
) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        other = second[name]
        assert (tensor is None) == (other is None), name
        if tensor is not None and other is not None:
            assert torch.equal(tensor, other), name


@pytest.mark.matrix("2-train", "7-eval")
@pytest.mark.parametrize("name", ["train", "eval"])
@pytest.mark.parametrize("rows", [2, 4, 7])
def test_a_graph_read_back_gives_the_same_loss_gradients_and_buffers(
    job: Job, name: str, rows: int
) -> None:
    graph = job.program.graphs[name].exported
    first, second = run(graph, batch_of(rows)), run(through_json(graph), batch_of(rows))
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))
    assert_same(first[1], second[1])
    assert_same(first[2], second[2])
    assert any(gradient is not None for gradient in first[1].values())


def test_a_graph_read_back_is_written_as_the_same_bytes(job: Job) -> None:
    graph = job.program.graphs["train"].exported
    assert canonical_json(graph_to_json(through_json(graph)).document) == canonical_json(
        graph_to_json(graph).document
    )


def test_the_range_of_the_batch_dim_survives(job: Job) -> None:
    graph = job.program.graphs["train"].exported
    assert {str(s): str(r) for s, r in through_json(graph).range_constraints.items()} == {
        str(s): str(r) for s, r in graph.range_constraints.items()
    }


def test_nothing_of_source_machine_or_torch_is_in_the_document(job: Job) -> None:
    graph = graph_to_json(job.program.graphs["train"].exported)
    text = canonical_json(graph.document).decode()
    for word in ("jobs.py", "/", "Wrapped", "Model", "stack_trace", "guards", torch.__version__):
        assert word not in text, word
    assert "jobs.py" in canonical_json(graph.debug).decode()


def test_the_paths_of_modules_survive(job: Job) -> None:
    loaded = through_json(job.program.graphs["train"].exported)
    paths = {
        path
        for node in loaded.graph.nodes
        for path, _ in node.meta.get("nn_module_stack", {}).values()
    }
    assert {"emb", "norm", "drop"} <= paths


def test_writing_changes_nothing_in_the_exported_program(job: Job) -> None:
    graph = job.program.graphs["train"].exported
    before = [(n.name, sorted(n.meta)) for n in graph.graph.nodes]
    graph_to_json(graph)
    assert [(n.name, sorted(n.meta)) for n in graph.graph.nodes] == before


class _OnlyWrites(torch.nn.Module):
    ema: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(3, 3)
        self.register_buffer("ema", torch.zeros(3))

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        h = self.lin(batch["x"])
        with torch.no_grad():
            self.ema.mul_(0.9).add_(h.mean(0))
        return (h.sum(),)


class _While(torch.nn.Module):
    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        start = (torch.zeros((), dtype=torch.int64), batch["x"])
        _, out = torch.ops.higher_order.while_loop(
            lambda i, x: i < 3, lambda i, x: (i + 1, x * 1.5), start, ()
        )
        return ((out * self.weight).sum(),)

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))


class _Scan(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        from torch._higher_order_ops.scan import scan

        carry, out = scan(lambda c, x: (c + x, c * x), torch.zeros(3) * self.weight, batch["x"])
        return ((carry * self.weight).sum() + out.sum(),)


class _Map(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        from torch._higher_order_ops.map import map as map_op

        return (map_op(lambda x, w: x.sin() * w, batch["x"], self.weight).sum(),)  # type: ignore[arg-type]


class _NestedCond(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        def inner(x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.mean() > 0, lambda t: t.sin(), lambda t: t.cos(), (x,))  # type: ignore[no-any-return]

        return (
            torch.cond(
                batch["x"].sum() > 0, inner, lambda t: t.clone(), (batch["x"] * self.weight,)
            ).sum(),
        )


class _Sizes(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        rows = batch["x"].shape[0]
        doubled = torch.cat([batch["x"], batch["x"]]).view(2 * rows, 3)
        return ((doubled * self.weight).sum() / rows + torch.arange(rows // 2 + 1).sum(),)


@pytest.mark.matrix("_OnlyWrites", "_While", "_Map", "_Sizes")
@pytest.mark.parametrize(
    "kind", [_OnlyWrites, _While, _Scan, _Map, _NestedCond, _Sizes], ids=lambda kind: kind.__name__
)
def test_control_flow_and_sizes_survive(kind: type[torch.nn.Module]) -> None:
    torch.manual_seed(0)
    graph = exported(
        kind(), ({"x": torch.randn(4, 3)},), ({"x": {0: Dim("batch", min=2, max=64)}},)
    )
    loaded = through_json(graph)
    for rows in (4, 7):
        batch = {"x": torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows))}
        first, second = run(graph, batch), run(loaded, batch)
        assert torch.equal(first[0][0], second[0][0])
        assert_same(first[1], second[1])
        assert_same(first[2], second[2])


def test_a_region_that_only_writes_a_buffer_is_kept() -> None:
    graph = exported(_OnlyWrites(), ({"x": torch.randn(4, 3)},))
    _, _, state = run(through_json(graph), {"x": torch.ones(4, 3)})
    assert state["ema"].abs().sum() > 0


def test_a_graph_that_torch_cannot_write_is_refused_by_the_node(job: Job) -> None:
    graph = exported(_Sizes(), ({"x": torch.randn(4, 3)},))
    node = next(node for node in graph.graph.nodes if node.op == "call_function")
    node.meta["val"] = object()
    with pytest.raises(PackageError, match=r"train.*rejects"):
        graph_to_json(graph, "train")


def test_an_operators_schema_is_the_running_torchs() -> None:
    schema = running_schema("torch.ops.aten.add.Tensor")
    assert schema is not None and schema.startswith("aten::add.Tensor(")
    assert running_schema("torch.ops.aten.no_such_operator.default") is None


@pytest.mark.parametrize(
    ("recorded", "fits"),
    [
        ("aten::relu(Tensor self) -> Tensor", True),
        ("aten::relu(Tensor self, Tensor other) -> Tensor", False),
        ("aten::relu(Tensor self) -> (Tensor, Tensor)", False),
        ("no schema at all", False),
    ],
)
def test_a_recorded_schema_fits_only_if_its_calls_still_do(recorded: str, fits: bool) -> None:
    assert schema_still_fits("torch.ops.aten.relu.default", recorded) is fits


def test_a_schema_that_gained_a_defaulted_argument_still_fits() -> None:
    running = running_schema("torch.ops.aten.gelu.default")
    assert running is not None and 'approximate="none"' in running
    assert schema_still_fits("torch.ops.aten.gelu.default", "aten::gelu(Tensor self) -> Tensor")
