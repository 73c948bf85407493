"""Number formats as data: the element formats and the shared E8M0 scale of MX blocks.

Everything else in the package asks these objects for limits and exponents, so that a number such as 448
stands in one place. Values follow the OCP Microscaling specification 1.0, torch's float8 dtypes and, for
HiFloat8, "Ascend HiFloat8 Format for Deep Learning" (arXiv 2409.16626).
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

import torch

#: Elements that share one scale.
MX_BLOCK = 32

#: E8M0 scale byte: the value is ``2 ** (byte - 127)``; 0xFF is NaN; there is no zero and no sign.
E8M0_BIAS = 127
E8M0_NAN = 0xFF

#: torch_npu's code for ``float8_e8m0fnu`` (a scale that travels as uint8).
E8M0_NPU_CODE = 293


@dataclass(frozen=True, eq=False)  # told apart by identity: each is one object, looked up at every call
class FormatInfo:
    """An element format.

    Attributes:
        name: as users write it, e.g. ``"e4m3"``.
        dtype: the torch dtype that stores it; uint8 where torch has none, with two elements a byte if
            ``bits`` is 4, the first in the low half.
        npu_code: torch_npu's integer for it (torch's own ScalarType number is accepted everywhere as well).
        bits: of an element.
        emax: exponent of the largest finite value.
        max: largest finite value.
        smallest: smallest positive (subnormal) value.
    """

    name: str
    dtype: torch.dtype
    npu_code: int
    bits: int
    emax: int
    max: float
    smallest: float


E4M3 = FormatInfo("e4m3", torch.float8_e4m3fn, 292, bits=8, emax=8, max=448.0, smallest=2.0**-9)
E5M2 = FormatInfo("e5m2", torch.float8_e5m2, 291, bits=8, emax=15, max=57344.0, smallest=2.0**-16)
E2M1 = FormatInfo("e2m1", torch.uint8, 296, bits=4, emax=2, max=6.0, smallest=0.5)
E1M2 = FormatInfo("e1m2", torch.uint8, 297, bits=4, emax=0, max=1.75, smallest=0.25)
HIF8 = FormatInfo("hif8", torch.uint8, 290, bits=8, emax=15, max=32768.0, smallest=2.0**-22)
INT8 = FormatInfo("int8", torch.int8, 1, bits=8, emax=6, max=127.0, smallest=1.0)
#: Scales rather than elements: no sign and no zero.
E8M0 = FormatInfo("e8m0", torch.uint8, E8M0_NPU_CODE, bits=8, emax=127, max=2.0**127, smallest=2.0**-127)

#: Every format.
FORMATS = (E4M3, E5M2, E2M1, E1M2, HIF8, INT8, E8M0)

#: The element formats of MXFP8 and of MXFP4.
MXFP8_FORMATS = (E4M3, E5M2)
MXFP4_FORMATS = (E2M1, E1M2)
MX_FORMATS = MXFP8_FORMATS + MXFP4_FORMATS

#: The values of FP4 codes 0 to 7; codes 8 to 15 are their negatives.
FP4_VALUES = {
    E2M1: (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
    E1M2: (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75),
}

# Every way of writing a format: torch's dtype, torch_npu's code, torch's ScalarType number.
_SPELLINGS: dict[FormatInfo, tuple[torch.dtype | int, ...]] = {
    E4M3: (torch.float8_e4m3fn, 292, 24),
    E5M2: (torch.float8_e5m2, 291, 23),
    E2M1: (torch.float4_e2m1fn_x2, 296, 45),
    E1M2: (297,),
    HIF8: (290,),
    INT8: (torch.int8, torch.qint8, 1, 12),
    E8M0: (torch.float8_e8m0fnu, 293, 44),
}
_BY_SPELLING = {spelling: info for info, spellings in _SPELLINGS.items() for spelling in spellings}


def format_of(
    value: torch.dtype | int,
    accepted: Collection[FormatInfo] = MXFP8_FORMATS,
    argument: str = "dst_type",
) -> FormatInfo:
    """The format that a torch dtype or a torch_npu code means.

    Raises:
        ValueError: naming ``argument``, if it is none of ``accepted``.
    """
    info = _BY_SPELLING.get(value)
    if info is None or info not in accepted:
        choices = (f"{i.name} ({', '.join(map(str, _SPELLINGS[i]))})" for i in accepted)
        raise ValueError(f"{argument}={value!r} is not supported; use {' or '.join(choices)}")
    return info


@cache
def code_values(info: FormatInfo) -> tuple[float, ...]:
    """The value of each of the ``2 ** bits`` codes, in the order of the codes as unsigned numbers."""
    if info in MXFP4_FORMATS:
        positive = FP4_VALUES[info]
    elif info == HIF8:
        positive = tuple(map(_hifloat8, range(0x80)))
    elif info == E8M0:
        return *(2.0 ** (byte - E8M0_BIAS) for byte in range(E8M0_NAN)), float("nan")
    else:
        return tuple(torch.arange(256).to(torch.uint8).view(info.dtype).double().tolist())
    negative = [-value for value in positive]
    if info == HIF8:
        negative[0] = float("nan")  # in place of a negative zero
    return *positive, *negative


def _hifloat8(code: int) -> float:
    """The value of a code without its sign bit.

    A prefix (the "dot" field: 11, 10, 01, 001, 0001) tells how many bits of exponent follow, 4 to 0. The
    exponent is one bit of sign and a magnitude whose leading one is not stored; the rest is the mantissa.
    With prefix 0000 the value is a power of two, ``2 ** (mantissa - 23)``.
    """
    if code == 0x6F:
        return float("inf")
    if code < 8:
        return 2.0 ** (code - 23) if code else 0.0
    exponent_bits = (code >> 5) + 1 if code >= 0x20 else int(code >= 0x10)
    mantissa_bits = min(3, 5 - exponent_bits)
    mantissa = code % 2**mantissa_bits / 2**mantissa_bits
    if exponent_bits == 0:
        return 1 + mantissa
    half = 2 ** (exponent_bits - 1)
    field = (code >> mantissa_bits) % (2 * half)
    exponent = half + field % half
    return (1 + mantissa) * 2.0 ** (-exponent if field >= half else exponent)
