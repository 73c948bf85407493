"""The matmul operators composed of decoding and GEMMs, one group or batch entry at a time.

`Decoders` is the only thing that differs between devices (C++ on a CPU, the reference elsewhere). Scales of
`VECTORS` come in these shapes; what has a dimension for rows, columns or groups has them in full:

| operator                         | of the left operand            | of the right operand |
|----------------------------------|--------------------------------|----------------------|
| `quant_matmul`                   | ``[1]`` or ``[M]``             | ``[1]`` or ``[N]``   |
| `grouped_matmul`, group type 0   | ``[G, 1]`` or ``[T]``          | ``[G]`` or ``[G, N]`` |
| `grouped_matmul`, group type 2   | ``[G]`` or ``[G, M]``          | ``[G]`` or ``[G, N]`` |
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from mindspeed_lowp.formats import E2M1, E4M3, E5M2, HIF8, INT8, FormatInfo
from mindspeed_lowp.ops import layout
from mindspeed_lowp.ops.gemm import Decoders, Operand, matmul
from mindspeed_lowp.ops.layout import group_ends
from mindspeed_lowp.ops.scaling import MX, VECTORS, Scaling, scaling_of

_FORMAT = {info.npu_code: info for info in (E4M3, E5M2, E2M1, HIF8, INT8)}


def quant_matmul(
    device: Decoders,
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    pertoken_scale: Tensor,
    bias: Tensor | None,
    output_dtype: torch.dtype,
    x1_dtype: int,
    x2_dtype: int,
    group_sizes: list[int],
) -> Tensor:
    scaling, format1, format2 = scaling_of(group_sizes), _FORMAT[x1_dtype], _FORMAT[x2_dtype]
    if scaling is VECTORS:
        scale, pertoken_scale = _vector(scale, format2), _vector(pertoken_scale, format1)
    if x1.dim() == 2 and x2.dim() == 2:
        a, b = Operand(x1, format1, pertoken_scale), Operand(x2, format2, scale)
        return matmul(device, a, b, scaling, bias, output_dtype)
    shape = product_shape(x1, x2, scale, pertoken_scale, scaling)
    out = x1.new_empty(shape, dtype=output_dtype)
    batch = shape[:-2]
    flat = out.view(batch.numel(), *shape[-2:])  # not -1, which view cannot infer for an empty matrix
    left, right = _entries(x1, 2, batch), _entries(x2, 2, batch)
    if scaling is VECTORS:
        left_scale, right_scale = [pertoken_scale] * len(flat), [scale] * len(flat)
    else:
        dims = 3 if scaling is MX else 2
        left_scale, right_scale = _entries(pertoken_scale, dims, batch), _entries(scale, dims, batch)
    for i, entry in enumerate(flat):
        row = bias[i, 0] if bias is not None and bias.dim() == 3 else bias
        a, b = Operand(left[i], format1, left_scale[i]), Operand(right[i], format2, right_scale[i])
        entry.copy_(matmul(device, a, b, scaling, row, output_dtype))
    return out


def product_shape(
    x1: Tensor, x2: Tensor, scale: Tensor, pertoken_scale: Tensor, scaling: Scaling
) -> torch.Size:
    """The shape of ``x1 @ x2``. MX scales tell M and N, which codes packed along them do not."""
    batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    if scaling is MX:
        return torch.Size((*batch, pertoken_scale.shape[-3], scale.shape[-2]))
    return torch.Size((*batch, x1.shape[-2], x2.shape[-1]))


def _entries(x: Tensor, dims: int, batch: torch.Size) -> Tensor:
    """``x`` with its leading dimensions expanded to ``batch`` and flattened, the last ``dims`` kept."""
    return x.expand(*batch, *x.shape[-dims:]).reshape(batch.numel(), *x.shape[-dims:])


def _vector(scale: Tensor, info: FormatInfo) -> Tensor:
    """A scale for the whole matrix without dimensions. (int8 knows rows' scales only, be it one row.)"""
    return scale[0] if scale.shape[0] == 1 and info is not INT8 else scale


def grouped_matmul(
    device: Decoders,
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
) -> Tensor:
    scaling = scaling_of(group_sizes)
    a, b = Operand(x, _FORMAT[x_dtype], per_token_scale), Operand(weight, _FORMAT[weight_dtype], scale)
    if group_type == 2:
        ends = group_ends(group_list, group_list_type, weight.shape[0], "group_list")
        out = x.new_zeros((len(ends), x.shape[0], weight.shape[1]), dtype=output_dtype)
        for group, product in _split_k(device, a, b, scaling, ends, output_dtype):
            out[group] = product
        return out
    ends = group_ends(group_list, group_list_type, x.shape[0], "group_list")
    columns = scale.shape[2] if scaling is MX else weight.shape[2]
    out = x.new_empty((x.shape[0], columns), dtype=output_dtype)
    sizes = _sizes(ends, x.shape[0])
    if scaling is VECTORS and per_token_scale.dim() == 2:
        left_scales = per_token_scale.squeeze(1).unbind()
    else:
        left_scales = per_token_scale.split(sizes)
    parts = zip(x.split(sizes), left_scales, weight.unbind(), scale.unbind(), out.split(sizes), strict=False)
    for group, (codes, left_scale, matrix, right_scale, rows) in enumerate(parts):
        if sizes[group] > 0:
            left = Operand(codes, a.format, left_scale)
            right = Operand(matrix, b.format, right_scale)
            row = None if bias is None else bias[group]
            rows.copy_(matmul(device, left, right, scaling, row, output_dtype))
    out[x.shape[0] - sizes[-1] :] = 0
    return out


def _sizes(ends: list[int], rows: int) -> list[int]:
    """How many rows each group has, and how many are beyond the groups."""
    return [end - start for start, end in pairwise([0, *ends, rows])]


def add_quant_matmul_(
    device: Decoders,
    self: Tensor,
    x1: Tensor,
    x2: Tensor,
    x2_scale: Tensor,
    x1_scale: Tensor,
    x1_dtype: int,
    x2_dtype: int,
    group_sizes: list[int],
) -> None:
    self += quant_matmul(
        device, x1, x2, x2_scale, x1_scale, None, torch.float32, x1_dtype, x2_dtype, group_sizes
    )


def add_quant_gmm_(
    device: Decoders,
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
    ends = group_ends(group_list, group_list_type, x2.shape[0], "group_list")
    a, b = Operand(x1, _FORMAT[x1_dtype], x1_scale), Operand(x2, _FORMAT[x2_dtype], x2_scale)
    for group, product in _split_k(device, a, b, scaling_of(group_sizes), ends, torch.float32):
        self[group] += product


def _split_k(
    device: Decoders, a: Operand, b: Operand, scaling: Scaling, ends: list[int], output_dtype: torch.dtype
) -> Iterator[tuple[int, Tensor]]:
    """``(group, a[:, rows of group] @ b[rows of group])`` for each group that is not empty."""
    sizes, start = _sizes(ends, b.codes.shape[0]), 0
    parts = zip(ends, a.codes.split(sizes, 1), b.codes.split(sizes), strict=False)
    for group, (end, left, right) in enumerate(parts):
        if end > start:
            if scaling is VECTORS:
                left_scale, right_scale = a.scale[group], b.scale[group]
            else:
                scales = layout.group_scale_rows(group, start, end, scaling.scale_rows)
                left_scale, right_scale = a.scale[:, scales], b.scale[scales]
            left, right = Operand(left, a.format, left_scale), Operand(right, b.format, right_scale)
            yield group, matmul(device, left, right, scaling, None, output_dtype)
        start = end
