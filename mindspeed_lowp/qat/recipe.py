"""Fake quantization as a recipe: it moves tensors to a grid, then another recipe quantizes and multiplies.

So each layer that takes a recipe trains quantization-aware, with its parallelism, its deferral and its reuse
of weights. Gradients pass straight through: those of the other recipe's products reach the weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from mindspeed_lowp import ops
from mindspeed_lowp.formats import FormatInfo
from mindspeed_lowp.qat.grids import Grid
from mindspeed_lowp.recipes import NOT_DIVIDED, Divided, Operand, Recipe, Role
from mindspeed_lowp.recipes.mx import MXRecipe


@dataclass(frozen=True)
class FakeQuantRecipe(Recipe):
    """`base` on fake-quantized weights and, if asked for, inputs; gradients are the business of base alone.

    Blocks of the grids lie along the axis that forward contracts. Along that axis MXFP8 holds them exactly
    (MXFP4 in blocks of a multiple of 32, MXFP8), so forward multiplies the very values of the grid. Backward
    quantizes a weight along the other axis, where one block of 32 meets 32 scales: exact as long as MXFP4
    scales span at most 2 ** 14. Where a base of MX scales does not hold a weight exactly, the layer warns
    once, with a count.

    base: `HighPrecisionRecipe` for fake quantization alone.
    weight, input: their grids; an input without one stays as it is.
    clip_grad: no gradient for elements that saturate on their grid.
    """

    name: ClassVar[str] = "fake quantization"
    formats: ClassVar[tuple[str, ...]] = ()

    base: Recipe
    weight: Grid
    input: Grid | None = None
    clip_grad: bool = False
    _compared: set[tuple[int, int]] = field(init=False, compare=False, repr=False, default_factory=set)

    def __post_init__(self) -> None:
        pass  # the format is that of base, which has been checked

    @property
    def fp8_format(self) -> str:
        return self.base.fp8_format

    @property
    def either_side(self) -> bool:
        return self.base.either_side

    @property
    def row_alignment(self) -> int:
        return self.base.row_alignment

    @property
    def scaling(self) -> Recipe:
        return self.base.scaling

    def element(self, role: Role) -> FormatInfo:
        return self.base.element(role)

    @property
    def divided(self) -> Divided:
        return self.base.divided

    def for_layer(self, divided: Divided = NOT_DIVIDED) -> FakeQuantRecipe:
        return replace(self, base=self.base.for_layer(divided))

    def defers(self, role: Role) -> bool:
        return self.base.defers(role)

    def clips(self, role: Role) -> bool:
        return self.clip_grad and self._grid(role) is not None

    def saturated(self, x: Tensor, role: Role) -> Tensor:
        return self._grid(role).saturated(x, _contracted(x))

    def one_copy_serves_both_axes(self, role: Role) -> bool:
        return self.base.one_copy_serves_both_axes(role)

    def quantize(self, x: Tensor, role: Role, axes: Sequence[int]) -> dict[int, Operand]:
        projected = self._project(x, role)
        operands = self.base.quantize(projected, role, axes)
        if role == "weight" and isinstance(self.base, MXRecipe):
            self._compare(x, projected, operands)
        return operands

    def quantize_groups(
        self, x: Tensor, role: Role, group_list: Tensor, axes: Sequence[int]
    ) -> dict[int, Operand]:
        return self.base.quantize_groups(self._project(x, role), role, group_list, axes)

    def slice_group(self, x: Operand, group: int, start: int, end: int) -> Operand:
        return self.base.slice_group(x, group, start, end)

    def matmul(
        self, left: Operand, right: Operand, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        return self.base.matmul(left, right, out_dtype, bias)

    def matmul_add_(self, acc: Tensor, left: Operand, right: Operand) -> None:
        self.base.matmul_add_(acc, left, right)

    def grouped_matmul(
        self, left: Operand, right: Operand, group_list: Tensor, out_dtype: torch.dtype
    ) -> Tensor:
        return self.base.grouped_matmul(left, right, group_list, out_dtype)

    def grouped_wgrad(
        self, left: Operand, right: Operand, group_list: Tensor, out_dtype: torch.dtype
    ) -> Tensor:
        return self.base.grouped_wgrad(left, right, group_list, out_dtype)

    def grouped_wgrad_add_(self, acc: Tensor, left: Operand, right: Operand, group_list: Tensor) -> None:
        self.base.grouped_wgrad_add_(acc, left, right, group_list)

    def _grid(self, role: Role) -> Grid | None:
        return {"weight": self.weight, "input": self.input, "grad": None}[role]

    def _project(self, x: Tensor, role: Role) -> Tensor:
        grid = self._grid(role)
        return x if grid is None else grid.project(x, _contracted(x))

    def _compare(self, weight: Tensor, projected: Tensor, operands: dict[int, Operand]) -> None:
        """Warn of what base makes of the weight; the first time that it is quantized along an axis."""
        for axis, (data, scale) in operands.items():
            key = (weight.data_ptr(), axis)
            if key in self._compared:
                continue
            self._compared.add(key)
            exact = ops.anti_mx_quant(data, scale, axis=axis, dst_type=projected.dtype) == projected
            missed = exact.numel() - int(exact.sum())
            if missed:
                warnings.warn(
                    f"quantization-aware training: {missed} of the {exact.numel()} {self.weight.name} weights"
                    f" of a layer {list(weight.shape)} are not exact in {self.base.name} along axis {axis}: "
                    "scales that meet in one of its blocks are too far apart",
                    stacklevel=2,
                )


def _contracted(x: Tensor) -> int:
    """The axis that forward contracts: K of x [T, K], of a weight [N, K] and of stacked ones [E, K, N]."""
    return -2 if x.dim() == 3 else -1
