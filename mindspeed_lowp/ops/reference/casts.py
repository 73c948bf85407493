"""Rounding to every format, and the values of codes: the numeric core of all quantizers but the MX ones."""

from functools import cache

import torch
from torch import Tensor

from mindspeed_lowp.formats import E4M3, E5M2, E8M0, FORMATS, HIF8, INT8, FormatInfo, code_values, format_of
from mindspeed_lowp.ops.layout import pack_fp4, unpack_fp4

#: What a plain cast makes of Inf and of NaN; formats that are not here have neither.
_INF_AND_NAN = {E4M3: (0x7F, 0x7F), E5M2: (0x7C, 0x7E), HIF8: (0x6F, 0x80)}


@cache
def _ladder(info: FormatInfo, device: torch.device) -> tuple[Tensor, Tensor]:
    """The finite magnitudes in ascending order and their codes."""
    values = torch.tensor(code_values(info)[: 2 ** (info.bits - 1)], dtype=torch.float32, device=device)
    values, codes = values.sort()  # HiFloat8's codes are not in the order of their values; NaN is sorted last
    finite = int(values.isfinite().sum())
    return values[:finite], codes[:finite]


def encode(x: Tensor, info: FormatInfo, round_mode: str = "rint") -> Tensor:
    """Codes of ``x`` (fp32), one a byte, as the quantizers round (the NPU's saturating conversion).

    To nearest, ties to even (HiFloat8 and ``round_mode`` "round": away from zero), or with "floor" towards
    minus infinity; beyond the largest value, Inf included, to the largest; NaN to +0. HiFloat8 has no
    negative zero.
    """
    if info == INT8:
        return x.nan_to_num(nan=0.0).clamp(-128, 127).round().to(torch.int8)
    values, codes = _ladder(info, x.device)
    magnitude = x.abs().contiguous()
    negative = x.signbit()
    if round_mode == "floor":
        not_above = torch.searchsorted(values[1:], magnitude, right=True)
        below = torch.searchsorted(values[:-1], magnitude)  # one more between two values
        code = codes[torch.where(negative, below, not_above)]
    else:
        middle = (values[:-1] + values[1:]) / 2
        above = torch.searchsorted(middle, magnitude, right=True)
        if round_mode == "rint" and info != HIF8:
            below = torch.searchsorted(middle, magnitude)  # differs from `above` at ties only
            above = torch.where(below % 2 == 0, below, above)
        code = codes[above]
    if info == HIF8:
        negative &= code > 0
    code = code | negative.to(code.dtype) << (info.bits - 1)
    return code.masked_fill(x.isnan(), 0).to(torch.uint8).view(info.dtype)


def _encode_e8m0(x: Tensor) -> Tensor:
    bits = x.contiguous().view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    byte = exponent + (mantissa >= torch.where(exponent > 0, 0x400000, 0x400001))
    return torch.where(x > 0, byte, 0xFF).clamp(max=0xFF).to(torch.uint8)


def cast(x: Tensor, dst_type: int) -> Tensor:
    info, x = format_of(dst_type, FORMATS), x.float().contiguous()
    if info == E8M0:
        return _encode_e8m0(x)
    codes = encode(x, info)
    if info in _INF_AND_NAN:
        inf, nan = _INF_AND_NAN[info]
        special = torch.where(x.isnan(), nan, inf) | x.signbit().to(torch.int64) << 7
        codes = torch.where(x.isfinite(), codes.view(torch.uint8), special.to(torch.uint8)).view(info.dtype)
    return pack_fp4(codes) if info.bits == 4 else codes


def decode(codes: Tensor, src_type: int, dst_type: torch.dtype) -> Tensor:
    info, codes = format_of(src_type, FORMATS), codes.view(torch.uint8).contiguous()
    values = torch.tensor(code_values(info), dtype=torch.float32, device=codes.device).to(dst_type)
    return values[(unpack_fp4(codes) if info.bits == 4 else codes).long()]
