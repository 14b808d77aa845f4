"""Small functional graphs with repeated layers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from trainload.autograd_trace.graphs import ADDED
from trainload.autograd_trace.outlining.equality import CALL
from trainload.autograd_trace.outlining.outline import outline
from trainload.autograd_trace.outlining.scalars import stack_scalars
from trainload.autograd_trace.outlining.signatures import may_alias
from trainload.autograd_trace.randomness.random_key import RandomKey

WIDTH = 8
ROWS = 4

Layer = Callable[[Tensor, Tensor, Tensor, RandomKey, int], Tensor]
"""(x, weight, bias, key, number of the layer) -> x."""


def block(x: Tensor, weight: Tensor, bias: Tensor, key: RandomKey, number: int) -> Tensor:
    """A normalised residual block with dropout."""
    normal = torch.nn.functional.layer_norm(x, (WIDTH,))
    hidden = torch.nn.functional.gelu(normal @ weight + bias)
    keep = key.keep(number, hidden.shape, 0, 0.25)
    return x + torch.where(keep, hidden * 1.5, torch.zeros(()))


def heads(x: Tensor, weight: Tensor, bias: Tensor, key: RandomKey, number: int) -> Tensor:
    """A block whose values are split and transposed."""
    first, second = block(x, weight, bias, key, number).view(ROWS, 2, -1).transpose(0, 1).unbind()
    return x + torch.cat([first.t() @ second, second.t() @ first], 1)[: x.shape[0]]


def inputs(layers: int, seed: int = 0) -> list[Tensor]:
    """Return a flat tensor of all parameters, a batch, and the key of random numbers."""
    generator = torch.Generator().manual_seed(seed)
    parameters = torch.randn(WIDTH + layers * (WIDTH * WIDTH + WIDTH), generator=generator)
    batch = torch.randn(ROWS, WIDTH, generator=generator)
    return [parameters, batch, torch.randint(0, 2**32, (), generator=generator)]


def graph_of(
    layers: int, layer: Layer | Sequence[Layer] = block, *, trains: bool = True
) -> GraphModule:
    """Trace the loss of a stack of layers and, if it trains, the flat gradient of all parameters.

    What a plan would add, the slices and the flat gradient, is marked as added.
    """
    each = [layer] * layers if callable(layer) else list(layer)

    def loss(parameters: Sequence[Tensor], batch: Tensor, key: Tensor) -> Tensor:
        random = RandomKey(key, torch.zeros((), dtype=torch.int64), ROWS)
        x = batch * parameters[0]
        for number, one in enumerate(each):
            weight, bias = parameters[1 + 2 * number : 3 + 2 * number]
            x = one(x, weight, bias, random, number)
        return x.square().mean()

    def step(flat: Tensor, batch: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        shapes = [(WIDTH,), *[(WIDTH, WIDTH), (WIDTH,)] * layers]
        ends = list(itertools.accumulate(map(math.prod, shapes), initial=0))
        pieces = [flat[start:end] for start, end in itertools.pairwise(ends)]
        parameters = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        if not trains:
            return (loss(parameters, batch, key),)
        parameters = [parameter.detach().requires_grad_() for parameter in parameters]
        value = loss(parameters, batch, key)
        gradients = torch.autograd.grad(
            value, parameters, allow_unused=True, materialize_grads=True
        )
        return value.detach(), torch.cat([gradient.reshape(-1) for gradient in gradients])

    module: GraphModule = make_fx(step, tracing_mode="fake")(*inputs(layers))
    module.graph.eliminate_dead_code()
    flat, *_, output = module.graph.nodes
    added = {flat}
    for node in module.graph.nodes:
        if node.op == "call_function" and may_alias(node) and added & set(node.all_input_nodes):
            added.add(node)
    for result in output.all_input_nodes[1:]:
        added |= {result, *(node for node in result.all_input_nodes if may_alias(node))}
    for node in added:
        node.meta[ADDED] = True
    module.recompile()
    return module


def outlined(module: GraphModule) -> GraphModule:
    """Return a graph of `graph_of` with calls of regions."""
    stack_scalars(module.graph)
    return outline(module).module


def calls(module: GraphModule) -> list[Node]:
    """Return the calls of regions in an outer graph."""
    return module.graph.find_nodes(op="call_function", target=CALL)


def assert_equal(flat: GraphModule, other: GraphModule, given: Sequence[Tensor]) -> None:
    """Demand that two graphs return the same bits."""
    flat.recompile()
    expected, got = (module(*given) for module in (flat, other))
    assert all(map(torch.equal, expected, got))
