"""The tables of formats.py against ml_dtypes, an independent implementation of the formats."""

import math

import ml_dtypes
import pytest
import torch

from mindspeed_lowp.formats import E4M3, E5M2, MXFP8_FORMATS, mxfp8_format

ORACLE = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


@pytest.mark.parametrize("info", MXFP8_FORMATS, ids=lambda info: info.name)
def test_limits_agree_with_ml_dtypes(info):
    oracle = ml_dtypes.finfo(ORACLE[info.name])
    assert info.max == float(oracle.max)
    assert info.smallest == float(oracle.smallest_subnormal)
    assert info.emax == math.floor(math.log2(info.max))
    assert (info.exponent_bits, info.mantissa_bits) == (oracle.nexp, oracle.nmant)
    assert info.smallest == 2.0 ** (1 - info.bias - info.mantissa_bits)


@pytest.mark.parametrize(
    ("code", "info"),
    [
        (torch.float8_e4m3fn, E4M3),
        (292, E4M3),
        (24, E4M3),
        (torch.float8_e5m2, E5M2),
        (291, E5M2),
        (23, E5M2),
    ],
)
def test_torch_dtypes_and_torch_npu_codes_name_the_same_format(code, info):
    assert mxfp8_format(code) is info


@pytest.mark.parametrize("code", [None, torch.uint8, torch.float8_e4m3fnuz, 290, 296, "e4m3"])
def test_other_formats_are_refused_by_argument_name(code):
    with pytest.raises(ValueError, match=r"dst_type=.*float8_e4m3fn"):
        mxfp8_format(code)
