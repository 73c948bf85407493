"""MXFP8 with square tiles for weights: one quantized copy serves forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mindspeed_lowp import ops
from mindspeed_lowp.recipes.base import Operand, Role
from mindspeed_lowp.recipes.mx import MXRecipe


@dataclass(frozen=True)
class MXFP832x32Recipe(MXRecipe):
    """Weights in 32x32 tiles that share a scale; inputs and gradients in 1x32 blocks, as in `mxfp8`.

    A weight's codes are the same along both axes, so half as many are kept for backward as in `mxfp8` and
    there is nothing to defer. The operator takes 16-bit tensors: a weight in fp32 is rounded to bf16 first.

    fp8_format: "e4m3", or "hybrid" for E5M2 gradients.
    """

    name: ClassVar[str] = "mxfp8-32x32"

    fp8_format: Literal["e4m3", "hybrid"] = "e4m3"

    def one_copy_serves_both_axes(self, role: Role) -> bool:
        return role == "weight"

    def quantize(self, x: Tensor, role: Role, axes: Sequence[int]) -> dict[int, Operand]:
        if role != "weight":
            return super().quantize(x, role, axes)
        if x.dtype == torch.float32:
            x = x.bfloat16()
        data, last_scale, second_scale = ops.dynamic_block_mx_quant(x, dst_type=self.element(role).dtype)
        both = {-1: Operand(data, last_scale), -2: Operand(data, second_scale)}
        return {axis: both[axis] for axis in axes}
