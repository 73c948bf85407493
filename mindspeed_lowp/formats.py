"""Number formats as data: the element formats of MXFP8 and their shared E8M0 scale.

Everything else in the package asks these objects for limits and exponents, so that a number such as 448
stands in one place. Values follow the OCP Microscaling specification 1.0 and torch's float8 dtypes.
"""

from dataclasses import dataclass

import torch

#: Elements that share one scale.
MX_BLOCK = 32

#: E8M0 scale byte: the value is ``2 ** (byte - 127)``; 0xFF is NaN; there is no zero and no sign.
E8M0_BIAS = 127
E8M0_NAN = 0xFF

#: torch_npu's code for ``float8_e8m0fnu`` (a scale that travels as uint8).
E8M0_NPU_CODE = 293


@dataclass(frozen=True)
class FormatInfo:
    """An element format with sign, ``exponent_bits`` and ``mantissa_bits``.

    Attributes:
        name: as users write it, e.g. ``"e4m3"``.
        dtype: the torch dtype that stores it.
        npu_code: torch_npu's integer for it (torch's own ScalarType number is accepted everywhere as well).
        bias: exponent bias.
        emax: exponent of the largest finite value.
        max: largest finite value.
        smallest: smallest positive (subnormal) value.
    """

    name: str
    dtype: torch.dtype
    npu_code: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    emax: int
    max: float
    smallest: float


E4M3 = FormatInfo("e4m3", torch.float8_e4m3fn, 292, 4, 3, bias=7, emax=8, max=448.0, smallest=2.0**-9)
E5M2 = FormatInfo("e5m2", torch.float8_e5m2, 291, 5, 2, bias=15, emax=15, max=57344.0, smallest=2.0**-16)

#: The element formats of MXFP8.
MXFP8_FORMATS = (E4M3, E5M2)

# torch.float8_e5m2 is ScalarType 23 and torch.float8_e4m3fn is 24; torch_npu takes these numbers too.
_BY_DTYPE = {
    E5M2.dtype: E5M2,
    E5M2.npu_code: E5M2,
    23: E5M2,
    E4M3.dtype: E4M3,
    E4M3.npu_code: E4M3,
    24: E4M3,
}


def mxfp8_format(dtype: torch.dtype | int, argument: str = "dst_type") -> FormatInfo:
    """The format for a torch dtype or a torch_npu code.

    Raises:
        ValueError: naming ``argument``, if it is neither E4M3 nor E5M2.
    """
    info = _BY_DTYPE.get(dtype)
    if info is None:
        raise ValueError(
            f"{argument}={dtype!r} is not an MXFP8 element format; use torch.float8_e4m3fn (or 292, 24) or "
            "torch.float8_e5m2 (or 291, 23)"
        )
    return info
