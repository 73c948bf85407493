"""The kernels of quantization with fp32 scales."""

import math

import torch
from torch import Tensor

from mindspeed_lowp.formats import FORMATS, format_of
from mindspeed_lowp.ops import layout
from mindspeed_lowp.ops.kernels import FLOAT, INPUT, INT, INT64, POINTER, function
from mindspeed_lowp.ops.reference import scaled as reference

_tiles = function("lowp_quant_tiles", [POINTER] * 3 + [INT64] * 5 + [FLOAT] * 2 + [INT] * 3)
_tokens = function("lowp_quant_tokens", [POINTER] * 5 + [INT64] * 2 + [FLOAT] + [INT] * 3)
_tensor = function("lowp_quant_tensor", [POINTER] * 4 + [INT64] * 2 + [FLOAT] + [INT] * 3)
_channels = function("lowp_quant_channels", [POINTER] * 4 + [INT64] * 3 + [FLOAT] + [INT] * 3)
_quantize = function("lowp_quantize", [POINTER] * 4 + [INT64] * 3 + [INT] * 4)


def _fp32(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def dynamic_quant(
    x: Tensor,
    smooth_scales: Tensor | None,
    group_index: Tensor | None,
    dst_type: int,
    quant_mode: str,
    dst_type_max: float,
) -> tuple[Tensor, Tensor]:
    info = format_of(dst_type, FORMATS)
    *batch, rows, cols = x.shape
    if x.numel() == 0:
        return reference.dynamic_quant(x, smooth_scales, group_index, dst_type, quant_mode, dst_type_max)
    x, smooth = x.contiguous(), _fp32(smooth_scales)
    y = torch.empty(x.shape, dtype=info.dtype)
    tail = (reference.largest_code(info, dst_type_max), INPUT[x.dtype], dst_type, torch.get_num_threads())
    lines = math.prod(batch) * rows
    if quant_mode == "pertensor":
        scale = torch.empty(1, dtype=torch.float32)
        _tensor(x.data_ptr(), _pointer(smooth), y.data_ptr(), scale.data_ptr(), lines, cols, *tail)
    elif quant_mode == "perchannel":
        scale = torch.empty(*batch, cols, dtype=torch.float32)
        shape = (math.prod(batch), rows, cols)
        _channels(x.data_ptr(), _pointer(smooth), y.data_ptr(), scale.data_ptr(), *shape, *tail)
    else:
        scale = torch.empty(*batch, rows, dtype=torch.float32)
        ends = [lines] if group_index is None else layout.group_index_ends(group_index, lines)
        ends = (INT64 * len(ends))(*ends)
        _tokens(x.data_ptr(), _pointer(smooth), ends, y.data_ptr(), scale.data_ptr(), lines, cols, *tail)
    return y, scale


def dynamic_block_quant(
    x: Tensor, min_scale: float, dst_type: int, row_block_size: int, col_block_size: int, dst_type_max: float
) -> tuple[Tensor, Tensor]:
    info, x = format_of(dst_type, FORMATS), x.contiguous()
    *batch, rows, cols = x.shape
    y = torch.empty(x.shape, dtype=info.dtype)
    tiles = (-(-rows // row_block_size), -(-cols // col_block_size))
    scale = torch.empty(*batch, *tiles, dtype=torch.float32)
    _tiles(
        x.data_ptr(),
        y.data_ptr(),
        scale.data_ptr(),
        math.prod(batch),
        rows,
        cols,
        row_block_size,
        col_block_size,
        reference.largest_code(info, dst_type_max),
        reference.largest_scale(min_scale),
        INPUT[x.dtype],
        dst_type,
        torch.get_num_threads(),
    )
    return y, scale


def quantize(
    x: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: int, axis: int, div_mode: bool
) -> Tensor:
    x, scales, offset = x.contiguous(), _fp32(scales), _fp32(zero_points)
    y = torch.empty(x.shape, dtype=format_of(dtype, FORMATS).dtype)
    if x.numel() == 0:
        return y
    shape = (1, 1, x.numel()) if scales.numel() == 1 else layout.collapse(x.shape, axis)
    _quantize(
        x.data_ptr(),
        scales.data_ptr(),
        _pointer(offset),
        y.data_ptr(),
        *shape,
        div_mode,
        INPUT[x.dtype],
        dtype,
        torch.get_num_threads(),
    )
    return y
