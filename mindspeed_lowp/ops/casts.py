"""Casts to and from every format: a pair of functions each, on two operators.

``cast_<format>(x)`` takes bf16, fp16 or fp32 of any shape and memory layout and returns the nearest codes,
contiguous. Ties go to even, in HiFloat8 and E8M0 away from zero. A finite value beyond the largest of the
format saturates. Inf and NaN stay what they are where the format has codes for them (HiFloat8, E5M2; E4M3 has
no Inf and takes NaN for it); FP4 and int8 have neither: Inf saturates, NaN becomes +0.

``decode_<format>(codes, dst_type=torch.float32)`` returns the values, exact in fp32 and rounded once to bf16
(15) or fp16 (5); 4-bit codes lie two a byte, the first in the low half, so that the last dimension doubles.

The quantizers round differently in one respect: as the NPU's saturating conversion does, Inf becomes the
largest value there and NaN +0, their scale being what tells of them.

Source: for HiFloat8 hicann/amct's ``hifloat8_cast`` (a vendor's cast, whose saturation the other formats get
too), which parts from ``en_dtypes.hifloat8`` where that overflows to Inf, from 40960 on. E8M0 rounds as
``ml_dtypes.float8_e8m0fnu`` does; no operator of the vendor's rounds to it. On an NPU ``npu_dtype_cast`` does
the work (Inf, NaN and overflow are then the device's); for E8M0 and int8, the reference, on the device.

Errors: ValueError naming the argument that is not supported.
"""

import torch
from torch import Tensor

from mindspeed_lowp.formats import E1M2, E2M1, E4M3, E5M2, E8M0, FORMATS, HIF8, INT8, FormatInfo, format_of
from mindspeed_lowp.ops import _checks
from mindspeed_lowp.ops._library import operator
from mindspeed_lowp.ops.kernels import casts as kernels
from mindspeed_lowp.ops.npu import casts as npu
from mindspeed_lowp.ops.reference import casts as reference

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def _fake_cast(x: Tensor, dst_type: int) -> Tensor:
    info = format_of(dst_type, FORMATS)
    shape = [*x.shape[:-1], x.shape[-1] // 2] if info.bits == 4 else x.shape
    return x.new_empty(shape, dtype=info.dtype)


def _fake_decode(codes: Tensor, src_type: int, dst_type: torch.dtype) -> Tensor:
    info = format_of(src_type, FORMATS)
    shape = [*codes.shape[:-1], codes.shape[-1] * 2] if info.bits == 4 else codes.shape
    return codes.new_empty(shape, dtype=dst_type)


_cast = operator(
    "cast(Tensor x, int dst_type) -> Tensor",
    reference=reference.cast,
    kernel=kernels.cast,
    npu=npu.cast,
    fake=_fake_cast,
)
_decode = operator(
    "decode(Tensor codes, int src_type, ScalarType dst_type) -> Tensor",
    reference=reference.decode,
    kernel=kernels.decode,
    npu=npu.decode,
    fake=_fake_decode,
)


def _checked_cast(x: Tensor, info: FormatInfo) -> Tensor:
    _checks.dtype("x", x, _FLOATS)
    if info.bits == 4 and (x.dim() == 0 or x.shape[-1] % 2):
        raise ValueError(f"x has shape {list(x.shape)}; {info.name} needs an even last dimension, two a byte")
    return _cast(x, info.npu_code)


def _checked_decode(codes: Tensor, info: FormatInfo, dst_type: torch.dtype | int) -> Tensor:
    accepted = (torch.uint8, torch.float8_e8m0fnu) if info == E8M0 else (info.dtype,)
    _checks.dtype("codes", codes, accepted)
    if info.bits == 4 and codes.dim() == 0:
        raise ValueError(f"codes has no dimension; {info.name} codes lie two a byte along the last one")
    return _decode(codes, info.npu_code, _checks.output_dtype("dst_type", dst_type))


@_checks.names_arguments
def cast_hifloat8(x: Tensor) -> Tensor:
    """HiFloat8 codes (uint8) of ``x``. Inf is 0x6F and 0xEF, NaN 0x80; there is no negative zero."""
    return _checked_cast(x, HIF8)


@_checks.names_arguments
def decode_hifloat8(codes: Tensor, dst_type: torch.dtype | int = torch.float32) -> Tensor:
    """The values of HiFloat8 codes (uint8), all of them exact in bf16 and in fp16 too."""
    return _checked_decode(codes, HIF8, dst_type)


@_checks.names_arguments
def cast_e4m3(x: Tensor) -> Tensor:
    """``x`` as ``torch.float8_e4m3fn``. Inf becomes NaN."""
    return _checked_cast(x, E4M3)


@_checks.names_arguments
def decode_e4m3(codes: Tensor, dst_type: torch.dtype | int = torch.float32) -> Tensor:
    """The values of ``torch.float8_e4m3fn`` codes."""
    return _checked_decode(codes, E4M3, dst_type)


@_checks.names_arguments
def cast_e5m2(x: Tensor) -> Tensor:
    """``x`` as ``torch.float8_e5m2``."""
    return _checked_cast(x, E5M2)


@_checks.names_arguments
def decode_e5m2(codes: Tensor, dst_type: torch.dtype | int = torch.float32) -> Tensor:
    """The values of ``torch.float8_e5m2`` codes."""
    return _checked_decode(codes, E5M2, dst_type)


@_checks.names_arguments
def cast_e2m1(x: Tensor) -> Tensor:
    """E2M1 codes of ``x [..., n]``, n even: uint8 ``[..., n / 2]``."""
    return _checked_cast(x, E2M1)


@_checks.names_arguments
def decode_e2m1(codes: Tensor, dst_type: torch.dtype | int = torch.float32) -> Tensor:
    """The values ``[..., 2 n]`` of E2M1 codes, uint8 ``[..., n]``."""
    return _checked_decode(codes, E2M1, dst_type)


@_checks.names_arguments
def cast_e1m2(x: Tensor) -> Tensor:
    """E1M2 codes of ``x [..., n]``, n even: uint8 ``[..., n / 2]``."""
    return _checked_cast(x, E1M2)


@_checks.names_arguments
def decode_e1m2(codes: Tensor, dst_type: torch.dtype | int = torch.float32) -> Tensor:
    """The values ``[..., 2 n]`` of E1M2 codes, uint8 ``[..., n]``."""
    return _checked_decode(codes, E1M2, dst_type)


@_checks.names_arguments
def cast_int8(x: Tensor) -> Tensor:
    """``x`` rounded to integers, saturating at -128 and 127."""
    return _checked_cast(x, INT8)


@_checks.names_arguments
def decode_int8(codes: Tensor, dst_type: torch.dtype | int = torch.float32) -> Tensor:
    """int8 as floating-point numbers."""
    return _checked_decode(codes, INT8, dst_type)


@_checks.names_arguments
def cast_e8m0(x: Tensor) -> Tensor:
    """E8M0 bytes (uint8): the nearest power of two, halves up.

    What is not positive, is not finite or would round to ``2 ** 128`` gives 0xFF, NaN. From ``2 ** -127`` on
    the values below ``2 ** -126`` round up, and all smaller ones give ``2 ** -127``, as in ml_dtypes.
    """
    return _checked_cast(x, E8M0)


@_checks.names_arguments
def decode_e8m0(codes: Tensor, dst_type: torch.dtype | int = torch.float32) -> Tensor:
    """The values ``2 ** (byte - 127)`` of scale bytes (uint8 or ``torch.float8_e8m0fnu``); 0xFF is NaN."""
    return _checked_decode(codes, E8M0, dst_type)
