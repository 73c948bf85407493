"""What the matmul operators check alike about operands and scales.

In the accepted case every check is a lookup or a comparison; messages are put together only on failure.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_lowp.formats import E2M1, E4M3, E5M2, HIF8, INT8, FormatInfo, format_of
from mindspeed_lowp.ops import _checks
from mindspeed_lowp.ops.scaling import MX, VECTORS, Modes, Scaling, scaling_of

_OF_DTYPE = {info.dtype: info for info in (E4M3, E5M2, INT8)}
_OF_CODE = (HIF8, E2M1)  # these travel as uint8


def element_format(argument: str, x: Tensor, kind: torch.dtype | int | None) -> FormatInfo:
    """The format of an operand: its dtype says it; for uint8 ``kind`` does, torch_npu's `..._dtype`."""
    if kind is None:
        info = _OF_DTYPE.get(x.dtype)
        if info is None:
            raise ValueError(
                f"{argument} has dtype {x.dtype}; use torch.float8_e4m3fn, torch.float8_e5m2 or torch.int8, "
                f"or torch.uint8 with {argument}_dtype=290 (HiFloat8) or 296 (FP4 E2M1)"
            )
        return info
    info = format_of(kind, _OF_CODE, f"{argument}_dtype")
    if x.dtype != torch.uint8:
        raise ValueError(
            f"{argument} has dtype {x.dtype}, but {argument}_dtype={kind!r} names codes in torch.uint8"
        )
    return info


def by_group_sizes(group_sizes: Sequence[int] | None, modes: Modes, default: Scaling = VECTORS) -> Scaling:
    """The scaling that ``group_sizes`` mean (None: ``default``), one of those in ``modes``."""
    result = default if group_sizes is None else scaling_of(group_sizes)
    if result not in modes:
        choices = (f"{list(scaling.group_sizes) or None} ({scaling.name} scales)" for scaling in modes)
        raise ValueError(f"group_sizes={group_sizes!r} is not supported; use {' or '.join(choices)}")
    return result


def formats(
    modes: Modes, scaling: Scaling, name1: str, info1: FormatInfo, name2: str, info2: FormatInfo
) -> None:
    """Refuses operands that are not of one kind that the operator takes with these scales."""
    for accepted in modes[scaling]:
        if info1 in accepted and info2 in accepted:
            return
    choices = (" and ".join(info.name for info in accepted) for accepted in modes[scaling])
    raise ValueError(
        f"{name1} is {info1.name} and {name2} is {info2.name}; with {scaling.name} scales both must be of "
        + " or of ".join(choices)
    )


def scale(argument: str, scale: Tensor | None, kind: torch.dtype | int | None, scaling: Scaling) -> Tensor:
    """The scale tensor, of the dtype that the scaling wants; E8M0 as uint8."""
    if scaling is MX:
        return _checks.scales(argument, scale, f"{argument}_dtype", kind)
    if scale is None:
        raise ValueError(f"{argument}=None is not supported; both operands need their scales")
    if scale.dtype != torch.float32:
        raise ValueError(f"{argument} has dtype {scale.dtype}; {scaling.name} scales are torch.float32")
    if kind is not None:
        raise ValueError(
            f"{argument}_dtype={kind!r} is not supported with {scaling.name} scales; leave it out"
        )
    return scale


class Side(NamedTuple):
    """An operand and its scales, with the names of their arguments."""

    name: str
    x: Tensor
    format: FormatInfo
    scale_name: str
    scale: Tensor


def product_shape(scaling: Scaling, left: Side, right: Side) -> tuple[int, int, int]:
    """M, K and N of a product whose operands agree on K; shapes in elements, not in FP4 pairs."""
    if scaling is MX:
        m, k = _unpacked(left, -1)
        n, k2 = _unpacked(right, -2)
    else:
        (m, k), (k2, n) = left.x.shape[-2:], right.x.shape[-2:]
    if k != k2:
        raise ValueError(
            f"{right.name} has {k2} rows, {left.name} has {k} columns; both are K and must be equal"
        )
    return m, k, n


def _unpacked(side: Side, k_axis: int) -> tuple[int, int]:
    """``(M, K)`` or ``(N, K)`` of an MX operand whose axis ``k_axis`` (-1 or -2) is K.

    FP4 codes are packed two a byte along either axis. The scales' dimension for the other axis tells how long
    that one is, and so which of them is half as long as it looks.
    """
    name, x, info, scale_name, scale = side
    if scale.dim() != x.dim() + 1:
        raise ValueError(
            f"{scale_name} has {scale.dim()} dimensions; with {name} of {x.dim()}, MX scales have "
            f"{x.dim() + 1}"
        )
    axis = -3 - k_axis
    length, k = x.shape[axis], x.shape[k_axis]
    if info.bits == 4:
        lines = scale.shape[axis - 1]  # scales have one dimension more, at the end
        if length == lines:
            k *= 2
        elif 2 * length == lines:
            length = lines
        else:
            raise ValueError(
                f"{name} has shape {list(x.shape)} and {scale_name} {list(scale.shape)}: with two codes a "
                f"byte, axis {axis} of {name} must be {lines} or half of that"
            )
        if k <= 2:
            raise ValueError(f"{name} has K={k}; FP4 needs more than 2")
    return length, k


def scale_shapes(scaling: Scaling, left: Side, right: Side, m: int, k: int, n: int) -> None:
    """Refuses scales of other shapes than the product's; leading dimensions are those of the operand."""
    for side, length, shape, why in (
        (left, m, scaling.left_shape(m, k), scaling.left),
        (right, n, scaling.right_shape(k, n), scaling.right),
    ):
        if scaling is not VECTORS:
            _checks.shape(side.scale_name, side.scale, (*side.x.shape[:-2], *shape), why)
        elif side.scale.dim() != 1 or side.scale.shape[0] not in (1, length):
            raise ValueError(
                f"{side.scale_name} has shape {list(side.scale.shape)}, expected [1] or [{length}] ({why})"
            )
