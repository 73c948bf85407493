"""Products of operands whose scales are fp32 numbers: one a tensor, or one a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from mindspeed_lowp import ops
from mindspeed_lowp.formats import HIF8
from mindspeed_lowp.recipes.base import Operand, Recipe, Role

# HiFloat8 is most precise around 1 and loses mantissa bits away from it: its largest magnitudes are brought
# here, where three bits are left, rather than to its largest value. Gradients spread wider.
_HIF8_TARGET = {"input": 15.0, "weight": 15.0, "grad": 224.0}


class FP32ScalesRecipe(Recipe):
    """The GEMMs; subclasses quantize.

    group_sizes: the blocks that share a scale, as the matmul operators write them.
    """

    formats: ClassVar[tuple[str, ...]] = ("e4m3", "hybrid", "hif8")
    group_sizes: ClassVar[Sequence[int] | None]

    @property
    def code(self) -> int | None:
        """How the matmuls are told of elements that torch has no dtype for."""
        return HIF8.npu_code if self.fp8_format == "hif8" else None

    def target(self, role: Role) -> float:
        """What the largest magnitude under a scale becomes; 0 for the format's largest value."""
        return _HIF8_TARGET[role] if self.element(role) is HIF8 else 0.0

    def matmul(
        self, left: Operand, right: Operand, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        # With blocks the operator takes no bias: it is added here, to the fp32 sums before they are rounded.
        fused = bias is not None and self.group_sizes is None
        y = ops.quant_matmul(
            left.data,
            right.data,
            right.scale,
            pertoken_scale=left.scale,
            bias=bias.float() if fused else None,
            output_dtype=out_dtype if bias is None or fused else torch.float32,
            x1_dtype=self.code,
            x2_dtype=self.code,
            group_sizes=self.group_sizes,
        )
        return y if bias is None or fused else (y + bias).to(out_dtype)

    def matmul_add_(self, acc: Tensor, left: Operand, right: Operand) -> None:
        acc += self.matmul(left, right, torch.float32)

    def grouped_matmul(
        self, left: Operand, right: Operand, group_list: Tensor, out_dtype: torch.dtype
    ) -> Tensor:
        return self._grouped_matmul(left, right, group_list, out_dtype, group_type=0)

    def grouped_wgrad(
        self, left: Operand, right: Operand, group_list: Tensor, out_dtype: torch.dtype
    ) -> Tensor:
        return self._grouped_matmul(left, right, group_list, out_dtype, group_type=2)

    def grouped_wgrad_add_(self, acc: Tensor, left: Operand, right: Operand, group_list: Tensor) -> None:
        acc += self.grouped_wgrad(left, right, group_list, torch.float32)

    def _grouped_matmul(
        self, left: Operand, right: Operand, group_list: Tensor, out_dtype: torch.dtype, group_type: int
    ) -> Tensor:
        (out,) = ops.grouped_matmul(
            [left.data],
            [right.data],
            scale=[right.scale],
            per_token_scale=[left.scale],
            group_list=group_list,
            split_item=3,
            group_type=group_type,
            output_dtype=out_dtype,
            x_dtype=self.code,
            weight_dtype=self.code,
        )
        return out
