"""Give the operators of a joint graph's backward part the module and the line of the forward
operator whose gradient they compute.
"""

from __future__ import annotations

from torch.fx import Graph, Node

_KEYS = ("stack_trace", "nn_module_stack")
_NUMBER = "seq_nr"
"""Key of the number that autograd gives a forward operator, which its backward operators share."""


def inherit_origin(node: Node, source: Node) -> None:
    """Give a node the stack trace and the stack of modules of another one, as far as it has
    them.
    """
    node.meta |= {key: source.meta[key] for key in _KEYS if key in source.meta}


def copy_origins(graph: Graph) -> None:
    """Copy the stack trace and the stack of modules of each forward operator to its backward
    operators, which have neither.

    A gradient that autograd adds up itself, and what a plan adds, has no forward operator.
    """
    forward: dict[int, Node] = {}
    for node in graph.nodes:
        number = node.meta.get(_NUMBER)
        if number is None:
            continue
        if "nn_module_stack" in node.meta:
            # the first operator of a number is the one that autograd recorded; what follows until
            # the next number needs no gradient
            forward.setdefault(number, node)
        elif (origin := forward.get(number)) is not None:
            inherit_origin(node, origin)
