"""Blockwise scaling: fp32 scales for 1x128 blocks of a GEMM's left operand and 128x128 tiles of its right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mindspeed_lowp import ops
from mindspeed_lowp.formats import HIF8
from mindspeed_lowp.ops.layout import group_scale_rows
from mindspeed_lowp.recipes.base import Operand, Role
from mindspeed_lowp.recipes.fp32_scales import FP32ScalesRecipe

BLOCK = 128


@dataclass(frozen=True)
class BlockwiseRecipe(FP32ScalesRecipe):
    """Right operands are weights, one copy for both axes, and the input in the weight gradient.

    fp8_format: "e4m3", "hybrid" for E5M2 gradients, or "hif8".
    """

    name: ClassVar[str] = "blockwise"
    either_side: ClassVar[bool] = False
    row_alignment: ClassVar[int] = BLOCK
    group_sizes: ClassVar[Sequence[int] | None] = (1, BLOCK, BLOCK)

    fp8_format: Literal["e4m3", "hybrid", "hif8"] = "e4m3"

    def one_copy_serves_both_axes(self, role: Role) -> bool:
        return role == "weight"

    def quantize(self, x: Tensor, role: Role, axes: Sequence[int]) -> dict[int, Operand]:
        if role == "weight":
            return dict.fromkeys(axes, self._tiles(x, role))
        return {axis: self._along(axis, x, role) for axis in axes}

    def _along(self, axis: int, x: Tensor, role: Role) -> Operand:
        """An input or a gradient for the GEMM that contracts `axis`."""
        if axis == -1:
            return self._blocks(x, role)
        return self._tiles(x, role) if role == "input" else self._blocks(x.mT, role).mT

    def _blocks(self, x: Tensor, role: Role) -> Operand:
        return self._quantize(x, role, rows=1)

    def _tiles(self, x: Tensor, role: Role) -> Operand:
        return self._quantize(x, role, rows=BLOCK)

    def _quantize(self, x: Tensor, role: Role, rows: int) -> Operand:
        info = self.element(role)
        data, scale = ops.dynamic_block_quant(
            x,
            round_mode="round" if info is HIF8 else "rint",
            dst_type=info.npu_code,
            row_block_size=rows,
            col_block_size=BLOCK,
            dst_type_max=self.target(role),
        )
        # What a broken element spoils: of blocks its row, as in the product; of tiles the whole matrix.
        return Operand(data, scale + _broken(x, (-1,) if rows == 1 else (-2, -1)))

    def quantize_groups(
        self, x: Tensor, role: Role, group_list: Tensor, axes: Sequence[int]
    ) -> dict[int, Operand]:
        quantized = {}
        if -1 in axes:
            quantized[-1] = self._blocks(x, role)  # no block holds two rows
        if -2 in axes:
            quantized[-2] = self._restarting(x, role, group_list)
        return quantized

    def _restarting(self, x: Tensor, role: Role, group_list: Tensor) -> Operand:
        """x [T, N] along its rows, blocks restarting at each group: scales [T // 128 + E, ...].

        torch_npu has no operator for it; the layout is what its grouped matmul reads.
        """
        columns = -(-x.shape[1] // BLOCK) if role == "input" else x.shape[1]
        data = torch.empty_like(x, dtype=self.element(role).dtype)
        scale = x.new_zeros((len(x) // BLOCK + len(group_list), columns), dtype=torch.float32)
        start = 0
        for group, end in enumerate(group_list.tolist()):
            if end > start:
                part = self._along(-2, x[start:end], role)
                rows = group_scale_rows(group, start, end, BLOCK)
                data[start:end], scale[rows] = part.data, part.scale
            start = end
        return Operand(data, scale)

    def slice_group(self, x: Operand, group: int, start: int, end: int) -> Operand:
        return Operand(x.data[start:end], x.scale[group_scale_rows(group, start, end, BLOCK)])


def _broken(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """NaN where x, seen over `dims`, has a NaN or Inf, else 0; fp32, with these dimensions of length 1.

    The operator turns NaN and Inf into numbers, and they have to be seen.
    """
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    low, high = x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)
    return (low - low + (high - high)).float()
