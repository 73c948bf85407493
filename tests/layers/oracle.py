"""What a layer must compute from quantized operands, in float64, without the package's own dequantization."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_lowp.recipes import Operand, Recipe


def dequantize(operand: Operand, axis: int, group_list: list[int] | None = None) -> Tensor:
    """Codes [M, N] times their block's power of two, float64; blocks of 32 along `axis` (-1 or -2).

    group_list: cumulative rows of groups at which the blocks along axis -2 start anew.
    """
    codes, scale = operand
    codes, exponents = codes.double(), scale.double() - 127
    if axis == -1:
        return dequantize(Operand(operand.data.mT, scale.transpose(0, 1)), -2).mT
    out = torch.empty_like(codes)
    start = 0
    for group, end in enumerate(group_list or [len(codes)]):
        first_scale = start // 64 + group if group_list else 0
        for row in range(start, end):
            block = (row - start) // 32
            exponent = exponents[first_scale + block // 2, :, block % 2]
            out[row] = codes[row] * torch.exp2(exponent)
        start = end
    return out


def rounding_bound(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
    """How far left @ right (float64), summed in fp32 in any order and rounded once, may be from exact."""
    terms = left.shape[-1]
    exact, magnitude = left @ right, left.abs() @ right.abs()
    return (terms + 2) * 2.0**-24 * magnitude + torch.finfo(out_dtype).eps * exact.abs() + 1e-30


def assert_product(actual: Tensor, left: Tensor, right: Tensor, bias: Tensor | None = None) -> None:
    """actual is left @ right (+ bias) but for fp32 summation and the rounding to its dtype."""
    exact = left @ right + (0 if bias is None else bias.double())
    bound = rounding_bound(left, right, actual.dtype)
    if bias is not None:
        bound = (
            bound
            + 2.0**-23 * (exact.abs() + bias.double().abs())
            + torch.finfo(actual.dtype).eps * exact.abs()
        )
    error = (actual.double() - exact).abs()
    worst = (error - bound).max().item() if error.numel() else 0.0
    assert worst <= 0, f"off by up to {worst} beyond fp32 accumulation"


def quantized(recipe: Recipe, x: Tensor, role: str, axis: int) -> Tensor:
    """x as a GEMM sees it, float64."""
    return dequantize(recipe.quantize(x, role, (axis,))[axis], axis)
