"""Backward passes whose gradients are stored or compared one by one."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainload.capture.parity.backward_passes import (
    compare_gradients,
    run_backward,
    store_gradients,
)


def layers() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), torch.randn(3, 8)


def leaves(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    found = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    return dict(zip(leaves(model), found, strict=True))


def test_stored_gradients_are_those_of_autograd() -> None:
    model, x = layers()
    expected = gradients(model, x)
    stored = store_gradients(model(x).square().mean(), leaves(model))
    assert all(stored.is_equal(name, gradient) for name, gradient in expected.items())


def test_no_parameter_keeps_a_gradient() -> None:
    model, x = layers()
    store_gradients(model(x).square().mean(), leaves(model))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_gradient_is_freed_before_the_next_one_is_complete() -> None:
    model, x = layers()
    seen: list[Callable[[], Tensor | None]] = []
    most = 0

    def receive(_: str, gradient: Tensor) -> None:
        nonlocal most
        seen.append(weakref.ref(gradient))
        most = max(most, sum(held() is not None for held in seen))

    run_backward(model(x).square().mean(), leaves(model), receive)
    assert (len(seen), most) == (8, 1)


def test_parts_of_a_gradient_are_added() -> None:
    """Each reentrant checkpoint runs a backward pass of its own."""
    model, x = layers()
    x.requires_grad_()
    layer = model[0]

    def loss(reentrant: bool) -> Tensor:
        y = checkpoint(layer, x, use_reentrant=reentrant)
        total: Tensor = checkpoint(layer, y, use_reentrant=reentrant).square().mean()
        return total

    expected = torch.autograd.grad(loss(False), list(layer.parameters()))
    stored = store_gradients(loss(True), leaves(layer))
    assert all(
        torch.allclose(value, gradient)
        for value, gradient in zip(stored.values(), expected, strict=True)
        if value is not None
    )
    assert not stored.missing()


def test_only_gradients_that_differ_are_kept() -> None:
    model, x = layers()
    expected = gradients(model, x)
    wrong = {**expected, "2.weight": expected["2.weight"] * 1.01}
    compared = compare_gradients(model(x).square().mean(), leaves(model), wrong, 1e-5)
    assert list(compared.different) == ["2.weight"]
    kept = compared.different["2.weight"]
    assert kept is not None
    assert torch.equal(kept, expected["2.weight"])


def test_a_missing_gradient_differs() -> None:
    model, x = layers()
    expected = gradients(model, x)
    compared = compare_gradients(model[:2](x).square().mean(), leaves(model), expected, 1e-5)
    missing = {"2.weight", "2.bias", "3.weight", "3.bias"}
    assert missing == {name for name, value in compared.different.items() if value is None}
    assert compared.reached == leaves(model).keys() - missing
