"""Quantization to MXFP8 and MXFP4: torch_npu's quantizers and the way back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed_lowp.formats import (
    E1M2,
    E2M1,
    E4M3,
    E5M2,
    MX_BLOCK,
    MX_FORMATS,
    MXFP8_FORMATS,
    FormatInfo,
    format_of,
)
from mindspeed_lowp.ops import _checks, layout
from mindspeed_lowp.ops._library import operator
from mindspeed_lowp.ops.kernels import mx as kernels
from mindspeed_lowp.ops.npu import mx as npu
from mindspeed_lowp.ops.reference import mx as reference

_HALF = (torch.bfloat16, torch.float16)
_FLOATS = (*_HALF, torch.float32)
_LARGEST_BLOCK = 1024
_LARGEST_FP32 = torch.finfo(torch.float32).max


def _fake_codes(x: Tensor, dst_type: int) -> Tensor:
    info = format_of(dst_type, MX_FORMATS)
    return x.new_empty(layout.packed_shape(x.shape, info.bits), dtype=info.dtype)


def _fake_scale(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x.new_empty(shape, dtype=torch.uint8)


def _fake_one_axis(
    x, axis, dst_type, round_mode, block_size, scale_alg, dst_type_max, max_low_bound
) -> tuple[Tensor, ...]:
    return _fake_codes(x, dst_type), _fake_scale(x, layout.scale_shape(x.shape, axis, block_size))


def _fake_dual_axis(x, dst_type, round_mode, scale_alg, dst_type_max) -> tuple[Tensor, ...]:
    scales = [_fake_scale(x, layout.scale_shape(x.shape, x.dim() + axis)) for axis in (-1, -2)]
    return _fake_codes(x, dst_type), scales[0], _fake_codes(x, dst_type), scales[1]


def _fake_block(x, dst_type, round_mode, scale_alg, dst_type_max) -> tuple[Tensor, ...]:
    scales = [_fake_scale(x, layout.scale_shape(x.shape, x.dim() + axis)) for axis in (-1, -2)]
    return _fake_codes(x, dst_type), *scales


def _fake_grouped(x, group_index, dst_type, round_mode, scale_alg, dst_type_max) -> tuple[Tensor, ...]:
    shape = layout.grouped_scale_shape(x.shape, group_index.shape[0])
    return _fake_codes(x, dst_type), _fake_scale(x, shape)


def _fake_anti(x, mxscale, axis, src_type, dst_type) -> Tensor:
    return x.new_empty(_unpacked_shape(x, format_of(src_type, MX_FORMATS)), dtype=dst_type)


_dynamic_mx_quant = operator(
    "dynamic_mx_quant(Tensor x, int axis, int dst_type, str round_mode, int block_size, int scale_alg,"
    " float dst_type_max, float max_low_bound) -> (Tensor, Tensor)",
    reference=reference.dynamic_mx_quant,
    kernel=kernels.dynamic_mx_quant,
    npu=npu.dynamic_mx_quant,
    fake=_fake_one_axis,
)
_dynamic_mx_quant_with_dual_axis = operator(
    "dynamic_mx_quant_with_dual_axis(Tensor x, int dst_type, str round_mode, int scale_alg,"
    " float dst_type_max) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=reference.dynamic_mx_quant_with_dual_axis,
    kernel=kernels.dynamic_mx_quant_with_dual_axis,
    npu=npu.dynamic_mx_quant_with_dual_axis,
    fake=_fake_dual_axis,
)
_dynamic_block_mx_quant = operator(
    "dynamic_block_mx_quant(Tensor x, int dst_type, str round_mode, int scale_alg, float dst_type_max)"
    " -> (Tensor, Tensor, Tensor)",
    reference=reference.dynamic_block_mx_quant,
    kernel=kernels.dynamic_block_mx_quant,
    npu=npu.dynamic_block_mx_quant,
    fake=_fake_block,
)
_grouped_dynamic_mx_quant = operator(
    "grouped_dynamic_mx_quant(Tensor x, Tensor group_index, int dst_type, str round_mode, int scale_alg,"
    " float dst_type_max) -> (Tensor, Tensor)",
    reference=reference.grouped_dynamic_mx_quant,
    kernel=kernels.grouped_dynamic_mx_quant,
    npu=npu.grouped_dynamic_mx_quant,
    fake=_fake_grouped,
)
_anti_mx_quant = operator(
    "anti_mx_quant(Tensor x, Tensor mxscale, int axis, int src_type, ScalarType dst_type) -> Tensor",
    reference=reference.anti_mx_quant,
    kernel=kernels.anti_mx_quant,
    npu=npu.anti_mx_quant,
    fake=_fake_anti,
)


# ---- checks ----


def _axis(axis: int, dim: int) -> int:
    if not -dim <= axis < dim:
        raise ValueError(f"axis={axis} is out of range for x with {dim} dimensions; use {-dim} to {dim - 1}")
    return axis % dim


# What `scale_alg` may be for a format.
_SCALE_ALGS = {E4M3: (0, 1), E5M2: (0, 1), E2M1: (0, 2), E1M2: (0,)}
_SCALE_ALGS_GROUPED = _SCALE_ALGS | {E1M2: (0, 2)}
_SCALE_ALGS_BLOCK = {E4M3: (0,), E5M2: (0,), E2M1: (0, 2), E1M2: (0,)}


def _modes(
    info: FormatInfo, round_mode: str, scale_alg: int | None, scale_algs: dict[FormatInfo, tuple[int, ...]]
) -> None:
    accepted = scale_algs[info]
    if scale_alg not in accepted:
        raise ValueError(
            f"scale_alg={scale_alg!r} is not supported for {info.name}; use {' or '.join(map(str, accepted))}"
        )
    rounding = ("rint", "floor", "round") if info.bits == 4 else ("rint",)
    if round_mode not in rounding:
        raise ValueError(
            f"round_mode={round_mode!r} is not supported for {info.name}; use"
            f" {' or '.join(map(repr, rounding))}"
        )


def _dst_type_max(value: float | None, info: FormatInfo, scale_alg: int) -> float:
    """The largest value that is scaled to, 0.0 for the format's own: of `scale_alg` 2 only."""
    value = float(value or 0.0)
    if value != 0.0:
        if scale_alg != 2:
            raise ValueError(f"dst_type_max={value} is not supported for scale_alg={scale_alg}; use 0.0")
        if not info.max <= value <= 2 * info.max:
            raise ValueError(
                f"dst_type_max={value} is not supported for {info.name}; use 0.0 or {info.max} to"
                f" {2 * info.max}"
            )
    return value


def _even(x: Tensor, info: FormatInfo) -> None:
    if info.bits == 4 and x.shape[-1] % 2:
        raise ValueError(
            f"x has {x.shape[-1]} elements along its last axis; {info.name} packs two a byte and needs an"
            " even number"
        )


@_checks.names_arguments
def dynamic_mx_quant(
    x: Tensor,
    *,
    axis: int = -1,
    round_mode: str = "rint",
    dst_type: torch.dtype | int = 296,
    block_size: int = 32,
    scale_alg: int = 0,
    dst_type_max: float = 0.0,
    max_low_bound: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Quantize ``x`` to MXFP8 or MXFP4: blocks along ``axis`` share a power-of-two scale.

    The value of an element is ``y * 2 ** (mxscale - 127)``. Elements beyond the format's largest value
    saturate. A tail block counts its missing elements as 0; a block of zeros has scale byte 0. A block
    holding NaN or Inf has scale byte 0xFF and elements +0, so that its products are NaN.

    Elements are divided by their scale exactly and rounded once, also under scale byte 0 (there the NPU's
    FP4 kernels give zeros; the golden, which this follows, does not).

    Args:
        x: bf16, fp16 or fp32, 1 to 7 dimensions, any memory layout; may be empty. FP4 needs an even number
            of elements along the last axis, fp32 at least 32 along ``axis``.
        axis: axis of the blocks.
        round_mode: "rint" (nearest, ties to even), for FP4 also "round" (nearest, ties away from zero) or
            "floor" (towards minus infinity).
        dst_type: ``torch.float8_e4m3fn`` (292, 24), ``torch.float8_e5m2`` (291, 23),
            ``torch.float4_e2m1fn_x2`` (296, 45) or 297, torch_npu's float4_e1m2fn_x2.
        block_size: elements that share a scale: a multiple of 32 up to 1024; 32 for fp32 and for
            ``scale_alg`` 2.
        scale_alg:
            0, OCP: ``2 ** (floor(log2(amax)) - emax)``, emax 8 (E4M3), 15 (E5M2), 2 (E2M1) or 0 (E1M2); the
            largest elements may saturate. It follows the exact amax, for fp32 too.

            1, E4M3 and E5M2: ``amax / max`` rounded up to a power of two, nothing saturates. (The NPU's
            kernels multiply by a rounded ``1 / max``, which parts near powers of two; the golden divides.)

            2, E2M1: with ``dst_type_max`` 0.0, 6.0 or 7.0, `scale_alg` 0's scale, doubled if amax, rounded to
            bf16, is above 1.5 (7.0: 1.75) times its power of two, and byte 0 if amax is a bf16 subnormal.
            With other values ``amax / dst_type_max`` rounded up to a power of two, or byte 0 if that is an
            fp32 subnormal. (The golden of this operator ignores `scale_alg` 2; that of
            `dynamic_block_mx_quant` has it and is followed, rounding to bf16 included: the kernels round or
            truncate by axis and tiling. For the division the document is followed; the kernels multiply by
            the rounded reciprocal.)
        dst_type_max: 0.0 or 6.0 to 12.0, for ``scale_alg`` 2.
        max_low_bound: for ``scale_alg`` 1, at least 0.0: amax is raised to it.

    Returns:
        ``y``, of ``x``'s shape, and ``mxscale``, uint8 E8M0, of ``x``'s shape with ``axis`` shrunk to
        ``ceil(n / (2 * block_size))`` and a last dimension of 2 added: ``[..., M, ceil(K / 64), 2]`` for axis
        -1, ``[..., ceil(M / 64), K, 2]`` for axis -2. With an odd number of blocks the last byte is 0. FP4
        codes are uint8, half as many along the last axis, whatever ``axis`` is: two a byte, the first in the
        low half. Both results are contiguous.

    Raises:
        ValueError: naming the argument that is not supported.

    Source: ``npu_dynamic_mx_quant``; aclnnDynamicMxQuantV3 and its golden (hicann/ops-nn).
    """
    info = format_of(dst_type, MX_FORMATS)
    _modes(info, round_mode, scale_alg, _SCALE_ALGS)
    if block_size % MX_BLOCK or not 0 < block_size <= _LARGEST_BLOCK:
        raise ValueError(
            f"block_size={block_size} is not supported; use a multiple of {MX_BLOCK} up to {_LARGEST_BLOCK}"
        )
    dst_type_max = _dst_type_max(dst_type_max, info, scale_alg)
    if max_low_bound != 0.0 and (
        scale_alg != 1 or not 0.0 <= max_low_bound <= torch.finfo(torch.float32).max
    ):
        raise ValueError(
            f"max_low_bound={max_low_bound} is not supported for scale_alg={scale_alg}; use 0.0, or a finite"
            " positive number with scale_alg=1"
        )
    _checks.dtype("x", x, _FLOATS)
    _checks.dims("x", x, 1, 7)
    axis = _axis(axis, x.dim())
    _even(x, info)
    if block_size != MX_BLOCK and (scale_alg == 2 or x.dtype == torch.float32):
        raise ValueError(
            f"block_size={block_size} is not supported for scale_alg={scale_alg} and x of dtype {x.dtype}; "
            f"scale_alg=2 and torch.float32 take {MX_BLOCK} only"
        )
    if x.dtype == torch.float32 and x.shape[axis] < MX_BLOCK:
        raise ValueError(
            f"x has dtype torch.float32 and only {x.shape[axis]} elements along axis {axis}; fp32 needs at "
            f"least {MX_BLOCK}, torch.bfloat16 and torch.float16 take any number"
        )
    return _dynamic_mx_quant(
        x, axis, info.npu_code, round_mode, block_size, scale_alg, dst_type_max, float(max_low_bound)
    )


@_checks.names_arguments
def dynamic_mx_quant_with_dual_axis(
    x: Tensor,
    *,
    round_mode: str = "rint",
    dst_type: torch.dtype | int = 296,
    scale_alg: int = 0,
    dst_type_max: float | None = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize ``x`` to MXFP8 or MXFP4 along its last and its second last axis, reading it once.

    Equal to ``(*dynamic_mx_quant(x, axis=-1), *dynamic_mx_quant(x, axis=-2))``; see there for numbers,
    layouts and arguments.

    Args:
        x: ``[..., M, K]``, bf16 or fp16, 2 to 7 dimensions, K even for FP4. (For fp32 make two calls of
            `dynamic_mx_quant`.)
        round_mode: "rint"; for FP4 also "round" or "floor".
        dst_type: ``torch.float8_e4m3fn`` (292, 24), ``torch.float8_e5m2`` (291, 23),
            ``torch.float4_e2m1fn_x2`` (296, 45) or 297, torch_npu's float4_e1m2fn_x2.
        scale_alg: 0, for FP8 also 1, for E2M1 also 2.
        dst_type_max: 0.0 (or None) or 6.0 to 12.0, for ``scale_alg`` 2.

    Returns:
        ``y1 [..., M, K]``, ``mxscale1 [..., M, ceil(K / 64), 2]``, ``y2 [..., M, K]``,
        ``mxscale2 [..., ceil(M / 64), K, 2]``; FP4 codes are ``[..., M, K / 2]``.

    Raises:
        ValueError: naming the argument that is not supported.

    Source: ``npu_dynamic_mx_quant_with_dual_axis``; aclnnDynamicMxQuantWithDualAxisV2 and its golden.
    """
    info = format_of(dst_type, MX_FORMATS)
    _modes(info, round_mode, scale_alg, _SCALE_ALGS)
    dst_type_max = _dst_type_max(dst_type_max, info, scale_alg)
    _checks.dtype("x", x, _HALF)
    _checks.dims("x", x, 2, 7)
    _even(x, info)
    return _dynamic_mx_quant_with_dual_axis(x, info.npu_code, round_mode, scale_alg, dst_type_max)


@_checks.names_arguments
def dynamic_block_mx_quant(
    x: Tensor,
    *,
    round_mode: str = "rint",
    dst_type: torch.dtype | int = 296,
    scale_alg: int = 0,
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize ``x`` to MXFP8 or MXFP4 with one scale for each tile of 32 x 32.

    The same codes serve as blocks along the last axis (with ``scale1``) and along the second last (with
    ``scale2``): a weight's transpose needs no second quantization. Tiles cut short by an edge count their
    missing elements as 0; a tile of zeros has scale byte 0; one holding NaN or Inf has scale byte 0xFF and
    elements +0.

    Elements are rounded as by `dynamic_mx_quant`, except that what is subnormal in bf16, before or after
    scaling by the tile's scale, counts as 0 of its sign, as in the golden. (In the golden "round" adds 0.5 in
    bf16, so that 255/512 of the smallest FP4 step becomes one step; the document and the kernel round to the
    nearest, and so does this.)

    Args:
        x: ``[M, K]`` or ``[B, M, K]``, bf16 or fp16, K even for FP4; may not be empty.
        round_mode: "rint"; for FP4 also "round" or "floor".
        dst_type: ``torch.float8_e4m3fn`` (292, 24), ``torch.float8_e5m2`` (291, 23),
            ``torch.float4_e2m1fn_x2`` (296, 45) or 297, torch_npu's float4_e1m2fn_x2.
        scale_alg: 0, for E2M1 also 2, as in `dynamic_mx_quant`.
        dst_type_max: 0.0, or for ``scale_alg`` 2 also 6.0 or 7.0.

    Returns:
        ``y [..., M, K]`` (FP4: ``[..., M, K / 2]``), ``scale1 [..., M, ceil(K / 64), 2]`` and
        ``scale2 [..., ceil(M / 64), K, 2]`` in the layouts of `dynamic_mx_quant`.

    Raises:
        ValueError: naming the argument that is not supported.

    Source: ``npu_dynamic_block_mx_quant``; aclnnDynamicBlockMxQuant and its golden.
    """
    info = format_of(dst_type, MX_FORMATS)
    _modes(info, round_mode, scale_alg, _SCALE_ALGS_BLOCK)
    dst_type_max = _dst_type_max(dst_type_max, info, scale_alg)
    _checks.choice("dst_type_max", dst_type_max, (0.0, 6.0, 7.0))
    _checks.dtype("x", x, _HALF)
    _checks.dims("x", x, 2, 3)
    if x.numel() == 0:
        raise ValueError(f"x has shape {list(x.shape)}; empty tensors are not supported")
    _even(x, info)
    return _dynamic_block_mx_quant(x, info.npu_code, round_mode, scale_alg, dst_type_max)


@_checks.names_arguments
def grouped_dynamic_mx_quant(
    x: Tensor,
    group_index: Tensor,
    *,
    round_mode: str = "rint",
    dst_type: torch.dtype | int = 23,
    blocksize: int = 32,
    scale_alg: int = 0,
    dst_type_max: float | None = 0.0,
) -> tuple[Tensor, Tensor]:
    """Quantize the rows of ``x`` to MXFP8 or MXFP4 along axis 0, blocks restarting at each group of rows.

    Group i holds the rows from ``group_index[i - 1]`` (0 for the first) to ``group_index[i]``; it may be
    empty and need not be a multiple of 32. Its scales begin at row ``group_index[i - 1] // 64 + i`` of
    ``mxscale`` and are those of ``dynamic_mx_quant(x[group], axis=0)``. Rows of ``mxscale`` between two
    groups are 0 here. (The NPU does not write them and the vendor's golden fills them with 1.0: nothing may
    depend on them.)

    Args:
        x: ``[T, N]``, bf16 or fp16, N even for FP4.
        group_index: ``[G]``, int32 or int64, cumulative ends, not decreasing, the last one equal to T.
        round_mode: "rint"; for FP4 also "round" or "floor".
        dst_type: ``torch.float8_e4m3fn`` (292, 24), ``torch.float8_e5m2`` (291, 23),
            ``torch.float4_e2m1fn_x2`` (296, 45) or 297, torch_npu's float4_e1m2fn_x2.
        blocksize: 32.
        scale_alg: 0, for FP8 also 1, for FP4 also 2, as in `dynamic_mx_quant`. For E1M2, 2 takes
            `scale_alg` 0's scale, doubled if amax is above 1.875 times its power of two (at most
            ``2 ** 127``), if ``dst_type_max`` is 1.875, and divides by ``dst_type_max`` (1.75 for 0.0)
            otherwise.
        dst_type_max: 0.0 (or None), or for ``scale_alg`` 2 also 6.0 to 12.0 (E2M1) or 1.75 to 3.5 (E1M2).

    Returns:
        ``y [T, N]``, of FP4 ``[T, N / 2]``, and ``mxscale [T // 64 + G, N, 2]``, uint8.

    Raises:
        ValueError: naming the argument that is not supported.

    Source: ``npu_grouped_dynamic_mx_quant``; aclnnGroupedDynamicMxQuantV2 and its golden, which has FP8
    with `scale_alg` 0 only; the rest from the document and the arch35 kernel.
    """
    info = format_of(dst_type, MX_FORMATS)
    _modes(info, round_mode, scale_alg, _SCALE_ALGS_GROUPED)
    _checks.choice("blocksize", blocksize, (MX_BLOCK,))
    dst_type_max = _dst_type_max(dst_type_max, info, scale_alg)
    _checks.dtype("x", x, _HALF)
    _checks.dims("x", x, 2, 2)
    _even(x, info)
    _checks.group_list("group_index", group_index)
    if group_index.shape[0] == 0:
        raise ValueError("group_index is empty; give at least one group")
    return _grouped_dynamic_mx_quant(x, group_index, info.npu_code, round_mode, scale_alg, dst_type_max)


def _source_format(x: Tensor, src_type: torch.dtype | int | None) -> FormatInfo:
    """The format of the codes ``x``: their dtype says it for FP8, ``src_type`` for FP4."""
    _checks.dtype("x", x, (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.float4_e2m1fn_x2))
    if x.dtype == torch.float4_e2m1fn_x2:
        return E2M1
    accepted = (E2M1, E1M2) if x.dtype == torch.uint8 else MXFP8_FORMATS
    info = format_of(292 if src_type is None else src_type, accepted, "src_type")
    return info if x.dtype == torch.uint8 else format_of(x.dtype)


def _unpacked_shape(x: Tensor, info: FormatInfo) -> tuple[int, ...]:
    return (*x.shape[:-1], 2 * x.shape[-1]) if info.bits == 4 else tuple(x.shape)


@_checks.names_arguments
def anti_mx_quant(
    x: Tensor,
    mxscale: Tensor,
    *,
    axis: int = -1,
    dst_type: torch.dtype | int = 15,
    src_type: torch.dtype | int = 292,
) -> Tensor:
    """The values of MX codes: ``x * 2 ** (mxscale - 127)``, NaN where the scale byte is 0xFF.

    Exact in fp32 as long as the value is below ``2 ** 128``; rounded once to bf16 or fp16.

    Args:
        x: E4M3 or E5M2 codes, or FP4 codes (uint8, two a byte along the last axis); 1 to 7 dimensions, any
            memory layout.
        mxscale: uint8 or ``torch.float8_e8m0fnu``, in the layout of `dynamic_mx_quant` with blocks of 32.
        axis: axis of the blocks.
        dst_type: bf16 (15), fp16 (5) or fp32 (6).
        src_type: the format of uint8 codes: ``torch.float4_e2m1fn_x2`` (296, 45) or 297, torch_npu's
            float4_e1m2fn_x2. For FP8 the dtype of ``x`` decides and ``src_type`` may be either FP8 format.

    Returns:
        A contiguous tensor of ``x``'s shape, for FP4 with the last axis twice as long.

    Raises:
        ValueError: naming the argument that is not supported.

    Source: ``npu_anti_mx_quant``.
    """
    info = _source_format(x, src_type)
    _checks.dims("x", x, 1, 7)
    axis = _axis(axis, x.dim())
    mxscale = _checks.scales("mxscale", mxscale, "mxscale", None)
    shape = _unpacked_shape(x, info)
    expected = tuple(layout.scale_shape(shape, axis))
    _checks.shape("mxscale", mxscale, expected, f"for {list(shape)} values along axis {axis}")
    codes = x.view(torch.uint8) if info.bits == 4 else x
    return _anti_mx_quant(codes, mxscale, axis, info.npu_code, _checks.output_dtype("dst_type", dst_type))


@_checks.names_arguments
def grouped_anti_mx_quant(
    x: Tensor,
    mxscale: Tensor,
    group_index: Tensor,
    *,
    dst_type: torch.dtype | int = 15,
    src_type: torch.dtype | int = 292,
) -> Tensor:
    """The values of codes made by `grouped_dynamic_mx_quant`; torch_npu has no such operator.

    Args:
        x: ``[T, N]``, E4M3 or E5M2 codes, or ``[T, N / 2]``, FP4 codes (uint8).
        mxscale: ``[T // 64 + G, N, 2]``, uint8.
        group_index: ``[G]``, as given to `grouped_dynamic_mx_quant`.
        dst_type: bf16, fp16 or fp32.
        src_type: the format of uint8 codes, as in `anti_mx_quant`.

    Returns:
        ``[T, N]``.

    Raises:
        ValueError: naming the argument that is not supported.
    """
    info = _source_format(x, src_type)
    _checks.dims("x", x, 2, 2)
    _checks.group_list("group_index", group_index)
    shape = _unpacked_shape(x, info)
    expected = tuple(layout.grouped_scale_shape(shape, group_index.shape[0]))
    _checks.shape("mxscale", mxscale, expected, "[T // 64 + G, N, 2]")
    dtype = _checks.output_dtype("dst_type", dst_type)
    out = x.new_empty(shape, dtype=dtype)
    start = 0
    for group, end in enumerate(layout.group_index_ends(group_index, x.shape[0])):
        scale = mxscale[layout.group_scale_rows(group, start, end)]
        out[start:end] = anti_mx_quant(x[start:end], scale, axis=0, dst_type=dtype, src_type=src_type)
        start = end
    return out
