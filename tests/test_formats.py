"""The tables of formats.py against ml_dtypes, an independent implementation of the formats."""

import math

import ml_dtypes
import pytest
import torch

from mindspeed_lowp.formats import E1M2, E2M1, E4M3, E5M2, E8M0, FORMATS, HIF8, INT8, code_values, format_of

ORACLE = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2, E2M1: ml_dtypes.float4_e2m1fn}


@pytest.mark.parametrize("info", ORACLE, ids=lambda info: info.name)
def test_limits_agree_with_ml_dtypes(info):
    oracle = ml_dtypes.finfo(ORACLE[info])
    assert info.max == float(oracle.max)
    assert info.smallest == float(oracle.smallest_subnormal)
    assert info.emax == math.floor(math.log2(info.max))
    assert info.bits == oracle.bits


@pytest.mark.parametrize(
    ("code", "info"),
    [
        (torch.float8_e4m3fn, E4M3),
        (292, E4M3),
        (24, E4M3),
        (torch.float8_e5m2, E5M2),
        (291, E5M2),
        (23, E5M2),
        (torch.float4_e2m1fn_x2, E2M1),
        (296, E2M1),
        (45, E2M1),
        (297, E1M2),
        (290, HIF8),
        (torch.int8, INT8),
        (1, INT8),
        (torch.float8_e8m0fnu, E8M0),
        (293, E8M0),
        (44, E8M0),
    ],
)
def test_torch_dtypes_and_torch_npu_codes_name_the_same_format(code, info):
    assert format_of(code, FORMATS) is info


@pytest.mark.parametrize("code", [None, torch.uint8, torch.float8_e4m3fnuz, 290, 296, "e4m3"])
def test_other_formats_are_refused_by_argument_name(code):
    with pytest.raises(ValueError, match=r"dst_type=.*float8_e4m3fn"):
        format_of(code)


@pytest.mark.parametrize("info", FORMATS, ids=lambda info: info.name)
def test_limits_are_those_of_the_codes(info):
    values = [value for value in code_values(info) if math.isfinite(value)]
    assert len(code_values(info)) == 2**info.bits
    assert max(values) == info.max
    assert min(value for value in values if value > 0) == info.smallest
    assert math.floor(math.log2(info.max)) == info.emax
