"""Quantized matmuls of torch_npu.

Formats are named where torch has no dtype for them, scales where they are E8M0.
"""

import torch
from torch import Tensor

from mindspeed_lowp.formats import E2M1, E8M0_NPU_CODE, HIF8
from mindspeed_lowp.ops import npu
from mindspeed_lowp.ops.gemm import packed_axis
from mindspeed_lowp.ops.scaling import MX

_MX = list(MX.group_sizes)


def _named(code: int) -> int | None:
    return code if code in (HIF8.npu_code, E2M1.npu_code) else None


def _scale_kind(group_sizes: list[int]) -> int | None:
    return E8M0_NPU_CODE if list(group_sizes) == _MX else None


def _as_packed(x: Tensor, code: int, scale: Tensor, axis: int) -> Tensor:
    """FP4 codes with the axis that they are packed along contiguous: torch_npu goes by the strides."""
    if code != E2M1.npu_code:
        return x
    if packed_axis(x.shape[-2:], scale.shape[-3:], axis) == 1:
        return x.contiguous()
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    pertoken_scale: Tensor,
    bias: Tensor | None,
    output_dtype: torch.dtype,
    x1_dtype: int,
    x2_dtype: int,
    group_sizes: list[int],
):
    return npu.torch_npu().npu_quant_matmul(
        _as_packed(x1, x1_dtype, pertoken_scale, 1),
        _as_packed(x2, x2_dtype, scale, 0),
        scale,
        pertoken_scale=pertoken_scale,
        bias=bias,
        output_dtype=output_dtype,
        x1_dtype=_named(x1_dtype),
        x2_dtype=_named(x2_dtype),
        pertoken_scale_dtype=_scale_kind(group_sizes),
        scale_dtype=_scale_kind(group_sizes),
        group_sizes=list(group_sizes) or None,
    )


def grouped_matmul(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    per_token_scale: Tensor,
    bias: Tensor | None,
    group_list: Tensor,
    group_type: int,
    group_list_type: int,
    output_dtype: torch.dtype,
    x_dtype: int,
    weight_dtype: int,
    group_sizes: list[int],
):
    if group_type == 2 and weight.shape[0] == 0:  # torch_npu refuses it
        return x.new_zeros((group_list.shape[0], x.shape[0], weight.shape[1]), dtype=output_dtype)
    return npu.torch_npu().npu_grouped_matmul(
        [_as_packed(x, x_dtype, per_token_scale, 1)],
        [_as_packed(weight, weight_dtype, scale, 0)],
        bias=None if bias is None else [bias],
        scale=[scale],
        per_token_scale=[per_token_scale],
        group_list=group_list.to(torch.int64),
        split_item=3,
        group_type=group_type,
        group_list_type=group_list_type,
        output_dtype=output_dtype,
        x_dtype=_named(x_dtype),
        weight_dtype=_named(weight_dtype),
        scale_dtype=_scale_kind(group_sizes),
        per_token_scale_dtype=_scale_kind(group_sizes),
    )[0]


def add_quant_matmul_(
    self: Tensor,
    x1: Tensor,
    x2: Tensor,
    x2_scale: Tensor,
    x1_scale: Tensor,
    x1_dtype: int,
    x2_dtype: int,
    group_sizes: list[int],
) -> None:
    npu.torch_npu().npu_add_quant_matmul_(
        self,
        x1,
        x2,
        x2_scale,
        x1_scale=x1_scale,
        group_sizes=list(group_sizes) or None,
        x1_dtype=_named(x1_dtype),
        x2_dtype=_named(x2_dtype),
        x1_scale_dtype=_scale_kind(group_sizes),
        x2_scale_dtype=_scale_kind(group_sizes),
    )


def add_quant_gmm_(
    self: Tensor,
    x1: Tensor,
    x2: Tensor,
    x2_scale: Tensor,
    group_list: Tensor,
    x1_scale: Tensor,
    group_list_type: int,
    x1_dtype: int,
    x2_dtype: int,
    group_sizes: list[int],
) -> None:
    if x2.shape[0] == 0:  # torch_npu refuses it
        return
    # group_sizes must stay unset here: torch_npu refuses it for this operator.
    npu.torch_npu().npu_add_quant_gmm_(
        self,
        x1,
        x2,
        x2_scale,
        group_list.to(torch.int64),
        x1_scale=x1_scale,
        group_list_type=group_list_type,
        x1_dtype=_named(x1_dtype),
        x2_dtype=_named(x2_dtype),
        x1_scale_dtype=_scale_kind(group_sizes),
        x2_scale_dtype=_scale_kind(group_sizes),
    )
