"""The MX kernels, each allocating its results and calling one function of the library."""

import torch
from torch import Tensor

from mindspeed_lowp.formats import E4M3, E5M2, MX_BLOCK, MX_FORMATS, format_of
from mindspeed_lowp.ops import layout
from mindspeed_lowp.ops.kernels import INPUT, INT, INT64, POINTER, function
from mindspeed_lowp.ops.reference import mx as reference

_FORMAT = {E4M3.npu_code: 0, E5M2.npu_code: 1}  # csrc/mx.h

_quant = function("lowp_mx_quant", [POINTER] * 3 + [INT64] * 3 + [INT] * 4)
_quant_dual = function("lowp_mx_quant_dual", [POINTER] * 5 + [INT64] * 3 + [INT] * 4)
_quant_grouped = function("lowp_mx_quant_grouped", [POINTER] * 4 + [INT64] * 3 + [INT] * 4)
_dequant = function("lowp_mx_dequant", [POINTER] * 3 + [INT64] * 10 + [INT] * 4)


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
    if dst_type not in _FORMAT or block_size != MX_BLOCK or max_low_bound != 0.0:
        return reference.dynamic_mx_quant(
            x, axis, dst_type, round_mode, block_size, scale_alg, dst_type_max, max_low_bound
        )
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=format_of(dst_type, MX_FORMATS).dtype)
    mxscale = torch.empty(layout.scale_shape(x.shape, axis), dtype=torch.uint8)
    _quant(
        x.data_ptr(),
        y.data_ptr(),
        mxscale.data_ptr(),
        *layout.collapse(x.shape, axis),
        INPUT[x.dtype],
        _FORMAT[dst_type],
        scale_alg,
        torch.get_num_threads(),
    )
    return y, mxscale


def dynamic_mx_quant_with_dual_axis(
    x: Tensor, dst_type: int, round_mode: str, scale_alg: int, dst_type_max: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if dst_type not in _FORMAT:
        return reference.dynamic_mx_quant_with_dual_axis(x, dst_type, round_mode, scale_alg, dst_type_max)
    x = x.contiguous()
    last = x.dim() - 1
    dtype = format_of(dst_type, MX_FORMATS).dtype
    y1, y2 = torch.empty(x.shape, dtype=dtype), torch.empty(x.shape, dtype=dtype)
    mxscale1 = torch.empty(layout.scale_shape(x.shape, last), dtype=torch.uint8)
    mxscale2 = torch.empty(layout.scale_shape(x.shape, last - 1), dtype=torch.uint8)
    _quant_dual(
        x.data_ptr(),
        y1.data_ptr(),
        mxscale1.data_ptr(),
        y2.data_ptr(),
        mxscale2.data_ptr(),
        *layout.collapse(x.shape, last - 1),
        INPUT[x.dtype],
        _FORMAT[dst_type],
        scale_alg,
        torch.get_num_threads(),
    )
    return y1, mxscale1, y2, mxscale2


def grouped_dynamic_mx_quant(
    x: Tensor, group_index: Tensor, dst_type: int, round_mode: str, scale_alg: int, dst_type_max: float
) -> tuple[Tensor, Tensor]:
    if dst_type not in _FORMAT:
        return reference.grouped_dynamic_mx_quant(
            x, group_index, dst_type, round_mode, scale_alg, dst_type_max
        )
    ends = layout.group_index_ends(group_index, x.shape[0])
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=format_of(dst_type, MX_FORMATS).dtype)
    mxscale = torch.zeros(layout.grouped_scale_shape(x.shape, len(ends)), dtype=torch.uint8)
    _quant_grouped(
        x.data_ptr(),
        y.data_ptr(),
        mxscale.data_ptr(),
        (INT64 * len(ends))(*ends),
        len(ends),
        *x.shape,
        INPUT[x.dtype],
        _FORMAT[dst_type],
        scale_alg,
        torch.get_num_threads(),
    )
    return y, mxscale


def anti_mx_quant(
    x: Tensor, mxscale: Tensor, axis: int, src_type: int, dst_type: torch.dtype, packed_dim: int = -1
) -> Tensor:
    if src_type not in _FORMAT:
        return reference.anti_mx_quant(x, mxscale, axis, src_type, dst_type, packed_dim)
    if dst_type not in (torch.bfloat16, torch.float32):
        return anti_mx_quant(x, mxscale, axis, src_type, torch.float32).to(dst_type)
    out = torch.empty(x.shape, dtype=dst_type)
    if x.dim() == 2 and (x.stride(1) == 1 or x.stride(0) == 1):
        # The operand of a matmul, perhaps a transposed view: read as it lies.
        shape, strides = (1, *x.shape), (0, *x.stride())
        scale_strides = mxscale.stride()
        scale_strides = (0, scale_strides[axis], scale_strides[1 - axis], scale_strides[2])
    else:
        x, mxscale = x.contiguous(), mxscale.contiguous()
        batch, rows, cols = layout.collapse(x.shape, axis)
        pairs = -(-rows // layout.PAIR)
        if cols == 1:  # blocks along the last axis: the rest are lines
            shape, strides, axis = (1, batch, rows), (0, rows, 1), 1
            scale_strides = (0, 2, 2 * pairs, 1)
        else:
            shape, strides, axis = (batch, rows, cols), (rows * cols, cols, 1), 0
            scale_strides = (pairs * cols * 2, 2 * cols, 2, 1)
    _dequant(
        x.data_ptr(),
        mxscale.data_ptr(),
        out.data_ptr(),
        *shape,
        *strides,
        *scale_strides,
        axis,
        _FORMAT[src_type],
        INPUT[dst_type],
        torch.get_num_threads(),
    )
    return out
