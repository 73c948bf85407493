"""MX quantizers of torch_npu."""

import torch
from torch import Tensor

from mindspeed_lowp.formats import MX_BLOCK
from mindspeed_lowp.ops import npu


def dynamic_mx_quant(x: Tensor, axis: int, dst_type: torch.dtype, scale_alg: int):
    return npu.torch_npu().npu_dynamic_mx_quant(
        x, axis=axis, round_mode="rint", dst_type=dst_type, block_size=MX_BLOCK, scale_alg=scale_alg
    )


def dynamic_mx_quant_with_dual_axis(x: Tensor, dst_type: torch.dtype, scale_alg: int):
    return npu.torch_npu().npu_dynamic_mx_quant_with_dual_axis(
        x, round_mode="rint", dst_type=dst_type, scale_alg=scale_alg
    )


def grouped_dynamic_mx_quant(x: Tensor, group_index: Tensor, dst_type: torch.dtype, scale_alg: int):
    return npu.torch_npu().npu_grouped_dynamic_mx_quant(
        x,
        group_index.to(torch.int32),
        round_mode="rint",
        dst_type=dst_type,
        blocksize=MX_BLOCK,
        scale_alg=scale_alg,
    )


def anti_mx_quant(x: Tensor, mxscale: Tensor, axis: int, dst_type: torch.dtype):
    return npu.torch_npu().npu_anti_mx_quant(x, mxscale, axis=axis, dst_type=dst_type, src_type=x.dtype)
