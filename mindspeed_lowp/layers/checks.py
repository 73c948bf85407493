"""What every layer demands of its tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_lowp.recipes import Recipe

_QUANTIZABLE = (torch.bfloat16, torch.float16, torch.float32)


def check_dtypes(caller: str, **tensors: Tensor | None) -> None:
    """Raise ValueError naming the tensor that is neither bf16, fp16 nor fp32."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in _QUANTIZABLE:
            raise ValueError(f"{caller}: {name} has dtype {tensor.dtype}; expected bf16, fp16 or fp32")


def check_recipe(caller: str, recipe: object) -> None:
    """Raise TypeError for what is no recipe, its name above all."""
    if isinstance(recipe, Recipe):
        return
    name = recipe if isinstance(recipe, str) else getattr(recipe, "name", "mxfp8")
    raise TypeError(f"{caller}: recipe={recipe!r} is not a recipe; give get_recipe({name!r})")
