"""Ambient settings of torch, which change what the same code computes.

They belong to a thread or a process.

A job consists of what its functions compute by themselves. Settings around a call of `freeze` or
`launch` (autocast, `no_grad`, a default dtype or device, matmul precision, deterministic
algorithms, attention backends, anomaly detection) are not part of it, and a worker on another
machine would not have them, so they are reset. What cannot be reset (modes, transforms) is
rejected.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch

from trainload.capture.job.torch_modes import active_modes
from trainload.core.errors import RequestError

P = ParamSpec("P")
R = TypeVar("R")

_AUTOCAST = {"cpu": torch.bfloat16, "cuda": torch.float16}
"""Device type -> torch's default dtype for `torch.autocast(device_type)`."""
_ATTENTION = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
_TRACING = threading.RLock()
"""Held by the thread that traces."""
_outside: ContextVar[torch.dtype | None] = ContextVar(
    "default dtype outside of neutral()", default=None
)


def one_at_a_time(verb: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that traces so that concurrent calls wait for each other.

    torch's tracers, and the listeners to them, patch the whole process.
    """

    @functools.wraps(verb)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        with _TRACING:
            return verb(*args, **kwargs)

    return inside


def neutrally(verb: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that it runs inside `neutral()`."""

    @functools.wraps(verb)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        with neutral():
            return verb(*args, **kwargs)

    return inside


def warned_of_autocast(verb: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that a call under autocast, which `neutral()` disables, warns."""

    @functools.wraps(verb)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        active = [device for device in _AUTOCAST if torch.is_autocast_enabled(device)]
        if active:
            warnings.warn(
                f"{verb.__name__} was called under torch.autocast({active[0]!r}), which is not part"
                " of the job and is ignored. Enter it in Job.loss or in the model's forward.",
                stacklevel=2,
            )
        return verb(*args, **kwargs)

    return inside


@contextmanager
def neutral() -> Iterator[None]:
    """Reset all settings listed in the module docstring, and restore them on exit.

    They become those of a fresh process.

    Raises:
        RequestError: if a mode of torch, or a transform of torch.func, is active around the call.
    """
    _check_no_torch_modes()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device, dtype in _AUTOCAST.items():
            stack.enter_context(
                _override(torch.is_autocast_enabled, torch.set_autocast_enabled, False, device)
            )
            stack.enter_context(
                _override(torch.get_autocast_dtype, torch.set_autocast_dtype, dtype, device)
            )
        stack.enter_context(
            _override(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, True)
        )
        if _outside.get() is None:
            token = _outside.set(torch.get_default_dtype())
            stack.callback(_outside.reset, token)
        stack.enter_context(
            _override(torch.get_default_dtype, torch.set_default_dtype, torch.float32)
        )
        if torch.get_default_device() != torch.device("cpu"):
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(_full_precision())
        stack.enter_context(deterministic_algorithms(False))
        for name in _ATTENTION:
            stack.enter_context(
                _override(
                    getattr(torch.backends.cuda, f"{name}_enabled"),
                    getattr(torch.backends.cuda, f"enable_{name}"),
                    True,
                )
            )
        stack.enter_context(
            _override(
                torch.backends.mha.get_fastpath_enabled,
                torch.backends.mha.set_fastpath_enabled,
                True,
            )
        )
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        yield


def _check_no_torch_modes() -> None:
    modes = active_modes()
    if modes:
        raise RequestError(
            "a torch mode or a torch.func transform is active around the call, but it is not part"
            " of the job",
            expected="a call outside of torch modes and torch.func transforms",
            got=", ".join(modes),
            hint=(
                "Exit it before the call; if it belongs to the job, enter it in Job.loss or in the"
                " model's forward."
            ),
        )


def outside_dtype() -> AbstractContextManager[None]:
    """Set the default dtype of the caller of the outermost `neutral()`.

    The user's own code is compared under it.
    """
    dtype = _outside.get()
    return (
        nullcontext()
        if dtype is None
        else _override(torch.get_default_dtype, torch.set_default_dtype, dtype)
    )


def default_dtype_hint() -> str:
    """Return a hint for messages about differences from eager mode.

    "" unless the caller of `neutral()` set a default dtype.
    """
    dtype = _outside.get()
    if dtype in (None, torch.float32):
        return ""
    return (
        f" torch.set_default_dtype({dtype}) is in effect here, but not during training: specify"
        " dtypes explicitly."
    )


@contextmanager
def _override(
    get: Callable[..., Any], assign: Callable[..., Any], value: object, *key: object
) -> Iterator[None]:
    before = get(*key)
    assign(*key, value)
    try:
        yield
    finally:
        assign(*key, before)


@contextmanager
def _full_precision() -> Iterator[None]:
    """Multiply float32 matrices in float32.

    torch has an old and a new API for this setting, and raises if the old one is read after the new
    one was used.
    """
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]  # made at run time
    before = [backend.fp32_precision for backend in backends]
    try:
        legacy = torch.get_float32_matmul_precision()
    except RuntimeError:
        legacy = None
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if legacy is not None:
            torch.set_float32_matmul_precision(legacy)
        for backend, precision in zip(backends, before, strict=True):
            if backend.fp32_precision != precision:
                backend.fp32_precision = precision


@contextmanager
def deterministic_algorithms(mode: bool) -> Iterator[None]:
    """Set whether torch's operators use deterministic algorithms, and restore the setting on exit.

    An operator without a deterministic implementation warns.
    """
    before, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(mode, warn_only=mode)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def deterministic_attention() -> AbstractContextManager[None]:
    """Have torch choose no fused attention within the context whose gradient has no deterministic
    form: that of cuDNN.
    """
    backends = torch.backends.cuda
    return _override(backends.cudnn_sdp_enabled, backends.enable_cudnn_sdp, False)
