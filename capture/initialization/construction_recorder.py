"""Records how a model's tensors get their first values, while the user's code constructs it.

Torch's private name is `torch.nn.init._no_grad_trunc_normal_`. Tested with torch 2.13.0.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.fx.node import map_aggregate
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from trainload.capture.initialization.construction_tape import (
    LARGEST_CONSTANT,
    Call,
    Tape,
    TensorRef,
    instances,
    truncated_normal,
)
from trainload.capture.initialization.fake_tensors import (
    VALUES_NEEDED,
    fake_mode,
    without_references,
)
from trainload.capture.job.tensor_classes import has_values, is_fake
from trainload.capture.operators import is_overload
from trainload.capture.source.source_place import place_here
from trainload.core.errors import JobError

LIMIT = 2**20
"""Bytes of a tensor that is constructed although the model has no values."""

_aten = torch.ops.aten
_READS: frozenset[object] = frozenset(
    {_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default}
)
"""Operators that return a tensor's values to Python."""
_PYTHON_READS = ("tolist", "numpy", "__array__", "__reduce_ex__")
"""Methods of tensors that return their values to Python without an operator."""
MOST_CONSTANTS = 64 * LARGEST_CONSTANT
"""Bytes of all constants."""
_IGNORED = ("prim",)
"""Namespaces of operators that compute no values."""


@contextmanager
def recording(*, values: bool) -> Iterator[InitRecorder]:
    """Record the operators that are called inside the block.

    Args:
        values: False to construct tensors of more than LIMIT bytes without values, as fake tensors
            on the CPU. Smaller ones are computed, so code that reads a table's values works.
            (The meta device would be visible to code, and some skips its initialisation there.)
    """
    recorder = InitRecorder(None if values else LIMIT)
    with (
        warnings.catch_warnings(),
        patch.object(torch.nn.init, "_no_grad_trunc_normal_", recorder.draw_truncated),
        # Dynamo skips code under a dispatch mode, and remembers it: `torch.cond` would then fail in
        # every later export. And compiled code calls operators that no mode sees.
        torch.compiler.set_stance("force_eager"),
        ExitStack() as patches,
        recorder,
    ):
        for name in _PYTHON_READS:
            patches.enter_context(patch.object(Tensor, name, recorder.reading(name)))
        patches.enter_context(patch.object(Tensor, "__deepcopy__", recorder.deepcopy()))
        # of copy.deepcopy, which calls it to learn whether a tensor has values
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield recorder


class InitRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Mode that appends every call of an operator to a tape.

    Args:
        limit: size in bytes above which tensors have no values; None if all have values.
    """

    supports_higher_order_operators = True

    def __init__(self, limit: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.tape = Tape()
        self._limit = limit
        self._fake = fake_mode()
        self._numbers: dict[int, int] = {}
        # A weak reference keeps the storage's address from being used again.
        self._storages: list[StorageWeakRef] = []
        self._random: set[int] = set()
        self._unknown: set[int] = set()
        self._constant_bytes = 0
        self._suspended = False
        self._draw_truncated: Callable[..., Tensor] = torch.nn.init._no_grad_trunc_normal_

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # the storage that `set_` takes belongs to no recorded tensor
        if self._suspended or not _is_recorded(func) or func.overloadpacket is _aten.set_:
            return func(*args, **kwargs)
        tensors = list(instances([args, kwargs], Tensor))
        if func in _READS:
            self._check_read(tensors)
            return func(*args, **kwargs)
        if not all(map(is_recordable, tensors)):
            return self._leave(func(*args, **kwargs))
        refs = map_aggregate((args, kwargs), self._ref_of)
        read = frozenset(ref.storage for ref in instances(refs, TensorRef))
        state = self._state(func, kwargs)
        written = self._written(func, args, kwargs)
        results = self._execute(func, args, kwargs, tensors)
        self._append(func, refs, results, read, written, state)
        return results

    @contextmanager
    def _unrecorded(self) -> Iterator[None]:
        self._suspended = True
        try:
            yield
        finally:
            self._suspended = False

    def draw_truncated(
        self,
        tensor: Tensor,
        mean: float,
        std: float,
        a: float,
        b: float,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Replace the private function of `torch.nn.init.trunc_normal_`."""
        ref = self.ref(tensor)
        state = None
        if has_values(tensor):
            state = self._state_of(generator)
            with self._unrecorded():
                self._draw_truncated(tensor, mean, std, a, b, generator=generator)
        self._random.add(ref.storage)
        self.tape.append(
            Call(
                truncated_normal,
                (ref, float(mean), float(std), float(a), float(b)),
                {},
                (ref,),
                frozenset(),
                frozenset({ref.storage}),
                frozenset({ref.storage}),
                random=True,
                state=state,
            )
        )
        return tensor

    def reading(self, name: str) -> Callable[..., Any]:
        """Return a replacement of a method that returns a tensor's values to Python."""
        method = getattr(Tensor, name)

        @functools.wraps(method)
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self._suspended and is_recordable(tensor):
                self._check_read([tensor])
            return method(tensor, *args, **kwargs)

        return read

    def deepcopy(self) -> Callable[[Tensor, dict[int, Any]], Tensor]:
        """Return a replacement of `Tensor.__deepcopy__`, which copies bytes of storages."""
        method: Callable[[Tensor, dict[int, Any]], Tensor] = Tensor.__deepcopy__

        def copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
            # A fake tensor's attributes are copied. A copy of its mode would free the mode's weak
            # references to storages a second time.
            memo[id(self._fake)] = self._fake
            if self._suspended or type(tensor) is not Tensor or not is_recordable(tensor):
                return method(tensor, memo)
            source = self._whole(self.ref(tensor), tensor)
            with self._unrecorded():
                result = method(tensor, memo)
            if self._number(result) is None:
                number = self._add_storage(result)
                target = replace(source, storage=number)
                if source.storage in self._random:
                    self._random.add(number)
                read, created = frozenset({source.storage}), frozenset({number})
                self.tape.append(
                    Call(_aten.clone.default, (source,), {}, (target,), created, frozenset(), read)
                )
            return result

        return copied

    def _whole(self, ref: TensorRef, tensor: Tensor) -> TensorRef:
        """Return the reference to all elements of a tensor's storage: (elements,)."""
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        return replace(ref, shape=(elements,), strides=(1,), offset=0)

    def ref(self, tensor: Tensor) -> TensorRef:
        """Return the tape's reference to a tensor.

        One whose creation was not recorded becomes a constant of the tape, with its present values.
        """
        number = self._number(tensor)
        if number is None:
            number = self._add_storage(tensor)
            size = tensor.untyped_storage().nbytes()
            fits = size <= LARGEST_CONSTANT and self._constant_bytes + size <= MOST_CONSTANTS
            if has_values(tensor) and fits:
                self._constant_bytes += size
                whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                with self._unrecorded():
                    self.tape.constants[number] = whole.set_(tensor.untyped_storage()).clone()
            else:
                self.tape.outside[number] = size
        return TensorRef(
            number,
            tensor.dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
        )

    def _number(self, tensor: Tensor) -> int | None:
        return self._numbers.get(_weak(tensor).cdata)

    def _add_storage(self, tensor: Tensor) -> int:
        reference = _weak(tensor)
        number = len(self._storages)
        self._storages.append(reference)
        self._numbers[reference.cdata] = number
        return number

    def _ref_of(self, argument: Any) -> Any:
        return self.ref(argument) if isinstance(argument, Tensor) else argument

    def _execute(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: list[Tensor]
    ) -> Any:
        if self._limit is None:
            return func(*args, **kwargs)
        writes = func._schema.is_mutable
        if any(tensor.is_meta for tensor in tensors) or "meta" in str(kwargs.get("device")):
            return func(*args, **kwargs)
        if any(is_fake(tensor) for tensor in tensors):
            target = args[0] if args else None
            if writes and isinstance(target, Tensor) and not is_fake(target):
                return target  # its values are unknown from now on: see _append
            with without_references(self._fake):
                return func(*args, **kwargs)
        if writes:
            return func(*args, **kwargs)
        try:
            with without_references(self._fake):
                trial = func(*args, **kwargs)
        except VALUES_NEEDED:
            return func(*args, **kwargs)
        new_bytes = sum(result.nbytes for result in instances(trial, Tensor))
        return trial if new_bytes > self._limit else func(*args, **kwargs)

    def _leave(self, results: Any) -> Any:
        """Note that a call was not recorded, because its tensors have no dense memory."""
        for result in instances(results, Tensor):
            if is_recordable(result):
                number = self._number(result)
                number = self._add_storage(result) if number is None else number
                self.tape.outside[number] = result.nbytes
        return results

    def _append(
        self,
        func: Any,
        refs: tuple[Any, Any],
        results: Any,
        read: frozenset[int],
        written: frozenset[int],
        state: Tensor | None,
    ) -> None:
        if not all(map(is_recordable, instances(results, Tensor))):
            self._leave(results)
            return
        created = frozenset(
            self._add_storage(result)
            for result in instances(results, Tensor)
            if self._number(result) is None
        )
        random = torch.Tag.nondeterministic_seeded in func.tags
        if random or read & self._random:
            self._random |= created | written
        if read & self._unknown or not all(map(has_values, instances(results, Tensor))):
            self._unknown |= created | written
        self.tape.append(
            Call(
                func,
                refs[0],
                _portable(func, refs[0], refs[1], results),
                tuple(self.ref(result) for result in instances(results, Tensor)),
                created,
                written,
                read,
                random,
                state,
            )
        )

    def _written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> frozenset[int]:
        written: set[int] = set()
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            written |= {self.ref(tensor).storage for tensor in instances(value, Tensor)}
        return frozenset(written)

    def _check_read(self, tensors: list[Tensor]) -> None:
        """Note that a random value is read, and reject reading of what has no value."""
        storages = {self.ref(tensor).storage for tensor in tensors}
        if storages & self._unknown:
            raise JobError(
                "the model's construction reads a value that is not computed when it is frozen"
                " without weights",
                where=str(place_here() or "Job.model"),
                expected=f"values of tensors of at most {LIMIT // 2**20} MiB that are not random",
                hint="Compute it in Python, or from a smaller tensor.",
            )
        for storage in storages & self._random:
            self.tape.read_draws |= self.tape.draws_for(storage)
            if self.tape.random_read is None:
                self.tape.random_read = len(self.tape.calls), str(place_here() or "Job.model")

    def _state(self, func: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return the generator's state before a draw, if tensors have values."""
        if self._limit is not None or torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        return self._state_of(kwargs.get("generator"))

    def _state_of(self, generator: torch.Generator | None) -> Tensor:
        return torch.get_rng_state() if generator is None else generator.get_state()


def is_recordable(tensor: Tensor) -> bool:
    """Return True unless a tensor has no dense memory: it is sparse, or not initialized yet."""
    return tensor.layout is torch.strided and not is_lazy(tensor)


def _is_recorded(func: object) -> bool:
    return is_overload(func) and func.namespace not in _IGNORED


def _weak(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch's


def _portable(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Any
) -> dict[str, Any]:
    """Return keyword arguments without a device, and with the dtype that is the default one now."""
    portable = {
        name: torch.device("cpu") if isinstance(value, torch.device) else value
        for name, value in kwargs.items()
    }
    names = [argument.name for argument in func._schema.arguments[len(args) :]]
    if "dtype" in names and isinstance(results, Tensor) and portable.get("dtype") is None:
        portable["dtype"] = results.dtype
    return portable
