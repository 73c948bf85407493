"""MX quantizers of torch_npu."""

import torch
from torch import Tensor

from mindspeed_lowp.formats import MX_BLOCK, MX_FORMATS, format_of
from mindspeed_lowp.ops import npu


def _spelling(code: int) -> torch.dtype | int:
    """The format's dtype, or its code if torch has none."""
    info = format_of(code, MX_FORMATS)
    return code if info.bits == 4 else info.dtype


def dynamic_mx_quant(
    x: Tensor,
    axis: int,
    dst_type: int,
    round_mode: str,
    block_size: int,
    scale_alg: int,
    dst_type_max: float,
    max_low_bound: float,
):
    return npu.torch_npu().npu_dynamic_mx_quant(
        x,
        axis=axis,
        round_mode=round_mode,
        dst_type=_spelling(dst_type),
        block_size=block_size,
        scale_alg=scale_alg,
        dst_type_max=dst_type_max,
        max_low_bound=max_low_bound,
    )


def dynamic_mx_quant_with_dual_axis(
    x: Tensor, dst_type: int, round_mode: str, scale_alg: int, dst_type_max: float
):
    return npu.torch_npu().npu_dynamic_mx_quant_with_dual_axis(
        x,
        round_mode=round_mode,
        dst_type=_spelling(dst_type),
        scale_alg=scale_alg,
        dst_type_max=dst_type_max,
    )


def dynamic_block_mx_quant(x: Tensor, dst_type: int, round_mode: str, scale_alg: int, dst_type_max: float):
    return npu.torch_npu().npu_dynamic_block_mx_quant(
        x,
        round_mode=round_mode,
        dst_type=_spelling(dst_type),
        scale_alg=scale_alg,
        dst_type_max=dst_type_max,
    )


def grouped_dynamic_mx_quant(
    x: Tensor, group_index: Tensor, dst_type: int, round_mode: str, scale_alg: int, dst_type_max: float
):
    return npu.torch_npu().npu_grouped_dynamic_mx_quant(
        x,
        group_index.to(torch.int32),
        round_mode=round_mode,
        dst_type=_spelling(dst_type),
        blocksize=MX_BLOCK,
        scale_alg=scale_alg,
        dst_type_max=dst_type_max,
    )


def anti_mx_quant(x: Tensor, mxscale: Tensor, axis: int, src_type: int, dst_type: torch.dtype):
    if format_of(src_type, MX_FORMATS).bits == 4:
        x = x.contiguous()  # the operator refuses FP4 of any other layout
    return npu.torch_npu().npu_anti_mx_quant(
        x, mxscale, axis=axis, dst_type=dst_type, src_type=_spelling(src_type)
    )
