"""Tensorwise scaling: one scale a tensor, from its current largest magnitude."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mindspeed_lowp import ops
from mindspeed_lowp.formats import HIF8
from mindspeed_lowp.recipes.base import Operand, Role
from mindspeed_lowp.recipes.per_tensor import PerTensorRecipe, quantize_by

# HiFloat8 is most precise around 1 and loses mantissa bits away from it: its largest magnitudes are brought
# here, where three bits are left, rather than to its largest value. Gradients spread wider.
_HIF8_TARGET = {"input": 15.0, "weight": 15.0, "grad": 224.0}


@dataclass(frozen=True)
class TensorwiseRecipe(PerTensorRecipe):
    """One scale a tensor; for grouped experts, one an expert.

    fp8_format: "e4m3", "hybrid" for E5M2 gradients, or "hif8".
    """

    name: ClassVar[str] = "tensorwise"

    fp8_format: Literal["e4m3", "hybrid", "hif8"] = "e4m3"

    def quantize_matrix(self, x: Tensor, role: Role) -> Operand:
        info = self.element(role)
        target = _HIF8_TARGET[role] if info is HIF8 else 0.0  # 0: the format's largest value
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
