"""One fp32 scale for a whole matrix: what the recipes that differ in where it comes from share."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_lowp import ops
from mindspeed_lowp.formats import FormatInfo
from mindspeed_lowp.recipes.base import NOT_DIVIDED, Divided, Operand, Recipe, Role
from mindspeed_lowp.recipes.fp32_scales import FP32ScalesRecipe


class PerTensorRecipe(FP32ScalesRecipe):
    """One copy of each tensor serves both axes. Each expert is a matrix of its own: its weight, its tokens.

    Of two such scales the hardware applies the upper 19 bits of the product, and so does the emulation.
    """

    row_alignment: ClassVar[int] = 1
    group_sizes: ClassVar[Sequence[int] | None] = None

    def for_layer(self, divided: Divided = NOT_DIVIDED) -> Recipe:
        if not divided:
            return self
        recipe = copy.copy(self)
        object.__setattr__(recipe, "divided", divided)
        return recipe

    @abstractmethod
    def quantize_matrix(self, x: Tensor, role: Role) -> Operand:
        """Quantize x [M, N]: codes [M, N] and the scale [1], fp32, that they are to be multiplied by."""

    def amax_of_whole(self, x: Tensor, role: Role) -> Tensor:
        """The largest magnitude of x, or of the tensor that x is a part of, fp32, []."""
        return largest_of_all(amax_of(x), self.divided[role]) if role in self.divided else amax_of(x)

    def one_copy_serves_both_axes(self, role: Role) -> bool:
        return True

    def quantize(self, x: Tensor, role: Role, axes: Sequence[int]) -> dict[int, Operand]:
        if x.dim() == 2:
            quantized = self.quantize_matrix(x, role)
        else:
            matrices = [self.quantize_matrix(matrix, role) for matrix in x]
            quantized = Operand(*(torch.stack(parts) for parts in zip(*matrices, strict=True)))
        return dict.fromkeys(axes, quantized)

    def quantize_groups(
        self, x: Tensor, role: Role, group_list: Tensor, axes: Sequence[int]
    ) -> dict[int, Operand]:
        data = torch.empty_like(x, dtype=self.element(role).dtype)
        scale = x.new_zeros(len(group_list), dtype=torch.float32)
        start = 0
        for group, end in enumerate(group_list.tolist()):
            if end > start:
                part = self.quantize_matrix(x[start:end], role)
                data[start:end], scale[group] = part.data, part.scale[0]
            start = end
        return dict.fromkeys(axes, Operand(data, scale))

    def slice_group(self, x: Operand, group: int, start: int, end: int) -> Operand:
        return Operand(x.data[start:end], x.scale[group : group + 1])

    def matmul_add_(self, acc: Tensor, left: Operand, right: Operand) -> None:
        if self.code is None:  # the fused operator takes, beside MX, HiFloat8 only
            super().matmul_add_(acc, left, right)
            return
        ops.add_quant_matmul_(
            acc,
            left.data,
            right.data,
            right.scale,
            x1_scale=left.scale,
            x1_dtype=self.code,
            x2_dtype=self.code,
        )

    def grouped_wgrad_add_(self, acc: Tensor, left: Operand, right: Operand, group_list: Tensor) -> None:
        if self.code is None:
            super().grouped_wgrad_add_(acc, left, right, group_list)
            return
        ops.add_quant_gmm_(
            acc,
            left.data,
            right.data,
            right.scale,
            group_list,
            x1_scale=left.scale,
            x1_dtype=self.code,
            x2_dtype=self.code,
        )


def amax_of(x: Tensor) -> Tensor:
    """The largest magnitude of x, fp32, []: 0 of nothing, NaN where there is one."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    low, high = x.aminmax()  # no copy of x
    return torch.maximum(low.abs(), high.abs()).float()


def largest_of_all(amax: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The largest over the ranks of each entry of amax, fp32, not negative; NaN where one has it.

    Compared as integers: that is the order of such numbers too, with NaN as the largest, while a maximum of
    floats may lose it.
    """
    bits = amax.abs().view(torch.int32)
    dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=group)
    return bits.view(torch.float32)


def quantize_by(amax: Tensor, x: Tensor, info: FormatInfo, target: float = 0.0) -> Operand:
    """Quantize x [M, N] with the scale that brings `amax` ([], fp32) to `target` (0: the format's maximum).

    The arithmetic is that of `dynamic_quant`. Of an amax of 0 no scale follows, and 1 is taken.
    """
    scale = amax * torch.tensor(1.0 / (target or info.max), dtype=torch.float32)
    scale = torch.where(scale == 0, 1.0, scale).reshape(1)
    return Operand(ops.quantize(x, scale, None, info.npu_code), scale)
