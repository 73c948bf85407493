"""MX scaling: blocks of 32 elements along the contracted axis share a power-of-two scale (OCP MX, E8M0)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_lowp import ops
from mindspeed_lowp.formats import MX_BLOCK
from mindspeed_lowp.ops.layout import PAIR, group_scale_rows, grouped_scale_shape
from mindspeed_lowp.recipes.base import Operand, Recipe, Role

_E8M0 = torch.float8_e8m0fnu
_MX_GROUP_SIZES = [1, 1, MX_BLOCK]


class MXRecipe(Recipe):
    """1x32 blocks for every operand; what all recipes of MX scales share."""

    formats: ClassVar[tuple[str, ...]] = ("e4m3", "hybrid")
    row_alignment: ClassVar[int] = PAIR

    def one_copy_serves_both_axes(self, role: Role) -> bool:
        return False

    def quantize(self, x: Tensor, role: Role, axes: Sequence[int]) -> dict[int, Operand]:
        dst_type = self.element(role).dtype
        # The dual-axis operator reads x once, but takes 16-bit tensors only.
        if len(axes) == 2 and x.dtype != torch.float32:
            last, last_scale, second, second_scale = ops.dynamic_mx_quant_with_dual_axis(x, dst_type=dst_type)
            return {-1: Operand(last, last_scale), -2: Operand(second, second_scale)}
        return {axis: _quantize_axis(x, axis, dst_type) for axis in axes}

    def quantize_groups(
        self, x: Tensor, role: Role, group_list: Tensor, axes: Sequence[int]
    ) -> dict[int, Operand]:
        # Along the last axis no block holds two rows, so the groups do not matter.
        dst_type = self.element(role).dtype
        return {
            axis: _quantize_axis(x, -1, dst_type) if axis == -1 else _quantize_groups(x, group_list, dst_type)
            for axis in axes
        }

    def slice_group(self, x: Operand, group: int, start: int, end: int) -> Operand:
        return Operand(x.data[start:end], x.scale[group_scale_rows(group, start, end)])

    def matmul(
        self, left: Operand, right: Operand, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        return ops.quant_matmul(
            left.data,
            right.data,
            right.scale,
            pertoken_scale=left.scale,
            bias=None if bias is None else bias.float(),  # added to the fp32 sums, before they are rounded
            output_dtype=out_dtype,
            scale_dtype=_E8M0,
            pertoken_scale_dtype=_E8M0,
            group_sizes=_MX_GROUP_SIZES,
        )

    def matmul_add_(self, acc: Tensor, left: Operand, right: Operand) -> None:
        ops.add_quant_matmul_(
            acc,
            left.data,
            right.data,
            right.scale,
            x1_scale=left.scale,
            group_sizes=_MX_GROUP_SIZES,
            x1_scale_dtype=_E8M0,
            x2_scale_dtype=_E8M0,
        )

    def grouped_matmul(
        self, left: Operand, right: Operand, group_list: Tensor, out_dtype: torch.dtype
    ) -> Tensor:
        return _grouped_matmul(left, right, group_list, out_dtype, group_type=0)

    def grouped_wgrad(
        self, left: Operand, right: Operand, group_list: Tensor, out_dtype: torch.dtype
    ) -> Tensor:
        return _grouped_matmul(left, right, group_list, out_dtype, group_type=2)

    def grouped_wgrad_add_(self, acc: Tensor, left: Operand, right: Operand, group_list: Tensor) -> None:
        ops.add_quant_gmm_(
            acc,
            left.data,
            right.data,
            right.scale,
            group_list,
            x1_scale=left.scale,
            x1_scale_dtype=_E8M0,
            x2_scale_dtype=_E8M0,
        )


def _grouped_matmul(
    left: Operand, right: Operand, group_list: Tensor, out_dtype: torch.dtype, group_type: int
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
        scale_dtype=_E8M0,
        per_token_scale_dtype=_E8M0,
    )
    return out


def _quantize_axis(x: Tensor, axis: int, dst_type: torch.dtype) -> Operand:
    length = x.shape[axis]
    if x.dtype == torch.float32 and length < MX_BLOCK:
        # The operator wants a whole block of an fp32 tensor. Zeros change neither scale nor codes.
        missing = MX_BLOCK - length
        padded = F.pad(x, (0, missing) if axis == -1 else (0, 0, 0, missing))
        data, scale = ops.dynamic_mx_quant(padded, axis=axis, dst_type=dst_type)
        return Operand(data.narrow(axis, 0, length), scale.narrow(axis - 1, 0, -(-length // PAIR)))
    return Operand(*ops.dynamic_mx_quant(x, axis=axis, dst_type=dst_type))


def _quantize_groups(x: Tensor, group_list: Tensor, dst_type: torch.dtype) -> Operand:
    """Along the rows, blocks restarting at each group."""
    if x.dtype != torch.float32:
        return Operand(*ops.grouped_dynamic_mx_quant(x, group_list.to(torch.int32), dst_type=dst_type))
    # The operator takes 16-bit tensors only: group by group, in its layout.
    data = torch.empty_like(x, dtype=dst_type)
    scale = x.new_zeros(grouped_scale_shape(x.shape, len(group_list)), dtype=torch.uint8)
    start = 0
    for group, end in enumerate(group_list.tolist()):
        if end > start:
            part = _quantize_axis(x[start:end], -2, dst_type)
            data[start:end] = part.data
            scale[group_scale_rows(group, start, end)] = part.scale
        start = end
    return Operand(data, scale)
