"""Lists the torch modes around a call: the one module of capture/ with torch's private names.

Tested with torch 2.13.0. torch has no public function that lists active modes, transforms or hooks
on saved tensors.
"""

from __future__ import annotations

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def active_modes() -> list[str]:
    """Return the names of active modes, torch.func transforms and saved tensor hooks.

    A default device is not among them.
    """
    modes = (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())  # type: ignore[no-untyped-call]  # of torch's
    names = [
        type(mode).__name__.lstrip("_") for mode in modes if not isinstance(mode, DeviceContext)
    ]
    transforms = torch._C._functorch.get_interpreter_stack()
    names += [f"torch.func.{transform.key().name.lower()}" for transform in transforms or ()]
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        names.append("torch.autograd.graph.saved_tensors_hooks")
    return names
