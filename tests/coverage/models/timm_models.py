"""Architectures of timm, with random weights and small images.

They are in training mode, with dropout and stochastic depth where available.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch
from tests.coverage.case import ROWS, Batch, Family, make_job
from torch import Tensor, nn
from torch.nn import functional

from trainload.capture.job.definition import Job

FAMILY = Family("timm")


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def add(name: str, size: int = 32, *, mixes_rows: bool = False, **options: Any) -> None:
    """Register a case: `timm.create_model(name, **options)` over images of this size."""

    def build() -> Job:
        _stand_in_for_torchvision()
        import timm

        model = timm.create_model(name, num_classes=5, **options)
        return make_job(
            model, {"x": torch.randn(ROWS, 3, size, size), "y": torch.tensor([0, 1, 2, 3])}, _loss
        )

    FAMILY.add(name, mixes_rows=mixes_rows)(build)


class _Placeholders(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torchvision and all of its submodules as modules of empty classes."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True)
            if name.split(".")[0] == "torchvision"
            else None
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda attribute: _placeholder(attribute)  # type: ignore[method-assign]  # PEP 562
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


def _placeholder(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(
        name,
        (),
        {
            "__getattr__": lambda _, attribute: attribute,
            "NEAREST": 0,
            "BILINEAR": 2,
            "BICUBIC": 3,
            "BOX": 4,
            "HAMMING": 5,
            "LANCZOS": 1,
        },
    )


def _stand_in_for_torchvision() -> None:
    """Replace torchvision, which the data pipelines of timm import, but its models do not need.

    PyPI's builds of torchvision cannot be loaded with a CPU build of torch.
    """
    if "torchvision" not in sys.modules and importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(_Placeholders())


add("resnet18", mixes_rows=True)
add("resnet26d", mixes_rows=True, drop_rate=0.1)
add("efficientnet_b0", mixes_rows=True, drop_rate=0.1, drop_path_rate=0.1)
add("mobilenetv3_small_050", mixes_rows=True)
add("regnetx_002", mixes_rows=True)
add("densenet121", mixes_rows=True, growth_rate=8, block_config=(2, 2))
add("vgg11", size=32, drop_rate=0.1)
add("vit_tiny_patch16_224", img_size=32, depth=2, drop_rate=0.1, drop_path_rate=0.1)
add("deit_tiny_patch16_224", img_size=32, depth=2)
add(
    "swin_tiny_patch4_window7_224",
    size=56,
    img_size=56,
    embed_dim=24,
    depths=(2, 2),
    num_heads=(2, 4),
    drop_path_rate=0.2,
)
add("convnext_atto", depths=(1, 1, 2, 1), drop_path_rate=0.1)
add("mixer_s32_224", size=64, img_size=64)
add("poolformer_s12")
add("cait_xxs24_224", img_size=32, depth=2)
add("beit_base_patch16_224", img_size=32, embed_dim=48, depth=2, num_heads=4)
add("ghostnet_050", mixes_rows=True)
add("repvgg_a0", mixes_rows=True)
add("res2net50_26w_4s", mixes_rows=True)
add("edgenext_xx_small", size=64, mixes_rows=True)
add("davit_tiny", size=64, embed_dims=(16, 32), depths=(1, 1), num_heads=(2, 2), drop_path_rate=0.1)
add("eva02_tiny_patch14_224", size=56, img_size=56, depth=2, drop_path_rate=0.1)
add("hiera_tiny_224", size=64, img_size=(64, 64), embed_dim=16, stages=(1, 1, 1, 1))
