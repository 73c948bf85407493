"""The same operators on an Ascend 950: one torch_npu call each.

Dtypes are passed as torch dtypes; torch turns them into the ScalarType numbers that torch_npu reads.
"""

import torch
from torch import Tensor

from mindspeed_lowp.formats import E8M0_NPU_CODE, MX_BLOCK

_GROUP_SIZES = [1, 1, MX_BLOCK]


def _torch_npu():
    import torch_npu  # only an NPU tensor leads here, and torch_npu made it

    return torch_npu


def dynamic_mx_quant(x: Tensor, axis: int, dst_type: torch.dtype, scale_alg: int):
    return _torch_npu().npu_dynamic_mx_quant(
        x, axis=axis, round_mode="rint", dst_type=dst_type, block_size=MX_BLOCK, scale_alg=scale_alg
    )


def dynamic_mx_quant_with_dual_axis(x: Tensor, dst_type: torch.dtype, scale_alg: int):
    return _torch_npu().npu_dynamic_mx_quant_with_dual_axis(
        x, round_mode="rint", dst_type=dst_type, scale_alg=scale_alg
    )


def grouped_dynamic_mx_quant(x: Tensor, group_index: Tensor, dst_type: torch.dtype, scale_alg: int):
    return _torch_npu().npu_grouped_dynamic_mx_quant(
        x,
        group_index.to(torch.int32),
        round_mode="rint",
        dst_type=dst_type,
        blocksize=MX_BLOCK,
        scale_alg=scale_alg,
    )


def anti_mx_quant(x: Tensor, mxscale: Tensor, axis: int, dst_type: torch.dtype):
    return _torch_npu().npu_anti_mx_quant(x, mxscale, axis=axis, dst_type=dst_type, src_type=x.dtype)


def quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    pertoken_scale: Tensor,
    bias: Tensor | None,
    output_dtype: torch.dtype,
):
    return _torch_npu().npu_quant_matmul(
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
    return _torch_npu().npu_grouped_matmul(
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
    _torch_npu().npu_add_quant_matmul_(
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
    _torch_npu().npu_add_quant_gmm_(
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
