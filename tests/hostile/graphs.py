"""Attacks by a graph file.

Each changes a parsed, valid file: graphs/train.json, or the graph of a step.json in derived/.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

from trainload.packaging.graphs.validate import MAX_BODIES

Document = dict[str, Any]
Change = Callable[[Document], object]


def nodes(graph: Document) -> list[Document]:
    return graph["graph_module"]["graph"]["nodes"]  # type: ignore[no-any-return]


def call(graph: Document) -> Document:
    """Return the signature of a graph's call. A step graph has none, so one is added."""
    calls = graph["graph_module"]["module_call_graph"]
    if not calls:
        leaf = json.dumps(
            [1, {"children_spec": [], "context": None, "type": None}], separators=(",", ":")
        )
        signature: Document = {
            "inputs": [],
            "outputs": [],
            "in_spec": leaf,
            "out_spec": leaf,
            "forward_arg_names": None,
        }
        calls.append({"fqn": "", "signature": signature})
    return calls[0]["signature"]  # type: ignore[no-any-return]


def first_symbol(graph: Document) -> Document:
    for meta in graph["graph_module"]["graph"]["tensor_values"].values():
        for size in meta["sizes"]:
            if "as_expr" in size:
                return size["as_expr"]  # type: ignore[no-any-return]
    raise AssertionError("the graph has no dynamic size")


def target(name: str) -> Change:
    return lambda graph: nodes(graph)[0].update(target=name)


def treespec(spec: object) -> Change:
    return lambda graph: call(graph).update(
        in_spec=json.dumps([1, spec], separators=(",", ":"), sort_keys=True)
    )


def argument(value: object) -> Change:
    return lambda graph: nodes(graph)[0]["inputs"][0].update(arg=value)


def rename_first(name: str) -> Change:
    return lambda graph: nodes(graph)[0].update(name=name)


def symbol(text: str) -> Change:
    return lambda graph: first_symbol(graph).update(expr_str=text)


def input_spec(spec: object) -> Change:
    return lambda graph: graph["graph_module"]["signature"]["input_specs"].append(spec)


def _specs(end: str) -> Callable[[Document], list[Document]]:
    return lambda graph: graph["graph_module"]["signature"][f"{end}_specs"]


def _argument_of(spec: Document) -> Document:
    """Return the `{"name": ...}` of an entry of the signature."""
    ((kind, entry),) = spec.items()
    found: Document = (
        entry["arg"]["as_tensor"] if kind in ("user_input", "user_output") else entry["arg"]
    )
    return found


def renamed_in_signature(end: str) -> Change:
    return lambda graph: _argument_of(_specs(end)(graph)[-1]).update(name="b")


def swapped_in_signature(end: str) -> Change:
    return lambda graph: _specs(end)(graph).reverse()


def _nested(graph: Document) -> None:
    body = copy.deepcopy(graph["graph_module"]["graph"])
    for _ in range(MAX_BODIES + 1):
        body = {**copy.deepcopy(graph["graph_module"]["graph"]), "nodes": [_holding(body)]}
    graph["graph_module"]["graph"] = body


def _holding(body: Document) -> Document:
    held = {"name": "", "kind": 1, "arg": {"as_graph": {"name": "g", "graph": body}}}
    return {
        "target": "torch.ops.higher_order.cond",
        "inputs": [held],
        "outputs": [],
        "metadata": {},
        "is_hop_single_tensor_return": None,
        "name": "n",
    }


def _first_output_of_each_kind(graph: Document) -> None:
    graph["graph_module"]["graph"]["outputs"][0] = {
        "as_custom_obj": {"name": "x", "class_fqn": "os.system"}
    }


ENUM = {"__enum__": True, "fqn": "os:system", "name": "x"}
CODE = "__import__('pathlib').Path('{}').write_text('x')"

ATTACKS: dict[str, Change] = {
    "code as a symbolic size": symbol(CODE),
    "attribute of a symbol": symbol("Symbol('s0').__class__.__mro__"),
    "huge power as a size": symbol("Pow(Integer(10), Pow(Integer(10), Integer(10)))"),
    "deep expression as a size": symbol("Add(" * 200 + "Integer(1)" + ")" * 200),
    "lambda as a size": symbol("(lambda: 1)()"),
    "guards": lambda graph: graph.update(guards_code=[CODE]),
    "guards within the module": lambda graph: graph["graph_module"].update(guards_code=[CODE]),
    "example inputs": lambda graph: graph.update(example_inputs="gASVIQ=="),
    "weights within the graph": lambda graph: graph.update(state_dict={"x": "gASVIQ=="}),
    "enum in a treespec": treespec(
        {
            "type": "builtins.dict",
            "context": json.dumps(ENUM, separators=(",", ":")),
            "children_spec": [],
        }
    ),
    "enum as a key": treespec(
        {
            "type": "builtins.dict",
            "context": json.dumps([ENUM], separators=(",", ":")),
            "children_spec": [1],
        }
    ),
    "dataclass in a treespec": treespec(
        {"type": "collections.namedtuple", "context": '"os.system"', "children_spec": []}
    ),
    "deep treespec": lambda graph: call(graph).update(in_spec="[" * 5000 + "]" * 5000),
    "key twice in a treespec": (
        lambda graph: call(graph).update(in_spec='[1,{"type":null,"type":null}]')
    ),
    "function of Python": target("os.system"),
    "function of builtins": target("builtins.eval"),
    "function of torch": target("torch.load"),
    "function of operator": target("_operator.attrgetter"),
    "loading a library": target("torch.ops.load_library"),
    "loading a library as an operator": target("torch.ops.aten.load_library.default"),
    "extension operator": target("#custom:op"),
    "reading a file": target("torch.ops.aten.from_file.default"),
    "printing": target("torch.ops.aten._print.default"),
    "changing storage": target("torch.ops.aten.set_.source_Tensor"),
    "operator that trusts its input": target("torch.ops.aten._sparse_coo_tensor_unsafe.default"),
    "operator of another library": target("torch.ops.evil.run.default"),
    "operator that sends to other processes": target(
        "torch.ops._c10d_functional.broadcast.default"
    ),
    "operator that loads quantized weights": target("torch.ops.quantized.linear_prepack.default"),
    "inductor's operators": target("torch.ops.inductor._alloc_from_pool.default"),
    "private attribute of an operator": target("torch.ops.aten.__class__.default"),
    "private attribute of a namespace": target("torch.ops.__init__.__globals__.x"),
    "higher-order operator that runs kernels": target(
        "torch.ops.higher_order.triton_kernel_wrapper_functional"
    ),
    "higher-order operator that loads": target("torch.ops.higher_order.aoti_call_delegate"),
    "operator as an argument": argument({"as_operator": "torch.hub.load"}),
    "object as an argument": argument({"as_custom_obj": {"name": "x", "class_fqn": "os.system"}}),
    "two kinds of argument at once": argument({"as_int": 1, "as_string": "x"}),
    "unknown kind of argument": argument({"as_pickle": "gASVIQ=="}),
    "a fraction for the kind of an argument": (
        lambda graph: nodes(graph)[0]["inputs"][0].update(kind=1.0)
    ),
    "another example of a size than of its symbol": (
        lambda graph: first_symbol(graph).update(hint={"as_int": 2**40})
    ),
    "long string": argument({"as_string": "x" * 5000}),
    "code as a node's name": rename_first("x; import os"),
    "newline in a node's name": rename_first("x\nimport os"),
    "keyword as a node's name": rename_first("import"),
    "dunder as a node's name": rename_first("__builtins__"),
    "code as an argument's name": lambda graph: nodes(graph)[0]["inputs"][0].update(name="x=1,y"),
    "code as a parameter's name": input_spec(
        {"parameter": {"arg": {"name": "p"}, "parameter_name": 'a"); import os; ("'}}
    ),
    "object as an input": input_spec(
        {"custom_obj": {"arg": {"name": "x", "class_fqn": "os.system"}, "custom_obj_name": "x"}}
    ),
    "signature with another name of an input": renamed_in_signature("input"),
    "signature with another name of an output": renamed_in_signature("output"),
    "signature with inputs in another order": swapped_in_signature("input"),
    "signature with an output too many": (
        lambda graph: _specs("output")(graph).append(_specs("output")(graph)[0])
    ),
    "token as an input": input_spec({"token": {"arg": {"name": "x"}}}),
    "object as an output": _first_output_of_each_kind,
    "object values": (
        lambda graph: graph["graph_module"]["graph"].update(
            custom_obj_values={"x": {"name": "x", "class_fqn": "y"}}
        )
    ),
    "metadata": lambda graph: nodes(graph)[0]["metadata"].update(from_node="[]"),
    "class in a module stack": (
        lambda graph: nodes(graph)[0]["metadata"].update(nn_module_stack="a,a,os.system")
    ),
    "metadata of the graph": lambda graph: graph["graph_module"].update(metadata={"custom": "{}"}),
    "named tuples": (
        lambda graph: graph["graph_module"].update(
            treespec_namedtuple_fields={"x": {"field_names": ["a"]}}
        )
    ),
    "call signature of a submodule": lambda graph: (
        call(graph) and graph["graph_module"]["module_call_graph"][0].update(fqn="a")
    ),
    "code as an argument of forward": (
        lambda graph: call(graph).update(forward_arg_names=["a=print(1)"])
    ),
    "unknown device": argument({"as_device": {"type": "privateuseone", "index": None}}),
    "million symbols": (
        lambda graph: graph["range_constraints"].update(
            {"u999999999": {"min_val": 0, "max_val": 1}}
        )
    ),
    "integer of 65 bits": argument({"as_int": 2**64}),
    "tensor of 65 dims": (
        lambda graph: next(iter(graph["graph_module"]["graph"]["tensor_values"].values())).update(
            sizes=[{"as_int": 1}] * 65
        )
    ),
    "control flow in control flow in ...": _nested,
}
"""Description of the attack -> the change."""
