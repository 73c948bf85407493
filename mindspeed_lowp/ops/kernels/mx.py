"""The MX kernels, each allocating its results and calling one function of the library."""

import torch
from torch import Tensor

from mindspeed_lowp.formats import E1M2, E2M1, E4M3, E5M2, MX_FORMATS, FormatInfo, format_of
from mindspeed_lowp.ops import layout
from mindspeed_lowp.ops.kernels import FLOAT, INPUT, INT, INT64, POINTER, function

_FORMAT = {E4M3: 0, E5M2: 1, E2M1: 2, E1M2: 3}  # csrc/mx.h
_ROUND_MODE = {"rint": 0, "round": 1, "floor": 2}  # csrc/mx.h

_HOW = [INT] * 4 + [FLOAT, INT]  # input, format, round_mode, scale_alg, dst_type_max, threads
_quant = function("lowp_mx_quant", [POINTER] * 3 + [INT64] * 4 + [FLOAT, *_HOW])
_quant_dual = function("lowp_mx_quant_dual", [POINTER] * 5 + [INT64] * 3 + _HOW)
_quant_tiles = function("lowp_mx_quant_tiles", [POINTER] * 4 + [INT64] * 3 + _HOW)
_quant_grouped = function("lowp_mx_quant_grouped", [POINTER] * 4 + [INT64] * 3 + _HOW)
_dequant = function("lowp_mx_dequant", [POINTER] * 3 + [INT64] * 10 + [INT] * 5)


def _codes(x: Tensor, info: FormatInfo) -> Tensor:
    return torch.empty(layout.packed_shape(x.shape, info.bits), dtype=info.dtype)


def _scale(shape: list[int]) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8)


def _how(x: Tensor, info: FormatInfo, round_mode: str, scale_alg: int, dst_type_max: float) -> tuple:
    threads = torch.get_num_threads()
    return INPUT[x.dtype], _FORMAT[info], _ROUND_MODE[round_mode], scale_alg, dst_type_max, threads


def dynamic_mx_quant(
    x: Tensor,
    axis: int,
    dst_type: int,
    round_mode: str,
    block_size: int,
    scale_alg: int,
    dst_type_max: float,
    max_low_bound: float,
) -> tuple[Tensor, Tensor]:
    info = format_of(dst_type, MX_FORMATS)
    x = x.contiguous()
    y, mxscale = _codes(x, info), _scale(layout.scale_shape(x.shape, axis, block_size))
    _quant(
        x.data_ptr(),
        y.data_ptr(),
        mxscale.data_ptr(),
        *layout.collapse(x.shape, axis),
        block_size,
        max_low_bound,
        *_how(x, info, round_mode, scale_alg, dst_type_max),
    )
    return y, mxscale


def dynamic_mx_quant_with_dual_axis(
    x: Tensor, dst_type: int, round_mode: str, scale_alg: int, dst_type_max: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    info = format_of(dst_type, MX_FORMATS)
    x = x.contiguous()
    last = x.dim() - 1
    y1, mxscale1 = _codes(x, info), _scale(layout.scale_shape(x.shape, last))
    y2, mxscale2 = _codes(x, info), _scale(layout.scale_shape(x.shape, last - 1))
    _quant_dual(
        x.data_ptr(),
        y1.data_ptr(),
        mxscale1.data_ptr(),
        y2.data_ptr(),
        mxscale2.data_ptr(),
        *layout.collapse(x.shape, last - 1),
        *_how(x, info, round_mode, scale_alg, dst_type_max),
    )
    return y1, mxscale1, y2, mxscale2


def dynamic_block_mx_quant(
    x: Tensor, dst_type: int, round_mode: str, scale_alg: int, dst_type_max: float
) -> tuple[Tensor, Tensor, Tensor]:
    info = format_of(dst_type, MX_FORMATS)
    x = x.contiguous()
    last = x.dim() - 1
    y = _codes(x, info)
    scale1, scale2 = (_scale(layout.scale_shape(x.shape, axis)) for axis in (last, last - 1))
    _quant_tiles(
        x.data_ptr(),
        y.data_ptr(),
        scale1.data_ptr(),
        scale2.data_ptr(),
        *layout.collapse(x.shape, last - 1),
        *_how(x, info, round_mode, scale_alg, dst_type_max),
    )
    return y, scale1, scale2


def grouped_dynamic_mx_quant(
    x: Tensor, group_index: Tensor, dst_type: int, round_mode: str, scale_alg: int, dst_type_max: float
) -> tuple[Tensor, Tensor]:
    ends = layout.group_index_ends(group_index, x.shape[0])
    info = format_of(dst_type, MX_FORMATS)
    x = x.contiguous()
    y = _codes(x, info)
    mxscale = torch.zeros(layout.grouped_scale_shape(x.shape, len(ends)), dtype=torch.uint8)
    _quant_grouped(
        x.data_ptr(),
        y.data_ptr(),
        mxscale.data_ptr(),
        (INT64 * len(ends))(*ends),
        len(ends),
        *x.shape,
        *_how(x, info, round_mode, scale_alg, dst_type_max),
    )
    return y, mxscale


def anti_mx_quant(
    x: Tensor, mxscale: Tensor, axis: int, src_type: int, dst_type: torch.dtype, packed_dim: int = -1
) -> Tensor:
    if dst_type not in (torch.bfloat16, torch.float32):
        return anti_mx_quant(x, mxscale, axis, src_type, torch.float32, packed_dim).to(dst_type)
    info = format_of(src_type, MX_FORMATS)
    packed_dim %= x.dim()
    if info.bits == 4:
        if x.stride(packed_dim) != 1:  # the kernel reads codes that share a byte along contiguous bytes
            x = x.transpose(packed_dim, -1).contiguous().transpose(packed_dim, -1)
        full = list(x.shape)
        full[packed_dim] *= 2
    else:
        full = x.shape
    out = torch.empty(full, dtype=dst_type)
    packed_axis = 1
    if x.dim() == 2 and (x.stride(1) == 1 or x.stride(0) == 1):
        # The operand of a matmul, perhaps a transposed view: read as it lies.
        shape, strides, packed_axis = (1, *full), (0, *x.stride()), packed_dim
        scale_strides = mxscale.stride()
        scale_strides = (0, scale_strides[axis], scale_strides[1 - axis], scale_strides[2])
    else:
        x, mxscale = x.contiguous(), mxscale.contiguous()
        batch, rows, cols = layout.collapse(full, axis)
        pairs = -(-rows // layout.PAIR)
        per_byte = 8 // info.bits
        if cols == 1:  # blocks along the last axis: the rest are lines
            shape, strides, axis = (1, batch, rows), (0, rows // per_byte, 1), 1
            scale_strides = (0, 2, 2 * pairs, 1)
        else:
            shape, strides, axis = (batch, rows, cols), (rows * cols // per_byte, cols // per_byte, 1), 0
            scale_strides = (pairs * cols * 2, 2 * cols, 2, 1)
    _dequant(
        x.data_ptr(),
        mxscale.data_ptr(),
        out.data_ptr(),
        *shape,
        *strides,
        *scale_strides,
        axis,
        packed_axis,
        _FORMAT[info],
        INPUT[dst_type],
        torch.get_num_threads(),
    )
    return out
