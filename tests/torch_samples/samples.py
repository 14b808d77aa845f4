"""Jobs from torch's own databases: all modules with sample inputs, all optimizers with option sets.

torch tests itself with them (`torch.testing._internal`), so they hold what its maintainers consider
to be ordinary cases and edge cases.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tests.trained import UPDATES
from torch import Tensor, nn, optim
from torch.export import Dim
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

from trainload import Job
from trainload.capture.job.inputs import leaves_of

SAMPLES = 3
"""Maximum number of samples per module.

A loss has up to 857, for every reduction of every shape.
"""


@dataclass(frozen=True, slots=True)
class ModuleSample:
    """A sample of a module: `number` is its index among the samples of the module."""

    module: str
    number: int

    def __str__(self) -> str:
        return f"{self.module}-{self.number}"


@dataclass(frozen=True, slots=True)
class OptionSet:
    """Options of an optimizer: `number` is their index among the option sets of the optimizer."""

    optimizer: str
    number: int
    about: str

    def __str__(self) -> str:
        return f"{self.optimizer}-{self.about.replace(' ', '_')}"


class Sampled(nn.Module):
    """A module whose first floating-point input and whose outputs are scaled by a parameter.

    So a module without parameters can be trained too. The gradient of the result is bounded for
    outputs of any size: four updates do not diverge.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.input_scale = nn.Parameter(torch.tensor(0.9))
        self.output_scale = nn.Parameter(torch.tensor(1.1))

    def forward(self, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
        given = iter([*args, *kwargs.values()])
        first = next(
            (value for value in given if isinstance(value, Tensor) and value.is_floating_point()),
            None,
        )
        args, kwargs = (
            [self._scaled(value, first) for value in args],
            {name: self._scaled(value, first) for name, value in kwargs.items()},
        )
        found = torch.zeros(())
        for value in _tensors(self.module(*args, **kwargs)):
            if value.is_floating_point():
                found = found + (value * self.output_scale).square().log1p().mean()
        return found

    def _scaled(self, value: Any, first: Tensor | None) -> Any:
        return value if first is None or value is not first else first * self.input_scale


def module_samples() -> list[ModuleSample]:
    """Return the selected samples, at most `SAMPLES` of each module."""
    return [
        ModuleSample(info.name, number)
        for info in module_db
        for number in range(min(SAMPLES, len(_inputs(info.name))))
    ]


def option_sets() -> list[OptionSet]:
    """Return all option sets of optimizers that need neither a closure nor sparse gradients."""
    return [
        OptionSet(name, number, options.desc)
        for name, info in _optimizers().items()
        if not info.step_requires_closure and not info.only_supports_sparse_grads
        for number, options in enumerate(info.optim_inputs_func(device="cpu"))
    ]


def job_of_module(sample: ModuleSample, *, static: bool = False) -> Job:
    """Return a job that trains a module on its sample's input.

    Jobs of the same sample start with the same weights. The rows are in a dim whose size most of
    the inputs have; an input without such a dim is declared as shared.

    Args:
        sample: one of `module_samples`.
        static: whether the number of rows is fixed.
    """
    torch.manual_seed(0)
    info, given = _modules()[sample.module], _inputs(sample.module)[sample.number]
    module = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs).to(
        torch.float32
    )
    batch: dict[str, Any] = {
        "args": list(given.forward_input.args),
        "kwargs": dict(given.forward_input.kwargs),
    }
    leaves = leaves_of(batch)
    rows = _rows(leaves)
    if rows is None:  # only scalars
        batch["row"], rows = torch.ones(2), 2
        leaves = leaves_of(batch)
    dims = {
        name: [*leaf.shape].index(rows) if rows in leaf.shape else None
        for name, leaf in leaves.items()
    }
    rest = Dim.STATIC if static or rows < 2 else Dim("batch")
    dynamic = {
        name: {dim: rest if dim == 0 else Dim("batch")}
        for name, dim in dims.items()
        if dim is not None and (dim > 0 or rest is Dim.STATIC)
    }

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        found: Tensor = model(batch["args"], batch["kwargs"])
        return found * batch["row"].mean() if "row" in batch else found

    return Job(
        Sampled(module),
        batch,
        lambda model: optim.SGD(model.parameters(), lr=1e-3),
        loss=loss,
        steps=UPDATES,
        global_batch=rows,
        dynamic=dynamic,
        shared=[name for name, dim in dims.items() if dim is None],
    )


def job_of_optimizer(options: OptionSet) -> Job:
    """Return a job that trains matrices, and vectors if the optimizer supports them.

    The optimizer has this set of options.
    """
    torch.manual_seed(0)
    info = _optimizers()[options.optimizer]
    chosen = info.optim_inputs_func(device="cpu")[options.number].kwargs
    bias = options.optimizer != "Muon"
    model = nn.Sequential(nn.Linear(6, 5, bias=bias), nn.Tanh(), nn.Linear(5, 3, bias=bias))

    def factory(model: nn.Module) -> optim.Optimizer:
        kind: Any = info.optim_cls
        made: optim.Optimizer = kind(model.parameters(), **chosen)
        return made

    batch = {"x": torch.randn(4, 6), "y": torch.randn(4, 3)}
    return Job(
        model,
        batch,
        factory,
        loss=lambda m, b: (m(b["x"]) - b["y"]).square().mean(),
        steps=UPDATES,
        global_batch=4,
    )


def _rows(leaves: Mapping[str, Tensor]) -> int | None:
    """Return a size that most inputs have, preferably of the leading dim; None without dims."""
    leading = Counter(leaf.shape[0] for leaf in leaves.values() if leaf.ndim)
    if not leading:
        return None
    sizes = {size for leaf in leaves.values() for size in leaf.shape}
    return max(
        sorted(sizes),
        key=lambda size: (sum(size in leaf.shape for leaf in leaves.values()), leading[size]),
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


@functools.cache
def _modules() -> dict[str, ModuleInfo]:
    return {info.name: info for info in module_db}


@functools.cache
def _optimizers() -> dict[str, OptimizerInfo]:
    kinds: list[tuple[Any, OptimizerInfo]] = [(info.optim_cls, info) for info in optim_db]
    return {kind.__name__: info for kind, info in kinds}


@functools.cache
def _inputs(name: str) -> list[ModuleInput]:
    """Return the samples of a module, cached because each call would draw others."""
    info = _modules()[name]
    torch.manual_seed(0)
    make: Callable[..., Any] = info.module_inputs_func
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(
            make(info, device="cpu", dtype=torch.float32, requires_grad=False, training=True)
        )


def has_fixed_rows(sample: ModuleSample) -> bool:
    """Return whether a sample's leading dim has a meaning for its module and cannot change.

    Examples are channels and features.
    """
    return sample.number in _FIXED_ROWS.get(sample.module.removeprefix("nn."), ())


def gives_nan(sample: ModuleSample) -> bool:
    """Return whether a module gives NaN on its sample, as roots of negative numbers do."""
    return str(sample) in _NAN


_FIXED_ROWS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(
        ("Bilinear", "Conv1d", "Conv2d", "Conv3d", "GLU", "Linear", "MultiheadAttention"), (2,)
    ),
    **dict.fromkeys(("InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"), (2,)),
    **dict.fromkeys(("ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"), (1,)),
    **dict.fromkeys(("FractionalMaxPool3d", "GRU", "LSTM", "RNN", "RNNCell"), (0, 1, 2)),
    **dict.fromkeys(("GRUCell", "LSTMCell"), (0, 1)),
    "CTCLoss": (0,),
}
"""Module -> indices of its samples."""
_NAN = frozenset(
    {
        "nn.LPPool1d-0",
        "nn.LPPool2d-2",
        "nn.LPPool3d-2",
        "nn.KLDivLoss-0",
        "nn.KLDivLoss-1",
        "nn.KLDivLoss-2",
    }
)
LAZY = [sample for sample in module_samples() if sample.module.startswith("nn.Lazy")]
TRAINABLE = [sample for sample in module_samples() if sample not in LAZY]
