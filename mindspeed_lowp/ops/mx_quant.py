"""Quantization to MXFP8: torch_npu's three quantizers and the way back."""

import torch
from torch import Tensor

from mindspeed_lowp.formats import MX_BLOCK, format_of
from mindspeed_lowp.ops import _checks, layout
from mindspeed_lowp.ops._library import operator
from mindspeed_lowp.ops.kernels import mx as kernels
from mindspeed_lowp.ops.npu import mx as npu
from mindspeed_lowp.ops.reference import mx as reference

_HALF = (torch.bfloat16, torch.float16)
_FLOATS = (*_HALF, torch.float32)


def _fake(x: Tensor, dst_type: torch.dtype, scale_shape: list[int]) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dst_type), x.new_empty(scale_shape, dtype=torch.uint8)


def _fake_one_axis(x: Tensor, axis: int, dst_type: torch.dtype, scale_alg: int) -> tuple[Tensor, ...]:
    return _fake(x, dst_type, layout.scale_shape(x.shape, axis))


def _fake_dual_axis(x: Tensor, dst_type: torch.dtype, scale_alg: int) -> tuple[Tensor, ...]:
    last = x.dim() - 1
    return *_fake_one_axis(x, last, dst_type, scale_alg), *_fake_one_axis(x, last - 1, dst_type, scale_alg)


def _fake_grouped(
    x: Tensor, group_index: Tensor, dst_type: torch.dtype, scale_alg: int
) -> tuple[Tensor, ...]:
    return _fake(x, dst_type, layout.grouped_scale_shape(x.shape, group_index.shape[0]))


_dynamic_mx_quant = operator(
    "dynamic_mx_quant(Tensor x, int axis, ScalarType dst_type, int scale_alg) -> (Tensor, Tensor)",
    reference=reference.dynamic_mx_quant,
    kernel=kernels.dynamic_mx_quant,
    npu=npu.dynamic_mx_quant,
    fake=_fake_one_axis,
)
_dynamic_mx_quant_with_dual_axis = operator(
    "dynamic_mx_quant_with_dual_axis(Tensor x, ScalarType dst_type, int scale_alg)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    reference=reference.dynamic_mx_quant_with_dual_axis,
    kernel=kernels.dynamic_mx_quant_with_dual_axis,
    npu=npu.dynamic_mx_quant_with_dual_axis,
    fake=_fake_dual_axis,
)
_grouped_dynamic_mx_quant = operator(
    "grouped_dynamic_mx_quant(Tensor x, Tensor group_index, ScalarType dst_type, int scale_alg)"
    " -> (Tensor, Tensor)",
    reference=reference.grouped_dynamic_mx_quant,
    kernel=kernels.grouped_dynamic_mx_quant,
    npu=npu.grouped_dynamic_mx_quant,
    fake=_fake_grouped,
)
_anti_mx_quant = operator(
    "anti_mx_quant(Tensor x, Tensor mxscale, int axis, ScalarType dst_type) -> Tensor",
    reference=reference.anti_mx_quant,
    kernel=kernels.anti_mx_quant,
    npu=npu.anti_mx_quant,
    fake=lambda x, mxscale, axis, dst_type: x.new_empty(x.shape, dtype=dst_type),
)


def _axis(axis: int, dim: int) -> int:
    if not -dim <= axis < dim:
        raise ValueError(f"axis={axis} is out of range for x with {dim} dimensions; use {-dim} to {dim - 1}")
    return axis % dim


def dynamic_mx_quant(
    x: Tensor,
    *,
    axis: int = -1,
    round_mode: str = "rint",
    dst_type: torch.dtype | int,
    block_size: int = 32,
    scale_alg: int = 0,
) -> tuple[Tensor, Tensor]:
    """Quantize ``x`` to MXFP8: blocks of 32 elements along ``axis`` share a power-of-two scale.

    The value of an element is ``y * 2 ** (mxscale - 127)``. Elements beyond the format's largest value
    saturate. A tail block shorter than 32 counts its missing elements as 0; a block of zeros has scale byte
    0. A block holding NaN or Inf has scale byte 0xFF and elements +0, so that its products are NaN.

    The scale follows the exact largest magnitude, for fp32 too: nothing goes through bf16 first.

    Args:
        x: bf16, fp16 or fp32, 1 to 7 dimensions, any memory layout; may be empty. fp32 needs at least 32
            elements along ``axis``.
        axis: axis of the blocks.
        round_mode: "rint" (nearest, ties to even), the only mode of FP8.
        dst_type: ``torch.float8_e4m3fn`` (292, 24) or ``torch.float8_e5m2`` (291, 23).
        block_size: 32.
        scale_alg: 0, OCP: ``2 ** (floor(log2(amax)) - emax)``, emax 8 (E4M3) or 15 (E5M2); the largest
            elements may saturate. 1: ``amax / max`` rounded up to a power of two, nothing saturates.

    Returns:
        ``y``, of ``x``'s shape, and ``mxscale``, uint8 E8M0, of ``x``'s shape with ``axis`` shrunk to
        ``ceil(n / 64)`` and a last dimension of 2 added: ``[..., M, ceil(K / 64), 2]`` for axis -1,
        ``[..., ceil(M / 64), K, 2]`` for axis -2. Both are contiguous. With an odd number of blocks the last
        byte is 0.

    Raises:
        ValueError: naming the argument that is not supported.

    Source: ``npu_dynamic_mx_quant``; aclnnDynamicMxQuantV3 and its golden (hicann/ops-nn).
    """
    info = format_of(dst_type)
    if round_mode != "rint" or block_size != MX_BLOCK or scale_alg not in (0, 1):
        _checks.choice("round_mode", round_mode, ("rint",))
        _checks.choice("block_size", block_size, (MX_BLOCK,))
        _checks.choice("scale_alg", scale_alg, (0, 1))
    _checks.dtype("x", x, _FLOATS)
    _checks.dims("x", x, 1, 7)
    axis = _axis(axis, x.dim())
    if x.dtype == torch.float32 and x.shape[axis] < MX_BLOCK:
        raise ValueError(
            f"x has dtype torch.float32 and only {x.shape[axis]} elements along axis {axis}; fp32 needs at "
            f"least {MX_BLOCK}, torch.bfloat16 and torch.float16 take any number"
        )
    return _dynamic_mx_quant(x, axis, info.dtype, scale_alg)


def dynamic_mx_quant_with_dual_axis(
    x: Tensor, *, round_mode: str = "rint", dst_type: torch.dtype | int, scale_alg: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize ``x`` to MXFP8 along its last and its second last axis, reading it once.

    Equal to ``(*dynamic_mx_quant(x, axis=-1), *dynamic_mx_quant(x, axis=-2))``; see there for numbers and
    layouts.

    Args:
        x: ``[..., M, K]``, bf16 or fp16, 2 to 7 dimensions. (For fp32 make two calls of `dynamic_mx_quant`.)
        round_mode: "rint".
        dst_type: ``torch.float8_e4m3fn`` (292, 24) or ``torch.float8_e5m2`` (291, 23).
        scale_alg: 0 or 1, as in `dynamic_mx_quant`.

    Returns:
        ``y1 [..., M, K]``, ``mxscale1 [..., M, ceil(K / 64), 2]``, ``y2 [..., M, K]``,
        ``mxscale2 [..., ceil(M / 64), K, 2]``.

    Raises:
        ValueError: naming the argument that is not supported.

    Source: ``npu_dynamic_mx_quant_with_dual_axis``; aclnnDynamicMxQuantWithDualAxisV2 and its golden.
    """
    info = format_of(dst_type)
    if round_mode != "rint" or scale_alg not in (0, 1):
        _checks.choice("round_mode", round_mode, ("rint",))
        _checks.choice("scale_alg", scale_alg, (0, 1))
    _checks.dtype("x", x, _HALF)
    _checks.dims("x", x, 2, 7)
    return _dynamic_mx_quant_with_dual_axis(x, info.dtype, scale_alg)


def grouped_dynamic_mx_quant(
    x: Tensor,
    group_index: Tensor,
    *,
    round_mode: str = "rint",
    dst_type: torch.dtype | int,
    blocksize: int = 32,
    scale_alg: int = 0,
) -> tuple[Tensor, Tensor]:
    """Quantize the rows of ``x`` to MXFP8 along axis 0, blocks restarting at each group of rows.

    Group i holds the rows from ``group_index[i - 1]`` (0 for the first) to ``group_index[i]``; it may be
    empty and need not be a multiple of 32. Its scales begin at row ``group_index[i - 1] // 64 + i`` of
    ``mxscale`` and are those of ``dynamic_mx_quant(x[group], axis=0)``. Rows of ``mxscale`` between two
    groups are 0 here. (The NPU does not write them and the vendor's golden fills them with 1.0: nothing may
    depend on them.)

    Args:
        x: ``[T, N]``, bf16 or fp16.
        group_index: ``[G]``, int32 or int64, cumulative ends, not decreasing, the last one equal to T.
        round_mode: "rint".
        dst_type: ``torch.float8_e4m3fn`` (292, 24) or ``torch.float8_e5m2`` (291, 23).
        blocksize: 32.
        scale_alg: 0 or 1, as in `dynamic_mx_quant`.

    Returns:
        ``y [T, N]`` and ``mxscale [T // 64 + G, N, 2]``, uint8.

    Raises:
        ValueError: naming the argument that is not supported.

    Source: ``npu_grouped_dynamic_mx_quant``; aclnnGroupedDynamicMxQuantV2, its golden and its arch35 kernel.
    """
    info = format_of(dst_type)
    if round_mode != "rint" or blocksize != MX_BLOCK or scale_alg not in (0, 1):
        _checks.choice("round_mode", round_mode, ("rint",))
        _checks.choice("blocksize", blocksize, (MX_BLOCK,))
        _checks.choice("scale_alg", scale_alg, (0, 1))
    _checks.dtype("x", x, _HALF)
    _checks.dims("x", x, 2, 2)
    _checks.group_list("group_index", group_index)
    if group_index.shape[0] == 0:
        raise ValueError("group_index is empty; give at least one group")
    return _grouped_dynamic_mx_quant(x, group_index, info.dtype, scale_alg)


def anti_mx_quant(
    x: Tensor, mxscale: Tensor, *, axis: int = -1, dst_type: torch.dtype | int = torch.bfloat16
) -> Tensor:
    """The values of MXFP8 codes: ``x * 2 ** (mxscale - 127)``, NaN where the scale byte is 0xFF.

    Exact in fp32 as long as the value is below ``2 ** 128``; rounded once to bf16 or fp16.

    Args:
        x: E4M3 or E5M2 codes, any memory layout.
        mxscale: uint8 or ``torch.float8_e8m0fnu``, in the layout of `dynamic_mx_quant`.
        axis: axis of the blocks.
        dst_type: bf16 (15), fp16 (5) or fp32 (6).

    Returns:
        A contiguous tensor of ``x``'s shape.

    Raises:
        ValueError: naming the argument that is not supported.

    Source: ``npu_anti_mx_quant``.
    """
    _checks.elements("x", x)
    _checks.dims("x", x, 1, 7)
    axis = _axis(axis, x.dim())
    mxscale = _checks.scales("mxscale", mxscale, "mxscale", None)
    expected = tuple(layout.scale_shape(x.shape, axis))
    _checks.shape("mxscale", mxscale, expected, f"for x {list(x.shape)} along axis {axis}")
    return _anti_mx_quant(x, mxscale, axis, _checks.output_dtype("dst_type", dst_type))


def grouped_anti_mx_quant(
    x: Tensor, mxscale: Tensor, group_index: Tensor, *, dst_type: torch.dtype | int = torch.bfloat16
) -> Tensor:
    """The values of codes made by `grouped_dynamic_mx_quant`; torch_npu has no such operator.

    Args:
        x: ``[T, N]``, E4M3 or E5M2 codes.
        mxscale: ``[T // 64 + G, N, 2]``, uint8.
        group_index: ``[G]``, as given to `grouped_dynamic_mx_quant`.
        dst_type: bf16, fp16 or fp32.

    Returns:
        ``[T, N]``.

    Raises:
        ValueError: naming the argument that is not supported.
    """
    _checks.elements("x", x)
    _checks.dims("x", x, 2, 2)
    _checks.group_list("group_index", group_index)
    expected = tuple(layout.grouped_scale_shape(x.shape, group_index.shape[0]))
    _checks.shape("mxscale", mxscale, expected, "[T // 64 + G, N, 2]")
    dtype = _checks.output_dtype("dst_type", dst_type)
    out = x.new_empty(x.shape, dtype=dtype)
    start = 0
    for group, end in enumerate(layout.group_index_ends(group_index, x.shape[0])):
        first = layout.group_scale_row(start, group)
        scale = mxscale[first : first - (start - end) // layout.PAIR]
        out[start:end] = anti_mx_quant(x[start:end], scale, axis=0, dst_type=dtype)
        start = end
    return out
