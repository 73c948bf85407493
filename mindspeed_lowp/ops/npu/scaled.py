"""Quantizers with fp32 scales of torch_npu."""

import torch
from torch import Tensor

from mindspeed_lowp.formats import HIF8
from mindspeed_lowp.ops import npu


def dynamic_quant(
    x: Tensor,
    smooth_scales: Tensor | None,
    group_index: Tensor | None,
    dst_type: int,
    quant_mode: str,
    dst_type_max: float,
):
    return npu.torch_npu().npu_dynamic_quant(
        x,
        smooth_scales=smooth_scales,
        group_index=group_index,
        dst_type=dst_type,
        quant_mode=quant_mode,
        dst_type_max=dst_type_max,
    )


def dynamic_block_quant(
    x: Tensor, min_scale: float, dst_type: int, row_block_size: int, col_block_size: int, dst_type_max: float
):
    return npu.torch_npu().npu_dynamic_block_quant(
        x,
        min_scale=min_scale,
        round_mode="round" if dst_type == HIF8.npu_code else "rint",
        dst_type=dst_type,
        row_block_size=row_block_size,
        col_block_size=col_block_size,
        dst_type_max=dst_type_max,
    )


def quantize(x: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: int, axis: int, div_mode: bool):
    y = npu.torch_npu().npu_quantize(x, scales, zero_points, dtype, axis, div_mode)
    return y.view(torch.uint8) if dtype == HIF8.npu_code else y
