"""MXFP4 fake quantization as functions of a tensor."""

from __future__ import annotations

from torch import Tensor

from mindspeed_lowp.qat.grids import MXFP4Grid, ScaleMode
from mindspeed_lowp.qat.straight_through import straight_through


def mxfp4_quant_dequant(
    x: Tensor,
    block_size: int = 32,
    scale_factor: float = 6.0,
    backend: str = "auto",
    *,
    scale_mode: ScaleMode = "round",
    axis: int = -1,
) -> Tensor:
    """The values of x after quantization to MXFP4, without a gradient.

    x: [...] bf16, fp16 or fp32, in any memory layout -> the same shape and dtype, contiguous.
    axis: along which blocks lie. They never cross rows, and the last is shorter where the axis is no multiple
        of block_size.
    block_size, scale_factor, scale_mode, backend: see `MXFP4Grid`; the numbers, `ops.quant_dequant_mxfp4`.

    Raises ValueError for arguments that are not supported, RuntimeError for an unavailable backend.
    """
    return MXFP4Grid(block_size, scale_factor, scale_mode, backend).project(x.detach(), axis)


def mxfp4_fake_quant(
    x: Tensor,
    block_size: int = 32,
    scale_factor: float = 6.0,
    clip_grad: bool = False,
    backend: str = "auto",
    *,
    scale_mode: ScaleMode = "round",
    axis: int = -1,
) -> Tensor:
    """`mxfp4_quant_dequant` with the gradient of the straight-through estimator.

    clip_grad: no gradient for elements that saturate, those of `mxfp4_saturation_mask`.
    """
    grid = MXFP4Grid(block_size, scale_factor, scale_mode, backend)
    return straight_through(x, grid, axis=axis, clip_grad=clip_grad)


def mxfp4_saturation_mask(
    x: Tensor,
    block_size: int = 32,
    scale_factor: float = 6.0,
    *,
    scale_mode: ScaleMode = "round",
    axis: int = -1,
) -> Tensor:
    """Which elements saturate: `|x| > 6 * scale` of their block; bool, of x's shape."""
    return MXFP4Grid(block_size, scale_factor, scale_mode).saturated(x, axis)
