"""Where blocks and their scales lie: the one place that knows torch_npu's MX scale layout.

An axis of length n has ``ceil(n / 32)`` blocks. Scales of two neighbouring blocks stand side by side in a
last dimension of size 2, so the axis shrinks to ``ceil(n / 64)``; with an odd number of blocks the last byte
is padding (0):

    x [..., n, ...]  ->  mxscale [..., ceil(n / 64), ..., 2]

(`dynamic_mx_quant` takes longer blocks too; then their length stands for 32 everywhere.)

Collapsing what lies before and after the axis, every case is ``x [outer, n, inner]`` with scales
``[outer, ceil(n / 64), inner, 2]``; ``inner == 1`` for the last axis.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed_lowp.formats import MX_BLOCK

PAIR = 2 * MX_BLOCK


def scale_shape(shape: Sequence[int], axis: int, block_size: int = MX_BLOCK) -> list[int]:
    """Shape of the scales of a tensor of ``shape`` quantized along ``axis`` (>= 0)."""
    return [*shape[:axis], -(-shape[axis] // (2 * block_size)), *shape[axis + 1 :], 2]


def packed_shape(shape: Sequence[int], bits: int) -> list[int]:
    """Shape of the codes of a tensor of ``shape``: 4-bit codes stand two a byte along the last axis."""
    return [*shape[:-1], shape[-1] // 2] if bits == 4 else list(shape)


def pack_fp4(codes: Tensor) -> Tensor:
    """4-bit codes, one a byte, two a byte along the last axis: the first in the low half."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack_fp4(packed: Tensor) -> Tensor:
    """The inverse of `pack_fp4`."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def grouped_scale_shape(shape: Sequence[int], groups: int) -> list[int]:
    """Shape of the scales of ``[rows, columns]`` quantized along its rows in ``groups`` groups."""
    return [shape[0] // PAIR + groups, shape[1], 2]


def collapse(shape: Sequence[int], axis: int) -> tuple[int, int, int]:
    """``(outer, n, inner)`` of a shape around ``axis`` (>= 0)."""
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def interleave(scale: Tensor) -> Tensor:
    """Block scales ``[outer, blocks, inner]`` in the layout ``[outer, ceil(blocks / 2), inner, 2]``."""
    if scale.shape[1] % 2:
        scale = torch.nn.functional.pad(scale, (0, 0, 0, 1))
    outer, blocks, inner = scale.shape
    return scale.reshape(outer, blocks // 2, 2, inner).transpose(2, 3).contiguous()


def deinterleave(mxscale: Tensor, blocks: int) -> Tensor:
    """The inverse of `interleave`: ``[outer, ceil(blocks / 2), inner, 2]`` to ``[outer, blocks, inner]``."""
    outer, pairs, inner, _ = mxscale.shape
    return mxscale.transpose(2, 3).reshape(outer, pairs * 2, inner)[:, :blocks]


def group_scale_rows(group: int, start: int, end: int, covers: int = PAIR) -> slice:
    """The scale rows of the group with the rows ``[start, end)``; a scale row covers ``covers`` of them.

    Groups before it use no more rows than where they begin: ``sum(ceil(n_i / 64)) <= start // 64 + group``.
    """
    first = start // covers + group
    return slice(first, first - (start - end) // covers)


def group_ends(group_list: Tensor, group_list_type: int, rows: int, argument: str) -> list[int]:
    """The groups' ends as integers, from cumulative ends (type 0) or counts (type 1).

    Raises:
        ValueError: naming ``argument``, if a group would have less than 0 rows or end beyond ``rows``.
    """
    ends = (group_list.cumsum(0) if group_list_type == 1 else group_list).tolist()
    start = 0
    for end in ends:
        if end < start:
            rule = "counts must not be negative" if group_list_type == 1 else "ends must not decrease"
            raise ValueError(f"{argument}={group_list.tolist()}: {rule}")
        start = end
    if start > rows:
        raise ValueError(f"{argument}={group_list.tolist()} covers {start} rows, but the tensor has {rows}")
    return ends


def group_index_ends(group_index: Tensor, rows: int) -> list[int]:
    """The cumulative ends of a grouped quantization, which must cover all ``rows``."""
    ends = group_ends(group_index, 0, rows, "group_index")
    if ends[-1:] != [rows]:
        raise ValueError(f"group_index={ends} must end with the number of rows of x, {rows}")
    return ends
