"""Grouped matrix products: quantized ones by `mindspeed_lowp.ops`, others in the operands' precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed_lowp import ops
from mindspeed_lowp.emulator.missing import not_emulated

_ROWS, _CONTRACTED = 0, 2  # group_type: what the groups divide


def npu_grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    bias: Sequence[Tensor] | None = None,
    scale: Sequence[Tensor] | None = None,
    group_list: Tensor | Sequence[int] | None = None,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    act_type: int = 0,
    tuning_config: Sequence[int] | None = None,
    output_dtype: torch.dtype | None = None,
    **quantized: object,
) -> list[Tensor]:
    """One product for each group, into one tensor (split_item 2 or 3, which mean the same).

    With `scale` the operands are quantized: see `mindspeed_lowp.ops.grouped_matmul`. Without:

    group_type 0: x [T, K], whose rows belong to groups, and weight [G, K, N] or G tensors [K, N] -> [T, N].
        Rows beyond the groups are 0.
    group_type 2: x [M, T] and weight [T, N], whose T belongs to groups -> [G, M, N].
    group_list: cumulative ends (group_list_type 0), or counts (1).
    bias: G tensors [N], or one [G, N]; for group_type 0.
    """
    if act_type:
        not_emulated(f"torch_npu.npu_grouped_matmul with act_type={act_type}")
    if scale is not None:
        return ops.grouped_matmul(
            x,
            weight,
            bias=bias,
            scale=scale,
            group_list=group_list,
            split_item=split_item,
            group_type=group_type,
            group_list_type=group_list_type,
            output_dtype=output_dtype,
            **quantized,
        )
    given = [name for name, value in quantized.items() if value is not None]
    if given:
        not_emulated(f"torch_npu.npu_grouped_matmul without scale, but with {', '.join(given)}")
    if split_item not in (2, 3) or group_type not in (_ROWS, _CONTRACTED) or len(x) != 1:
        not_emulated(
            f"torch_npu.npu_grouped_matmul of {len(x)} tensors with split_item={split_item}, "
            f"group_type={group_type}"
        )
    groups = _groups(group_list, group_list_type)
    multiply = _over_rows if group_type == _ROWS else _over_contracted
    out = multiply(x[0], weight, None if bias is None else list(bias), groups)
    return [out if output_dtype is None else out.to(output_dtype)]


def npu_grouped_matmul_add_(
    self: Tensor,
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    *,
    transpose_x: bool = True,
    transpose_weight: bool = False,
    group_type: int = _CONTRACTED,
    group_list_type: int = 0,
) -> Tensor:
    """`self[g] += x[group g]ᵀ @ weight[group g]` in place, summed in fp32: weight gradients of experts.

    self: fp32 [G, M, N] (or [G * M, N]); x: [T, M]; weight: [T, N].
    """
    if not transpose_x or transpose_weight or group_type != _CONTRACTED:
        not_emulated("torch_npu.npu_grouped_matmul_add_ with other than xᵀ @ weight")
    groups = _groups(group_list, group_list_type)
    products = _over_contracted(x.t().float(), [weight.float()], None, groups)
    return self.add_(products.view(self.shape))


def _groups(group_list: Tensor | Sequence[int] | None, kind: int) -> list[tuple[int, int]]:
    """Start and end of each group."""
    if group_list is None:
        raise ValueError("npu_grouped_matmul: group_list is needed for one result tensor")
    values = group_list.tolist() if isinstance(group_list, Tensor) else list(group_list)
    ends = torch.tensor(values).cumsum(0).tolist() if kind == 1 else values
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _over_rows(
    x: Tensor, weight: Sequence[Tensor], bias: list[Tensor] | None, groups: list[tuple[int, int]]
) -> Tensor:
    weights = weight[0] if len(weight) == 1 and weight[0].dim() == 3 else weight
    if len(weights) != len(groups):
        raise ValueError(f"npu_grouped_matmul: {len(groups)} groups in group_list, {len(weights)} weights")
    if bias is not None and len(bias) == 1 and bias[0].dim() == 2:
        bias = list(bias[0])
    parts = []
    for number, (start, end) in enumerate(groups):
        part = x[start:end] @ weights[number]
        parts.append(part if bias is None else part + bias[number])
    rest = len(x) - groups[-1][1]
    return torch.cat([*parts, x.new_zeros(rest, parts[0].shape[1])] if rest else parts)


def _over_contracted(
    x: Tensor, weight: Sequence[Tensor], bias: list[Tensor] | None, groups: list[tuple[int, int]]
) -> Tensor:
    if bias is not None:
        not_emulated("torch_npu.npu_grouped_matmul with group_type=2 and a bias")
    (right,) = weight
    return torch.stack([x[:, start:end] @ right[start:end] for start, end in groups])
