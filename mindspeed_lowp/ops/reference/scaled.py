"""Quantization with fp32 scales: per tensor, token, channel or tile, and with a given scale."""

import math

import torch
from torch import Tensor

from mindspeed_lowp.formats import FORMATS, HIF8, FormatInfo, format_of
from mindspeed_lowp.ops import layout
from mindspeed_lowp.ops.reference.casts import encode


def largest_code(info: FormatInfo, dst_type_max: float) -> float:
    """What the largest magnitude is mapped to; 0.0 means the format's maximum."""
    return dst_type_max if dst_type_max and info == HIF8 else info.max


def largest_scale(min_scale: float) -> float:
    """The limit of scales, ``1 / min_scale`` in fp32; there is none for 0, nor where that is beyond fp32."""
    return (1.0 / torch.tensor(min_scale, dtype=torch.float32)).item() if min_scale else math.inf


def _amax(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The largest magnitudes, kept as dimensions of size 1; NaN if there is one, 0 of nothing."""
    if x.numel() == 0:
        return x.new_zeros([1 if i - x.dim() in dims else n for i, n in enumerate(x.shape)])
    return x.abs().amax(dims, keepdim=True)


def dynamic_quant(
    x: Tensor,
    smooth_scales: Tensor | None,
    group_index: Tensor | None,
    dst_type: int,
    quant_mode: str,
    dst_type_max: float,
) -> tuple[Tensor, Tensor]:
    info, value = format_of(dst_type, FORMATS), x.float()
    if smooth_scales is not None:
        smooth = smooth_scales.float()
        if group_index is not None:
            rows = x.shape[:-1].numel()
            ends = torch.tensor([0, *layout.group_index_ends(group_index, rows)], device=x.device)
            smooth = smooth.repeat_interleave(ends.diff(), dim=0).view(x.shape)
        value = value * (smooth[:, None] if quant_mode == "perchannel" else smooth)
    dims = {"pertoken": (-1,), "perchannel": (-2,), "pertensor": tuple(range(-x.dim(), 0))}[quant_mode]
    # The reciprocal as fp32 arithmetic has it.
    scale = _amax(value, dims)
    scale = scale * (1.0 / scale.new_full((), largest_code(info, dst_type_max)))
    scale = torch.where(scale.isnan(), torch.nan, scale)  # of all NaN patterns, one
    return encode(value / scale, info), scale.flatten() if quant_mode == "pertensor" else scale.squeeze(dims)


def dynamic_block_quant(
    x: Tensor, min_scale: float, dst_type: int, row_block_size: int, col_block_size: int, dst_type_max: float
) -> tuple[Tensor, Tensor]:
    info, value = format_of(dst_type, FORMATS), x.float()
    *batch, rows, cols = x.shape
    bands, tiles = -(-rows // row_block_size), -(-cols // col_block_size)
    finite = torch.where(value.isfinite(), value, 0.0)
    padding = (0, tiles * col_block_size - cols, 0, bands * row_block_size - rows)
    finite = torch.nn.functional.pad(finite, padding)
    amax = _amax(finite.view(*batch, bands, row_block_size, tiles, col_block_size), (-3, -1))
    # By a tensor: CUDA multiplies with the rounded reciprocal of a Python number.
    scale = amax / amax.new_full((), largest_code(info, dst_type_max))
    scale = scale.clamp(max=largest_scale(min_scale))
    each = scale.expand(*batch, bands, row_block_size, tiles, col_block_size)
    each = each.reshape(*batch, bands * row_block_size, tiles * col_block_size)[..., :rows, :cols]
    return encode(value / each, info), scale.view(*batch, bands, tiles)


def quantize(
    x: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: int, axis: int, div_mode: bool
) -> Tensor:
    def along_axis(t: Tensor) -> Tensor:
        return t.float().reshape([-1 if i == axis else 1 for i in range(x.dim())])

    value = x.float() / along_axis(scales) if div_mode else x.float() * along_axis(scales)
    if zero_points is not None:
        value = value + along_axis(zero_points)
    return encode(value, format_of(dtype, FORMATS))
