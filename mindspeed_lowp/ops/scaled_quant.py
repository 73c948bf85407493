"""Quantization with fp32 scales: of a tensor, of tokens, channels or tiles, and with given scales."""

import math

import torch
from torch import Tensor

from mindspeed_lowp.formats import E4M3, E5M2, FORMATS, HIF8, INT8, FormatInfo, format_of
from mindspeed_lowp.ops import _checks
from mindspeed_lowp.ops._library import operator
from mindspeed_lowp.ops.kernels import scaled as kernels
from mindspeed_lowp.ops.npu import scaled as npu
from mindspeed_lowp.ops.reference import scaled as reference

_HALF = (torch.bfloat16, torch.float16)
_FLOATS = (*_HALF, torch.float32)
_EIGHT_BITS = (INT8, E4M3, E5M2, HIF8)
_LARGEST_GROUP_COUNT = 1024
_ROW_BLOCKS = (1, 128, 256, 512)
_COL_BLOCKS = (64, 128, 192, 256)
_BLOCK_MAXIMA = (0.0, 15.0, 56.0, 224.0, 32768.0)
_ZERO_POINTS = (torch.int32, torch.int8, torch.uint8, torch.float32, torch.bfloat16)


def _fake_dynamic(x, smooth_scales, group_index, dst_type, quant_mode, dst_type_max) -> tuple[Tensor, Tensor]:
    *batch, rows, cols = x.shape
    shape = {"pertensor": [1], "perchannel": [*batch, cols], "pertoken": [*batch, rows]}[quant_mode]
    y = x.new_empty(x.shape, dtype=format_of(dst_type, FORMATS).dtype)
    return y, x.new_empty(shape, dtype=torch.float32)


def _fake_block(
    x, min_scale, dst_type, row_block_size, col_block_size, dst_type_max
) -> tuple[Tensor, Tensor]:
    *batch, rows, cols = x.shape
    shape = [*batch, -(-rows // row_block_size), -(-cols // col_block_size)]
    y = x.new_empty(x.shape, dtype=format_of(dst_type, FORMATS).dtype)
    return y, x.new_empty(shape, dtype=torch.float32)


_dynamic_quant = operator(
    "dynamic_quant(Tensor x, Tensor? smooth_scales, Tensor? group_index, int dst_type, str quant_mode,"
    " float dst_type_max) -> (Tensor, Tensor)",
    reference=reference.dynamic_quant,
    kernel=kernels.dynamic_quant,
    npu=npu.dynamic_quant,
    fake=_fake_dynamic,
)
_dynamic_block_quant = operator(
    "dynamic_block_quant(Tensor x, float min_scale, int dst_type, int row_block_size, int col_block_size,"
    " float dst_type_max) -> (Tensor, Tensor)",
    reference=reference.dynamic_block_quant,
    kernel=kernels.dynamic_block_quant,
    npu=npu.dynamic_block_quant,
    fake=_fake_block,
)
_quantize = operator(
    "quantize(Tensor x, Tensor scales, Tensor? zero_points, int dtype, int axis, bool div_mode) -> Tensor",
    reference=reference.quantize,
    kernel=kernels.quantize,
    npu=npu.quantize,
    fake=lambda x, scales, zero_points, dtype, axis, div_mode: x.new_empty(
        x.shape, dtype=format_of(dtype, FORMATS).dtype
    ),
)


def _only_hifloat8(info: FormatInfo, dst_type_max: float) -> None:
    if 0 < dst_type_max < info.smallest:
        raise ValueError(
            f"dst_type_max={dst_type_max} is below the format's smallest code; use 0.0, or {info.smallest} "
            f"to {info.max}"
        )
    if dst_type_max and info != HIF8:
        raise ValueError(
            f"dst_type_max={dst_type_max} is not supported for {info.name}; only HiFloat8 (dst_type 290) has "
            "it, use 0.0, the format's maximum"
        )


def _check_smooth_scales(
    x: Tensor, smooth_scales: Tensor, group_index: Tensor | None, quant_mode: str
) -> None:
    _checks.dtype("smooth_scales", smooth_scales, (x.dtype,))
    if group_index is None:
        axis = -2 if quant_mode == "perchannel" else -1
        _checks.shape("smooth_scales", smooth_scales, (x.shape[axis],), f"x's axis {axis}, {quant_mode}")
        return
    _checks.group_list("group_index", group_index)
    groups = group_index.shape[0]
    if not 1 <= groups <= _LARGEST_GROUP_COUNT:
        raise ValueError(f"group_index has {groups} groups; use 1 to {_LARGEST_GROUP_COUNT}")
    _checks.shape("smooth_scales", smooth_scales, (groups, x.shape[-1]), "one row for each group")


@_checks.names_arguments
def dynamic_quant(
    x: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: torch.dtype | int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Quantize ``x`` so that the largest magnitude of a row, a column or the tensor gets the largest code.

    In fp32: ``scale = amax * (1 / max)``, which is not always ``amax / max``, and ``y`` is the code nearest
    to ``x / scale``; the value of an element is ``y * scale``. Ties go to even, in HiFloat8 away from zero.

    Zeros give scale 0 and codes 0. Where there is a NaN the scale is NaN and the codes are 0; where there is
    an Inf and no NaN the scale is Inf and the codes are 0: all products are NaN, so that a broken value is
    seen. An amax so small that its scale is subnormal, or 0, saturates.

    Args:
        x: bf16 or fp16, 2 to 8 dimensions, any memory layout; may be empty.
        smooth_scales: of ``x``'s dtype. ``x`` is multiplied by it first, in fp32: ``[x.shape[-1]]``, per
            channel ``[x.shape[-2]]``, with ``group_index`` ``[G, x.shape[-1]]``.
        group_index: ``[G]``, int32 (or int64), 1 to 1024 cumulative ends of groups of rows, not decreasing,
            the last one equal to the number of rows (all dimensions but the last); group i is multiplied by
            row i of ``smooth_scales``. Per token only.
        dst_type: ``torch.int8`` (1, also None), ``torch.float8_e4m3fn`` (292, 24), ``torch.float8_e5m2``
            (291, 23) or HiFloat8 (290).
        quant_mode: "pertoken": a scale for each row; "perchannel": for each column of the last two
            dimensions; "pertensor": one scale.
        dst_type_max: the ``max`` that is aimed at, above 0 and at most 32768, for HiFloat8; 0.0 means the
            format's maximum (127, 448, 57344, 32768).

    Returns:
        ``y``, of ``x``'s shape, and ``scale``, fp32: ``x.shape[:-1]`` per token, ``x.shape`` without its
        second last dimension per channel, ``[1]`` per tensor. Both are contiguous.

    Raises:
        ValueError: naming the argument that is not supported.

    Source: ``npu_dynamic_quant``; aclnnDynamicQuantV4, the goldens of dynamic_quant and dynamic_quant_v2 and
    the arch35 kernels. The goldens leave NaN (from 0 / 0 or Inf / Inf too) and overflow to a host library's
    cast; as the kernels set the saturating conversion, they are +0 and the largest code here. The goldens
    know no ``dst_type_max``, which is the kernels'. torch_npu takes and ignores it for the other formats.
    """
    info = format_of(INT8.dtype if dst_type is None else dst_type, _EIGHT_BITS)
    _checks.choice("quant_mode", quant_mode, ("pertoken", "perchannel", "pertensor"))
    _checks.dtype("x", x, _HALF)
    _checks.dims("x", x, 2, 8)
    _only_hifloat8(info, dst_type_max)
    if not 0 <= dst_type_max <= HIF8.max:
        raise ValueError(f"dst_type_max={dst_type_max} is out of range; use 0.0 to {HIF8.max}")
    if group_index is not None and (smooth_scales is None or quant_mode != "pertoken"):
        raise ValueError(
            f"group_index is supported only with smooth_scales and quant_mode='pertoken', not {quant_mode!r}"
        )
    if smooth_scales is not None:
        _check_smooth_scales(x, smooth_scales, group_index, quant_mode)
    return _dynamic_quant(x, smooth_scales, group_index, info.npu_code, quant_mode, dst_type_max)


@_checks.names_arguments
def dynamic_block_quant(
    x: Tensor,
    *,
    min_scale: float = 0.0,
    round_mode: str = "rint",
    dst_type: torch.dtype | int = 1,
    row_block_size: int = 1,
    col_block_size: int = 128,
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Quantize ``x`` by tiles of ``row_block_size`` x ``col_block_size`` elements that share an fp32 scale.

    In fp32: ``scale = min(amax / max, 1 / min_scale)`` and ``y`` is the code nearest to ``x / scale``, ties
    to even, in HiFloat8 away from zero; the value of an element is ``y * scale``. Tiles at the end of an axis
    may be smaller. A tile of zeros gives scale 0 and codes 0.

    NaN and Inf do not break a tile and are not kept: ``amax`` is that of the finite elements, NaN gives the
    code 0 and Inf the largest code.

    Args:
        x: bf16, fp16 or fp32, ``[M, N]`` or ``[B, M, N]``, any memory layout; may be empty.
        min_scale: not negative; 0.0 sets no limit.
        round_mode: "rint" for int8, E4M3 and E5M2, "round" for HiFloat8: each format's only mode.
        dst_type: ``torch.int8`` (1), ``torch.float8_e4m3fn`` (292, 24), ``torch.float8_e5m2`` (291, 23) or
            HiFloat8 (290).
        row_block_size: 1, 128, 256 or 512.
        col_block_size: 64, 128, 192 or 256.
        dst_type_max: the ``max`` that is aimed at: 15, 56, 224 or 32768, for HiFloat8; 0.0 means the format's
            maximum (127, 448, 57344, 32768).

    Returns:
        ``y``, of ``x``'s shape, and ``scale``, fp32: ``[ceil(M / row_block_size), ceil(N / col_block_size)]``
        with the batch in front if ``x`` has one. Both are contiguous.

    Raises:
        ValueError: naming the argument that is not supported.

    Source: ``npu_dynamic_block_quant``; aclnnDynamicBlockQuantV2, its golden and its arch35 kernel. NaN and
    Inf are the golden's (in the kernel they become the tile's scale). The golden rounds ``x / scale`` to 8
    decimals before the cast, in fp32, which neither the document nor the kernel has and we do not; int8 and
    ``dst_type_max`` are the document's and the kernel's, the golden having neither.
    """
    info = format_of(dst_type, _EIGHT_BITS)
    _checks.choice("round_mode", round_mode, ("round" if info == HIF8 else "rint",), info.name)
    _checks.choice("row_block_size", row_block_size, _ROW_BLOCKS)
    _checks.choice("col_block_size", col_block_size, _COL_BLOCKS)
    _checks.dtype("x", x, _FLOATS)
    _checks.dims("x", x, 2, 3)
    _only_hifloat8(info, dst_type_max)
    _checks.choice("dst_type_max", dst_type_max, _BLOCK_MAXIMA)
    if not 0 <= min_scale < math.inf:
        raise ValueError(f"min_scale={min_scale} is not supported; use 0.0 or a positive number")
    return _dynamic_block_quant(x, min_scale, info.npu_code, row_block_size, col_block_size, dst_type_max)


@_checks.names_arguments
def quantize(
    self: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    dtype: torch.dtype | int,
    axis: int = 1,
    div_mode: bool = True,
) -> Tensor:
    """Quantize ``self`` with scales that are given, as delayed scaling does.

    In fp32: the code nearest to ``self / scales + zero_points``, or to ``self * scales + zero_points`` if not
    ``div_mode``; ties to even, in HiFloat8 away from zero. What is beyond the largest code saturates, Inf
    too; NaN, and 0 / 0, give the code 0.

    Args:
        self: bf16, fp16 or fp32, 1 to 8 dimensions, any memory layout; may be empty.
        scales: fp32 or of ``self``'s dtype, only the latter if not ``div_mode``; ``[1]``, or ``[n]`` with n
            the length of the axis.
        zero_points: None, or of ``scales``' shape: int32, int8, uint8, fp32 or bf16; if not ``div_mode``,
            of ``scales``' dtype.
        dtype: ``torch.int8`` or ``torch.qint8`` (1, 12), ``torch.float8_e4m3fn`` (292, 24),
            ``torch.float8_e5m2`` (291, 23) or HiFloat8 (290).
        axis: what ``scales`` runs along, unless it has one element. If not ``div_mode``, -2 means the second
            last axis and any greater number the last.
        div_mode: whether to divide by ``scales`` or to multiply by it.

    Returns:
        Codes of ``self``'s shape, contiguous.

    Raises:
        ValueError: naming the argument that is not supported.

    Source: ``npu_quantize``; aclnnQuantize (dividing) and aclnnAscendQuantV3 (multiplying), the goldens of
    quantize and ascend_quant_v2 and the arch35 kernels. Of the goldens only quantize's for E5M2 saturates and
    drops NaN; the others leave both to a host library's cast and ascend_quant_v2 rounds to 8 decimals first.
    The kernels set the saturating conversion for all formats and round once, and so does this.
    """
    info = format_of(dtype, _EIGHT_BITS, "dtype")
    _checks.choice("div_mode", div_mode, (True, False))
    _checks.dtype("self", self, _FLOATS)
    _checks.dims("self", self, 1, 8)
    dim = self.dim()
    if not div_mode:
        if axis < -2:
            raise ValueError(f"axis={axis} is not supported with div_mode=False; use -2 or -1")
        axis = min(axis, -1)
    if not -dim <= axis < dim and scales.numel() != 1:
        raise ValueError(
            f"axis={axis} is out of range for self with {dim} dimensions; use {-dim} to {dim - 1}"
        )
    beside = "" if div_mode else "div_mode=False"
    accepted = tuple(dict.fromkeys((torch.float32, self.dtype))) if div_mode else (self.dtype,)
    _checks.dtype("scales", scales, accepted, beside)
    axis = axis % dim
    if scales.shape != (1,):
        _checks.shape("scales", scales, (self.shape[axis],), f"1, or the length of self's axis {axis}")
    if zero_points is not None:
        accepted = _ZERO_POINTS if div_mode else (scales.dtype,)
        _checks.dtype("zero_points", zero_points, accepted, beside)
        _checks.shape("zero_points", zero_points, tuple(scales.shape), "as scales")
    return _quantize(self, scales, zero_points, info.npu_code, axis, div_mode)
