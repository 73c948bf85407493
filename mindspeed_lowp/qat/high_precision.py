"""The recipe that quantizes nothing: what fake quantization stands on where no other recipe is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mindspeed_lowp.ops.gemm import mm
from mindspeed_lowp.recipes import Operand, Recipe, Role


@dataclass(frozen=True)
class HighPrecisionRecipe(Recipe):
    """Products of the tensors as they are, with the autograd, communication and fusion of quantized layers.

    Nothing but the input and the Parameter itself is kept for backward. Operands of two dtypes, as under
    autocast, are multiplied in that of the left one.
    """

    name: ClassVar[str] = "high precision"
    formats: ClassVar[tuple[str, ...]] = ("high precision",)
    row_alignment: ClassVar[int] = 1

    fp8_format: str = "high precision"

    def defers(self, role: Role) -> bool:
        return True

    def one_copy_serves_both_axes(self, role: Role) -> bool:
        return True

    def quantize(self, x: Tensor, role: Role, axes: Sequence[int]) -> dict[int, Operand]:
        return dict.fromkeys(axes, Operand(x, x.new_ones(())))

    def quantize_groups(
        self, x: Tensor, role: Role, group_list: Tensor, axes: Sequence[int]
    ) -> dict[int, Operand]:
        return self.quantize(x, role, axes)

    def slice_group(self, x: Operand, group: int, start: int, end: int) -> Operand:
        return Operand(x.data[start:end], x.scale)

    def matmul(
        self, left: Operand, right: Operand, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        y = _product(left.data, right.data, out_dtype)
        return y if bias is None else y.add_(bias)

    def matmul_add_(self, acc: Tensor, left: Operand, right: Operand) -> None:
        acc.addmm_(left.data.float(), right.data.float())

    def grouped_matmul(
        self, left: Operand, right: Operand, group_list: Tensor, out_dtype: torch.dtype
    ) -> Tensor:
        rows, weights = _groups(left.data, group_list, 0), right.data
        return torch.cat([_product(x, w, out_dtype) for x, w in zip(rows, weights, strict=True)])

    def grouped_wgrad(
        self, left: Operand, right: Operand, group_list: Tensor, out_dtype: torch.dtype
    ) -> Tensor:
        pairs = zip(_groups(left.data, group_list, 1), _groups(right.data, group_list, 0), strict=True)
        return torch.stack([_product(a, b, out_dtype) for a, b in pairs])

    def grouped_wgrad_add_(self, acc: Tensor, left: Operand, right: Operand, group_list: Tensor) -> None:
        pairs = zip(_groups(left.data, group_list, 1), _groups(right.data, group_list, 0), strict=True)
        for total, (a, b) in zip(acc, pairs, strict=True):
            total.addmm_(a.float(), b.float())


def _groups(x: Tensor, group_list: Tensor, axis: int) -> tuple[Tensor, ...]:
    return x.tensor_split(group_list.cpu()[:-1], axis)


def _product(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
    """left @ right, rounded once; where the result is to be wider than the operands, in its precision."""
    dtype = torch.promote_types(left.dtype, out_dtype)
    return mm(left.to(dtype), right.to(dtype)).to(out_dtype)
