"""Tensorwise scaling: one scale a tensor, from its current largest magnitude."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mindspeed_lowp import ops
from mindspeed_lowp.recipes.base import Operand, Role
from mindspeed_lowp.recipes.per_tensor import PerTensorRecipe, quantize_by


@dataclass(frozen=True)
class TensorwiseRecipe(PerTensorRecipe):
    """One scale a tensor; for grouped experts, one an expert.

    fp8_format: "e4m3", "hybrid" for E5M2 gradients, or "hif8".
    """

    name: ClassVar[str] = "tensorwise"

    fp8_format: Literal["e4m3", "hybrid", "hif8"] = "e4m3"

    def quantize_matrix(self, x: Tensor, role: Role) -> Operand:
        info, target = self.element(role), self.target(role)
        if x.dtype != torch.float32 and role not in self.divided:
            return Operand(
                *ops.dynamic_quant(x, dst_type=info.npu_code, quant_mode="pertensor", dst_type_max=target)
            )
        # dynamic_quant takes 16-bit tensors only, and sees no other rank's part.
        return quantize_by(self.amax_of_whole(x, role), x, info, target)


@dataclass(frozen=True)
class HiF8Recipe(TensorwiseRecipe):
    """`tensorwise` in HiFloat8, by a name of its own."""

    name: ClassVar[str] = "hif8"
    formats: ClassVar[tuple[str, ...]] = ("hif8",)

    fp8_format: Literal["hif8"] = "hif8"
