"""Optimizers with many forms of state, computations with Python numbers, or an inner optimizer."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor, optim


class Each(optim.Optimizer):
    """Changes each parameter by `change`."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        for group in self.param_groups:
            for p in group["params"]:
                self.change(p, p.grad, group, self.state[p])

    def change(
        self, p: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> None:
        raise NotImplementedError


class Factors(Each):
    """A list of one factor per dim, with bases that are replaced every three steps, like SOAP."""

    def change(
        self, p: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> None:
        if not state:
            state["step"] = 0
            state["factors"] = [torch.eye(size) for size in p.shape]
            state["bases"] = {"now": [torch.eye(size) for size in p.shape], "flags": (None, [])}
        state["step"] += 1
        for dim, factor in enumerate(state["factors"]):
            rows = gradient.movedim(dim, 0).flatten(1) if p.ndim > 1 else gradient.unsqueeze(1)
            factor.lerp_(rows @ rows.T, 0.1)
        if state["step"] % 3 == 0:
            state["bases"]["now"] = [torch.linalg.qr(factor)[0] for factor in state["factors"]]
        for dim, basis in enumerate(state["bases"]["now"]):
            gradient = (
                torch.tensordot(gradient, basis, dims=([0], [1]))
                if p.ndim > 1 or dim == 0
                else gradient
            )
        p.sub_(gradient * group["lr"])


class Projector:
    """Keeps a basis in an attribute, like the projector of GaLore."""

    def __init__(self, rank: int) -> None:
        self.rank, self.basis = rank, torch.zeros(())

    def project(self, gradient: Tensor, step: Any) -> Tensor:
        if self.basis.ndim == 0 or step % 4 == 0:
            self.basis = torch.linalg.qr(gradient.T @ gradient)[0][:, : self.rank]
        return gradient @ self.basis


class Projected(Each):
    def change(
        self, p: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> None:
        if not state:
            state["step"], state["projector"] = 0, Projector(2)
        low = state["projector"].project(gradient, state["step"])
        p.sub_(low @ state["projector"].basis.T * group["lr"])
        state["step"] += 1


class Moments(Each):
    """A dict from decay to moment, like AggMo."""

    def change(
        self, p: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> None:
        moments = state.setdefault("moments", {decay: torch.zeros_like(p) for decay in (0.5, 0.9)})
        for decay, moment in moments.items():
            moment.mul_(decay).add_(gradient)
            p.sub_(moment, alpha=group["lr"] / 2)


class OfAll(Each):
    """A count that is stored next to the state of the parameters, like MADGRAD."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        state: dict[Any, Any] = self.state
        state.setdefault("k", torch.tensor([0]))
        super().step()
        state["k"] += 1

    def change(
        self, p: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> None:
        everything: dict[Any, Any] = self.state
        p.sub_(gradient, alpha=group["lr"] * math.pow(everything["k"] + 1, 0.5))


class Rates(Each):
    """Applies `*=` to a rate, and keeps the largest rate.

    The product changes no other reference to the number.
    """

    def change(
        self, p: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> None:
        state["step"] = step = state.get("step", 0) + 1
        step /= 2
        rate = group["lr"]
        rate *= step
        state["largest"] = max(state.get("largest", 0.0), group["lr"])
        p.sub_(gradient * rate / state["largest"] * group["lr"])


class Filled(Each):
    """Creates its state by `full_like(fill_value=)`, and compares tensors."""

    def change(
        self, p: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> None:
        if not state:
            state["mean"] = torch.full_like(p, fill_value=group["lr"])
        if not torch.allclose(state["mean"], gradient, atol=0.5):
            state["mean"].lerp_(gradient, 0.3)
        p.sub_(state["mean"] * group["lr"])


class Ratio(Each):
    """Keeps a Python number or a tensor, depending on values, like LAMB."""

    def change(
        self, p: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> None:
        state["ratio"] = 1.0 if gradient.mean() < 0 else p.norm() / gradient.norm()
        p.sub_(gradient * group["lr"] * state["ratio"])


class Wrapping(optim.Optimizer):
    """Returns halfway to a slow copy in every second step, like Lookahead.

    `shared`: whether the copy is stored in the state of the inner optimizer.
    """

    def __init__(self, inner: optim.Optimizer, *, shared: bool) -> None:
        self.inner = inner
        self.param_groups = inner.param_groups
        self.defaults = inner.defaults
        self.state = inner.state if shared else defaultdict(dict)
        self.slow = inner.state if shared else self.state
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        for group in self.param_groups:
            group["turn"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        self.inner.step()
        for group in self.param_groups:
            group["turn"] += 1
            for p in group["params"]:
                state = self.slow[p]
                if "copy" not in state:
                    state["copy"] = p.clone()
                if group["turn"] % 2 == 0:
                    state["copy"].lerp_(p, 0.5)
                    p.copy_(state["copy"])


class Large(Each):
    """Divides by the mean square of a row in matrices with at least 16 rows and columns only.

    Newer versions of Adafactor do the same.
    """

    def change(
        self, p: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> None:
        mean = (
            gradient.square().mean(1, keepdim=True)
            if p.ndim == 2 and min(p.shape) >= 16
            else gradient.square()
        )
        p.sub_(gradient / (mean.sqrt() + 1e-3) * group["lr"])


class Rounded(Each):
    """Multiplies matrices in bfloat16 with `out=`, like timm's Muon."""

    def change(
        self, p: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> None:
        x = gradient.to(torch.bfloat16)
        x.div_(x.norm() + 1e-7)
        square, cube = torch.empty_like(x @ x.mT), torch.empty_like(x)
        for _ in range(3):
            torch.addmm(square, x, x.mT, beta=0.0, out=square)
            torch.addmm(x, square, x, beta=1.5, alpha=-0.5, out=cube)
            x, cube = cube, x
        p.sub_(x, alpha=group["lr"])


class Cached(Each):
    """Keeps results in a list among the options, like the original RAdam."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        optim.Optimizer.__init__(self, params, {"lr": lr, "buffer": [None, None]})

    def change(
        self, p: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> None:
        if group["buffer"][0] is None:
            group["buffer"][0] = group["lr"] / 2
        p.sub_(gradient * group["buffer"][0])


class Estimated(Each):
    """A distance that depends on all parameters, like that of D-Adaptation.

    At first it is too small to move them.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        for group in self.param_groups:
            group["d"] = max(
                group.get("d", 1e-9), 1e-9 * sum(p.grad.norm().item() for p in group["params"])
            )
            for p in group["params"]:
                p.sub_(p.grad * group["lr"] * group["d"])


class Growing(Each):
    def change(
        self, p: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> None:
        state.setdefault("seen", []).append(gradient.clone())
        p.sub_(gradient * group["lr"])


class Sparse(Each):
    """Keeps the moments of selected elements only."""

    def change(
        self, p: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> None:
        chosen = p.abs() > 0.01
        state["moments"] = gradient[chosen]
        p[chosen] -= state["moments"] * group["lr"]


class Turned(Each):
    """Has other weights for evaluation, like schedule-free optimizers."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


class Rateless(Each):
    def __init__(self, params: Any) -> None:
        optim.Optimizer.__init__(self, params, {})
