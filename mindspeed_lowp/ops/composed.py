"""The matmul operators composed of a dequantization and a GEMM, one group or batch entry at a time.

`dequantize` is the only thing that differs between devices (C++ on a CPU, the reference elsewhere).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mindspeed_lowp.ops import gemm, layout
from mindspeed_lowp.ops.gemm import Dequantize
from mindspeed_lowp.ops.layout import group_ends


def quant_matmul(
    dequantize: Dequantize,
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    pertoken_scale: Tensor,
    bias: Tensor | None,
    output_dtype: torch.dtype,
) -> Tensor:
    if x1.dim() == 2 and x2.dim() == 2:
        return gemm.matmul(dequantize, x1, pertoken_scale, x2, scale, bias, output_dtype)
    batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    out = x1.new_empty((*batch, x1.shape[-2], x2.shape[-1]), dtype=output_dtype)
    entries = batch.numel()  # not -1, which reshape cannot infer for an empty matrix
    flat = out.view(entries, *out.shape[-2:])
    a, b = (t.expand(*batch, *t.shape[-2:]).reshape(entries, *t.shape[-2:]) for t in (x1, x2))
    a_scale, b_scale = (
        t.expand(*batch, *t.shape[-3:]).reshape(entries, *t.shape[-3:]) for t in (pertoken_scale, scale)
    )
    for i in range(entries):
        row = bias[i, 0] if bias is not None and bias.dim() == 3 else bias
        flat[i] = gemm.matmul(dequantize, a[i], a_scale[i], b[i], b_scale[i], row, output_dtype)
    return out


def grouped_matmul(
    dequantize: Dequantize,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    per_token_scale: Tensor,
    group_list: Tensor,
    group_type: int,
    group_list_type: int,
    output_dtype: torch.dtype,
) -> Tensor:
    if group_type == 2:
        ends = group_ends(group_list, group_list_type, weight.shape[0], "group_list")
        out = x.new_zeros((len(ends), x.shape[0], weight.shape[1]), dtype=output_dtype)
        for group, product in _split_k(dequantize, x, weight, scale, per_token_scale, ends, output_dtype):
            out[group] = product
        return out
    ends = group_ends(group_list, group_list_type, x.shape[0], "group_list")
    out = x.new_empty((x.shape[0], weight.shape[2]), dtype=output_dtype)
    start = 0
    for group, end in enumerate(ends):
        if end > start:
            rows = slice(start, end)
            out[rows] = gemm.matmul(
                dequantize, x[rows], per_token_scale[rows], weight[group], scale[group], None, output_dtype
            )
        start = end
    out[start:] = 0
    return out


def add_quant_matmul_(
    dequantize: Dequantize, self: Tensor, x1: Tensor, x2: Tensor, x2_scale: Tensor, x1_scale: Tensor
) -> None:
    self += gemm.matmul(dequantize, x1, x1_scale, x2, x2_scale, None, torch.float32)


def add_quant_gmm_(
    dequantize: Dequantize,
    self: Tensor,
    x1: Tensor,
    x2: Tensor,
    x2_scale: Tensor,
    group_list: Tensor,
    x1_scale: Tensor,
    group_list_type: int,
) -> None:
    ends = group_ends(group_list, group_list_type, x2.shape[0], "group_list")
    for group, product in _split_k(dequantize, x1, x2, x2_scale, x1_scale, ends, torch.float32):
        self[group] += product


def _split_k(
    dequantize: Dequantize,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    per_token_scale: Tensor,
    ends: list[int],
    output_dtype: torch.dtype,
) -> Iterator[tuple[int, Tensor]]:
    """``(group, x[:, rows of group] @ weight[rows of group])`` for each group that is not empty."""
    start = 0
    for group, end in enumerate(ends):
        if end > start:
            rows = slice(start, end)
            first = layout.group_scale_row(start, group)
            scales = slice(first, first - (start - end) // layout.PAIR)
            yield (
                group,
                gemm.matmul(
                    dequantize,
                    x[:, rows],
                    per_token_scale[:, scales],
                    weight[rows],
                    scale[scales],
                    None,
                    output_dtype,
                ),
            )
        start = end
