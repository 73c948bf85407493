"""The MX kernels, each allocating its results and calling one function of the library."""

import torch
from torch import Tensor

from mindspeed_lowp.formats import E4M3, E5M2
from mindspeed_lowp.ops import layout
from mindspeed_lowp.ops.kernels import INPUT, INT, INT64, POINTER, function

_FORMAT = {E4M3.dtype: 0, E5M2.dtype: 1}  # csrc/mx.h

_quant = function("lowp_mx_quant", [POINTER] * 3 + [INT64] * 3 + [INT] * 4)
_quant_dual = function("lowp_mx_quant_dual", [POINTER] * 5 + [INT64] * 3 + [INT] * 4)
_quant_grouped = function("lowp_mx_quant_grouped", [POINTER] * 4 + [INT64] * 3 + [INT] * 4)
_dequant = function("lowp_mx_dequant", [POINTER] * 3 + [INT64] * 10 + [INT] * 4)


def dynamic_mx_quant(x: Tensor, axis: int, dst_type: torch.dtype, scale_alg: int) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=dst_type)
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
    x: Tensor, dst_type: torch.dtype, scale_alg: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = x.contiguous()
    last = x.dim() - 1
    y1, y2 = torch.empty(x.shape, dtype=dst_type), torch.empty(x.shape, dtype=dst_type)
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
    x: Tensor, group_index: Tensor, dst_type: torch.dtype, scale_alg: int
) -> tuple[Tensor, Tensor]:
    ends = layout.group_index_ends(group_index, x.shape[0])
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=dst_type)
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


def anti_mx_quant(x: Tensor, mxscale: Tensor, axis: int, dst_type: torch.dtype) -> Tensor:
    if dst_type not in (torch.bfloat16, torch.float32):
        return anti_mx_quant(x, mxscale, axis, torch.float32).to(dst_type)
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
        _FORMAT[x.dtype],
        INPUT[dst_type],
        torch.get_num_threads(),
    )
    return out
