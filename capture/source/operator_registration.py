"""Write code that registers operators with torch: custom operators, fake kernels, derivatives."""

from __future__ import annotations

import re


def operator_name(text: str) -> str:
    """Return the name "library::operator" in torch's message; a placeholder if it names none."""
    unquoted = re.search(
        r"\b([a-z_]\w*)(?:::|\.)(\w+?)(?:\.(?:default|Tensor|Scalar|out|\w+_\w+))?(?:[:>\s)]|$)",
        text,
        re.IGNORECASE,
    )
    quoted = re.search(r"(\w+)::(\w+)", text)
    chosen = quoted or unquoted
    return f"{chosen[1]}::{chosen[2]}" if chosen else "my_library::my_operator"


def fake_kernel(text: str) -> str:
    """Return a fake kernel for the operator that torch named.

    For one of torch's operators it is a custom operator around it.
    """
    name = operator_name(text)
    if name.startswith("aten::"):
        return custom_operator(name.partition("::")[2].lstrip("_"))
    return (
        f'@torch.library.register_fake("{name}")\ndef _(x):\n    return torch.empty_like(x)  # with'
        " the shape and dtype of the result"
    )


def custom_operator(name: str = "part") -> str:
    """Return a custom operator of the user's own, into which a capture does not look."""
    return (
        f'@torch.library.custom_op("my_library::{name}", mutates_args=())\n'
        f"def {name}(x: torch.Tensor) -> torch.Tensor:\n"
        "    return ...  # the current code\n"
        f"@{name}.register_fake\n"
        "def _(x):\n"
        "    return torch.empty_like(x)  # with the shape and dtype of the result\n"
        f"{name}.register_autograd(lambda ctx, gradient: ...)  # its derivative"
    )


def derivative(text: str) -> str:
    """Return a derivative for the operator that torch named."""
    return (
        "def setup(ctx, inputs, output):\n"
        "    ctx.save_for_backward(*inputs)\n"
        "def backward(ctx, gradient):\n"
        "    (x,) = ctx.saved_tensors\n"
        "    return gradient * ...  # the derivative at x\n"
        f'torch.library.register_autograd("{operator_name(text)}", backward, setup_context=setup)'
    )
