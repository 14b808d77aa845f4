"""Build the graph that turns a rank's gradients into new parameters: norm, clipping, every bucket's
update, the running mean.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Interpreter, Node

from trainload.autograd_trace.derivation.aot import fake_mode, trace_flat
from trainload.autograd_trace.graphs import Recipe, StateSpec, UpdateGraph
from trainload.capture.operators import written_by
from trainload.core.errors import PlanError
from trainload.sharding.analysis.liveness import Storages
from trainload.sharding.plans.plan import (
    DATA,
    PIPELINE,
    REPLICATE,
    TENSOR,
    Bucket,
    Plan,
    shared_group,
)
from trainload.sharding.rewriting.rewrite import accumulated_length, update_length

aten = torch.ops.aten
UPDATE_SCALARS = 3
"""Number of an update's first arguments: the gradients' divisor, learning rates, the rank.
Parameters, gradients and state follow.
"""
_CLIP_EPSILON = 1e-6
"""Same value as in torch.nn.utils.clip_grad_norm_."""


class _UpdateInterpreter(Interpreter):
    """Interpreter that runs an update graph, which was captured on a CPU, on any device."""

    def __init__(self, module: GraphModule, device: torch.device) -> None:
        super().__init__(module)
        self._device = device

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            _, body, *operands = args
            return type(self)(body, self._device).run(*operands)
        if target is aten._assert_tensor_metadata.default:
            return None
        args = tuple(self._device if isinstance(a, torch.device) else a for a in args)
        kwargs = {k: self._device if isinstance(v, torch.device) else v for k, v in kwargs.items()}
        return super().call_function(target, args, kwargs)


def _with_constants(graph: ExportedProgram, arguments: Sequence[Tensor]) -> list[Tensor]:
    """Return the graph's inputs in its own order: the arguments, and its 0-dim constants made on
    the device.
    """
    entries = iter(arguments)
    device = arguments[0].device
    inputs: list[Tensor] = []
    for spec in graph.graph_signature.input_specs:
        if spec.kind is not InputKind.CONSTANT_TENSOR:
            inputs.append(next(entries))
            continue
        constant = graph.constants[str(spec.target)]
        assert isinstance(constant, Tensor) and constant.ndim == 0, (
            "updates have 0-dim constants only"
        )
        inputs.append(torch.full((), constant.item(), dtype=constant.dtype, device=device))
    return inputs


StateKey = tuple[str, str]
"""(bucket, group): key of an optimizer's state of a bucket."""


@dataclass(frozen=True, slots=True)
class BucketUpdate:
    """One trained bucket and the update of one of its groups, which has index `group_index` in the
    recipe.
    """

    bucket: Bucket
    update: UpdateGraph
    group_index: int

    @property
    def key(self) -> StateKey:
        """Key of the state that it keeps."""
        return self.bucket.name, self.update.group

    @property
    def state(self) -> tuple[StateSpec, ...]:
        """Specs of the state that it keeps."""
        return self.update.state


def bucket_updates(
    buckets: Sequence[Bucket], updates: Sequence[UpdateGraph], groups: Collection[str]
) -> tuple[BucketUpdate, ...]:
    """Return the buckets that these groups train, each with its update; a bucket in several of the
    groups appears once for each.

    Raises:
        PlanError: a bucket's update is missing, or is elementwise although the plan expects whole
            parameters, or the reverse.
    """
    by_group = {u.group: (i, u) for i, u in enumerate(updates)}
    selected: list[BucketUpdate] = []
    for bucket in buckets:
        for group in bucket.groups:
            if group not in groups:
                continue
            if group not in by_group or by_group[group][1].elementwise == (group in bucket.whole):
                raise PlanError(
                    (
                        "the plan and the package disagree on whether a bucket's update needs whole"
                        " parameters"
                        if group in by_group
                        else "a bucket's group has no update"
                    ),
                    where=f"plan.buckets: {bucket.name}, {group}",
                    got=f"groups {sorted(by_group)}",
                    hint="Make a plan for this package: trainload plan.",
                )
            index, update = by_group[group]
            selected.append(BucketUpdate(bucket, update, index))
    return tuple(selected)


@dataclass(frozen=True, slots=True)
class Lacking:
    """State that no earlier update has made: the optimizer state of these groups of buckets, and
    the running mean of these buckets.
    """

    states: frozenset[StateKey] = frozenset()
    means: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.states or self.means)


_NOTHING_LACKING = Lacking()


def usable_norm(norm: Tensor, recipe: Recipe, graph: str) -> Tensor:
    """Return True, as a 0-dim tensor, if an update whose gradient has this norm leaves the weights
    finite.

    Args:
        norm: 0-dim norm of the gradient before clipping, the same on all ranks.
        recipe: the package's recipe.
        graph: name of the training graph.
    """
    # clipping by value makes infinities finite
    if recipe.graph(graph).clip_value is not None and recipe.loss_scale is None:
        return ~torch.isnan(norm)
    return torch.isfinite(norm)


class UpdateStep:
    """The update that follows a training graph, of all buckets that it trains, on one rank, as a
    function of flat tensors.

    Call: (divisor, rates, rank, *params, *gradients, *states, *means[, scale, streak]) ->
    (norm, *params, *states, *means[, scale, streak])

    - divisor: 0-dim float32; gradients are divided by it (scale * sum of weights).
    - rates: float32 (groups,); the learning rates of this step.
    - rank: 0-dim int64; index of this rank's share of sharded tensors.
    - params, gradients: one (n,) for each bucket, this rank's slice; in a plan with a pipeline a
      gradient is the sum over the rank's microbatches, of `accumulated_length`.
    - states: per bucket, in the order of its StateSpecs; those in `lacking` are left out of the
      arguments, and made. A state like the parameter is (n,), this rank's slice; others are whole
      on every rank: 0-dim in an elementwise update, (slots, *shape) in an update of whole
      parameters.
    - means: if the graph keeps them, one (n,) for each bucket, this rank's slice; those in
      `lacking` are left out, and made.
    - scale: if the recipe scales the loss, 0-dim float32; streak: 0-dim int64, number of
      consecutive updates since it last changed.
    - norm: 0-dim float32, the global L2 norm of the divided gradient, before clipping. If it is not
      usable (`usable_norm`), everything but scale and streak keeps its value; but an update that
      makes missing state returns its results unconditionally, and the caller must discard them.

    Args:
        plan: distribution of the package.
        updates: the package's updates.
        recipe: the package's recipe.
        graph: name of the training graph.
        lacking: state that it has to make.
        pipeline_index: the rank's index on the pipeline axis, whose buckets it updates.
    """

    def __init__(
        self,
        plan: Plan,
        updates: Sequence[UpdateGraph],
        recipe: Recipe,
        graph: str,
        lacking: Lacking = _NOTHING_LACKING,
        pipeline_index: int = 0,
    ) -> None:
        self._plan = plan
        self._index = pipeline_index
        self._recipe = recipe
        self.name, self._graph = graph, recipe.graph(graph)
        self._lacking = lacking
        self._groups = len(updates)
        self.parts = bucket_updates(plan.held_buckets(pipeline_index), updates, self._graph.groups)

    @property
    def keeps_mean(self) -> bool:
        """True if it updates a running mean of the parameters."""
        return self._graph.ema_decay is not None

    def __call__(
        self, divisor: Tensor, rates: Tensor, rank: Tensor, *flat: Tensor
    ) -> tuple[Tensor, ...]:
        results = self.in_turn(divisor, rates, rank, *flat)
        norm, *scaling = next(results)
        outputs = list(results)
        counts = [len(part.state) for part in self.parts]
        new = [param for param, *_ in outputs]
        for output, count in zip(outputs, counts, strict=True):
            new += output[1 : 1 + count]
        for output, count in zip(outputs, counts, strict=True):
            new += output[1 + count :]
        return (norm, *new, *scaling)

    def in_turn(
        self, divisor: Tensor, rates: Tensor, rank: Tensor, *flat: Tensor
    ) -> Iterator[tuple[Tensor, ...]]:
        """Yield the results of a call bucket by bucket, so that they need not exist at once.

        Yields:
            (norm[, scale, streak]), then (param, *states[, mean]) of each bucket.
        """
        count = len(self.parts)
        params, gradients, old_state = (
            flat[:count],
            flat[count : 2 * count],
            list(flat[2 * count :]),
        )
        scaling = (
            [old_state.pop() for _ in range(2)][::-1] if self._recipe.loss_scale is not None else []
        )
        gradients = self.synchronised(gradients)
        clip_norm, clip_value = self._graph.clip_norm, self._graph.clip_value
        norm = self._norm(gradients, divisor) / divisor
        factor = 1.0 / divisor
        if clip_norm is not None:
            factor = factor * torch.clamp(clip_norm / (norm + _CLIP_EPSILON), max=1.0)
        usable = usable_norm(norm, self._recipe, self.name)
        yield (norm, *(self._next_scale(usable, *scaling) if scaling else ()))
        kept = [part for part in self.parts if part.key not in self._lacking.states]
        means = iter(old_state[sum(len(part.state) for part in kept) :])
        states = iter(old_state)
        for part, param, gradient in zip(self.parts, params, gradients, strict=True):
            first = part.key in self._lacking.states
            entries = () if first else tuple(islice(states, len(part.state)))
            scaled = (gradient * factor).to(gradient.dtype)
            if clip_value is not None:
                scaled = scaled.clamp(-clip_value, clip_value)
            rate, operands = rates[part.group_index], [param, scaled, *entries]
            outputs = (
                self._run_update(part, rate, operands)
                if part.update.elementwise
                else self._run_whole(part, rate, operands, rank)
            )
            before, after = [param, *entries], [*outputs]
            if (decay := self._graph.ema_decay) is not None:
                if part.bucket.name in self._lacking.means:
                    after.append(outputs[0].clone())
                else:
                    before.append(next(means))
                    after.append(torch.lerp(before[-1], outputs[0], 1 - decay))
            if not self._lacking:
                after = [torch.where(usable, *pair) for pair in zip(after, before, strict=True)]
            yield tuple(after)

    def _next_scale(self, finite: Tensor, scale: Tensor, streak: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next step's scale and streak."""
        rule = self._recipe.loss_scale
        assert rule is not None
        longer = torch.where(finite, streak + 1, torch.zeros_like(streak))
        grown = scale * rule.growth_factor
        grows = (longer == rule.growth_interval) & torch.isfinite(grown)
        moved = torch.where(finite, torch.where(grows, grown, scale), scale * rule.backoff_factor)
        return moved, torch.where(longer == rule.growth_interval, torch.zeros_like(streak), longer)

    def _run_update(
        self, part: BucketUpdate, rate: Tensor, operands: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Update one tensor. `operands`: parameter, gradient, states. Return parameter, states."""
        graph = part.update.first if part.key in self._lacking.states else part.update.following
        param, gradient, *states = operands
        arguments = _with_constants(graph, [param, gradient, rate, *states])
        results: Sequence[Tensor] = _UpdateInterpreter(graph.graph_module, param.device).run(
            *arguments
        )
        return results

    def _run_whole(
        self, part: BucketUpdate, rate: Tensor, operands: Sequence[Tensor], rank: Tensor
    ) -> Sequence[Tensor]:
        """Update whole parameters, one by one; of sharded tensors, keep this rank's slice."""
        bucket = part.bucket
        sharded = update_length(self._plan, bucket) < bucket.length
        like = [True, *(s.like_parameter for s in part.state)]
        kinds = zip(operands, [True, *like], strict=False)  # the first update receives no states
        whole = [
            (self._gather_slice(value) if is_like and sharded else value, is_like)
            for value, is_like in kinds
        ]
        updated: list[Sequence[Tensor]] = []
        for number, slot in enumerate(bucket.slots):
            end = slot.offset + slot.length
            slot_operands = [
                value[slot.offset : end].view(slot.shape) if is_like else value[number]
                for value, is_like in whole
            ]
            updated.append(self._run_update(part, rate, slot_operands))
        results: list[Tensor] = []
        for is_like, values in zip(like, zip(*updated, strict=True), strict=True):
            if not is_like:
                results.append(torch.stack(values))
                continue
            flat = _flatten_slots(bucket, values)
            results.append(
                flat.view(self._plan.shard_degree, -1).index_select(0, rank.view(1)).view(-1)
                if sharded
                else flat
            )
        return results

    def _gather_slice(self, slice_: Tensor) -> Tensor:
        full = torch.ops._c10d_functional.all_gather_into_tensor.default(
            slice_, self._plan.shard_degree, self._plan.shard_group
        )
        result: Tensor = torch.ops._c10d_functional.wait_tensor.default(full)
        return result

    def synchronised(self, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the sums of the gradients over all ranks, as far as this rank updates them.

        Without a pipeline the training graphs have summed them. All ranks must call it.

        Args:
            gradients: the gradients of a call.
        """
        if self._plan.pipeline is None:
            return gradients
        return tuple(
            self._synchronised(part.bucket, value)
            for part, value in zip(self.parts, gradients, strict=True)
        )

    def _synchronised(self, bucket: Bucket, gradient: Tensor) -> Tensor:
        """Return the sum of a bucket's gradient over all ranks: the part that this rank updates."""
        plan = self._plan
        if plan.shards_state and not plan.shards_gradients and plan.data_ranks > 1:
            scattered = torch.ops._c10d_functional.reduce_scatter_tensor.default(
                gradient, "sum", plan.shard_degree, plan.shard_group
            )
            gradient = torch.ops._c10d_functional.wait_tensor.default(scattered)
        elif not plan.shards_state and plan.data_ranks > 1:
            gradient = _total(gradient, DATA)
        elif plan.replicas > 1 and plan.shards_state:
            gradient = _total(gradient, REPLICATE)
        holders = plan.holders(bucket)
        return _total(gradient, shared_group(holders)) if len(holders) > 1 else gradient

    def _norm(self, gradients: Sequence[Tensor], divisor: Tensor) -> Tensor:
        """Return the norm of all gradients that all ranks update. `divisor`: a 0-dim float32 on the
        device.
        """
        squares: dict[bool, list[Tensor]] = {True: [], False: []}
        for part, gradient in zip(self.parts, gradients, strict=True):
            # a bucket that several ranks hold counts once
            if self._plan.holders(part.bucket)[0] == self._index:
                squares[part.bucket.divided].append(gradient.to(torch.float32).square().sum())
        totals = {
            kind: torch.stack(values).sum() if values else torch.zeros_like(divisor)
            for kind, values in squares.items()
        }
        square = totals[False]
        if any(part.bucket.divided for part in self.parts):
            square = square + _total(totals[True], TENSOR)
        if self._plan.shards_state and self._plan.shard_degree > 1:
            square = _total(square, self._plan.shard_group)
        return _total(square, PIPELINE).sqrt() if self._plan.pipeline is not None else square.sqrt()

    def trace(self, device: torch.device) -> GraphModule:
        """Return the call as a flat graph that writes everything except the norm in place, and
        returns the norm.
        """
        assert not self._lacking, "what is lacking is made, so there is nothing to write into"
        with fake_mode():
            lengths = [update_length(self._plan, p.bucket) for p in self.parts]
            dtypes = [getattr(torch, p.bucket.dtype) for p in self.parts]
            inputs = [torch.empty((), device=device), torch.empty(self._groups, device=device)]
            inputs.append(torch.empty((), dtype=torch.int64, device=device))
            gradient_lengths = (
                lengths
                if self._plan.pipeline is None
                else [accumulated_length(self._plan, p.bucket) for p in self.parts]
            )
            inputs += [
                torch.empty(n, dtype=d, device=device) for n, d in zip(lengths, dtypes, strict=True)
            ]
            inputs += [
                torch.empty(n, dtype=d, device=device)
                for n, d in zip(gradient_lengths, dtypes, strict=True)
            ]
            for part, length in zip(self.parts, lengths, strict=True):
                for spec in part.state:
                    shape = (
                        (length,)
                        if spec.like_parameter
                        else (
                            () if part.update.elementwise else (len(part.bucket.slots), *spec.shape)
                        )
                    )
                    inputs.append(
                        torch.empty(shape, dtype=getattr(torch, spec.dtype), device=device)
                    )
            if self.keeps_mean:
                inputs += [
                    torch.empty(n, dtype=d, device=device)
                    for n, d in zip(lengths, dtypes, strict=True)
                ]
            if self._recipe.loss_scale is not None:
                inputs += [
                    torch.empty((), device=device),
                    torch.empty((), dtype=torch.int64, device=device),
                ]

        def in_place(*flat: Tensor) -> tuple[Tensor]:
            norm, *new = self(*flat)
            count = len(self.parts)
            targets = [*flat[3 : 3 + count], *flat[3 + 2 * count :]]
            for target, value in zip(targets, new, strict=True):
                target.copy_(value)
            return (norm,)

        module = trace_flat(in_place, inputs)
        _write_early(module)
        return module


def _write_early(module: GraphModule) -> None:
    """Write each input as soon as its new value exists and nobody reads the old one any more, so
    that new values do not accumulate.
    """
    place = {node: index for index, node in enumerate(module.graph.nodes)}
    storages = Storages(module)
    views: dict[int, list[Node]] = {}
    for node, node_storages in storages.of.items():
        for storage in node_storages:
            if storage is not None:
                views.setdefault(storage, []).append(node)
    for copy in module.graph.find_nodes(op="call_function", target=aten.copy_.default):
        old, new = copy.args[:2]
        assert isinstance(old, Node) and isinstance(new, Node)
        (storage,), (own,) = storages.of[old], storages.of[new]
        assert storage is not None and own is not None
        readers = [
            user
            for view in views[storage]
            for user in view.users
            if user is not copy and user.op != "output"
        ]
        # A new value may be written to through a view of it, such as the `.data` of a hook.
        writers = [
            user
            for view in views[own]
            for user in view.users
            if view in written_by(user) and place[user] < place[copy]
        ]
        before = [new, *readers, *writers]
        last = max(before, key=lambda node: place[node])
        if last.op != "placeholder" and not any(
            node.target is aten.copy_.default for node in before
        ):
            last.append(copy)
    module.graph.lint()
    module.recompile()


def _total(value: Tensor, group: str) -> Tensor:
    """Return the sum over a group's ranks."""
    result: Tensor = torch.ops._c10d_functional.wait_tensor.default(
        torch.ops._c10d_functional.all_reduce.default(value, "sum", group)
    )
    return result


def _flatten_slots(bucket: Bucket, values: Sequence[Tensor]) -> Tensor:
    """Return the bucket's flat tensor from its slots' values, with zeros between parameters."""
    pieces: list[Tensor] = []
    end = 0
    for slot, value in zip(bucket.slots, values, strict=True):
        pieces += [value.new_zeros(slot.offset - end), value.reshape(-1)]
        end = slot.offset + slot.length
    return torch.cat([*pieces, values[0].new_zeros(bucket.length - end)])
