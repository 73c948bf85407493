"""Quantized matmuls of torch_npu."""

import torch
from torch import Tensor

from mindspeed_lowp.formats import E8M0_NPU_CODE, MX_BLOCK
from mindspeed_lowp.ops import npu

_GROUP_SIZES = [1, 1, MX_BLOCK]


def quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    pertoken_scale: Tensor,
    bias: Tensor | None,
    output_dtype: torch.dtype,
):
    return npu.torch_npu().npu_quant_matmul(
        x1,
        x2,
        scale,
        pertoken_scale=pertoken_scale,
        bias=bias,
        output_dtype=output_dtype,
        pertoken_scale_dtype=E8M0_NPU_CODE,
        scale_dtype=E8M0_NPU_CODE,
        group_sizes=_GROUP_SIZES,
    )


def grouped_matmul(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    per_token_scale: Tensor,
    group_list: Tensor,
    group_type: int,
    group_list_type: int,
    output_dtype: torch.dtype,
):
    return npu.torch_npu().npu_grouped_matmul(
        [x],
        [weight],
        scale=[scale],
        per_token_scale=[per_token_scale],
        group_list=group_list.to(torch.int64),
        split_item=3,
        group_type=group_type,
        group_list_type=group_list_type,
        output_dtype=output_dtype,
        scale_dtype=E8M0_NPU_CODE,
        per_token_scale_dtype=E8M0_NPU_CODE,
    )[0]


def add_quant_matmul_(self: Tensor, x1: Tensor, x2: Tensor, x2_scale: Tensor, x1_scale: Tensor) -> None:
    npu.torch_npu().npu_add_quant_matmul_(
        self,
        x1,
        x2,
        x2_scale,
        x1_scale=x1_scale,
        group_sizes=_GROUP_SIZES,
        x1_scale_dtype=E8M0_NPU_CODE,
        x2_scale_dtype=E8M0_NPU_CODE,
    )


def add_quant_gmm_(
    self: Tensor,
    x1: Tensor,
    x2: Tensor,
    x2_scale: Tensor,
    group_list: Tensor,
    x1_scale: Tensor,
    group_list_type: int,
) -> None:
    # group_sizes must stay unset here: torch_npu refuses it for this operator.
    npu.torch_npu().npu_add_quant_gmm_(
        self,
        x1,
        x2,
        x2_scale,
        group_list.to(torch.int64),
        x1_scale=x1_scale,
        group_list_type=group_list_type,
        x1_scale_dtype=E8M0_NPU_CODE,
        x2_scale_dtype=E8M0_NPU_CODE,
    )
