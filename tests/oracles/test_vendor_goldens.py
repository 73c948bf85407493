"""The vendor's golden functions, run from a checkout of hicann/ops-nn that OPS_NN_PATH names.

Quantizers must agree to the last byte, over the vendor's own case lists and over a sweep of ours.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from mindspeed_lowp import ops
from tests.ops.data import ALGORITHMS, FLOATS, FLOATS_AND_FP32, FORMATS, wide_range
from tests.oracles.vendor import (
    VENDOR_FORMAT,
    as_numpy,
    needs_checkout,
    quantizer,
    same,
    sample,
    vendor_cases,
)

pytestmark = needs_checkout


def check_single(x: Tensor, axis: int, dst_type: torch.dtype, alg: int) -> None:
    y, mxscale = quantizer("dynamic_mx_quant")(
        as_numpy(x), axis=axis, dst_type=VENDOR_FORMAT[dst_type], scale_alg=alg, output_dtypes=("", "")
    )
    actual, actual_scale = ops.dynamic_mx_quant(x, axis=axis, dst_type=dst_type, scale_alg=alg)
    same(actual, y)
    same(actual_scale, mxscale)


def check_dual(x: Tensor, dst_type: torch.dtype, alg: int) -> None:
    expected = quantizer("dynamic_mx_quant_with_dual_axis")(
        as_numpy(x), dst_type=VENDOR_FORMAT[dst_type], scale_alg=alg
    )
    actual = ops.dynamic_mx_quant_with_dual_axis(x, dst_type=dst_type, scale_alg=alg)
    for a, e in zip(actual, expected, strict=True):
        same(a, e)


def check_grouped(x: Tensor, ends: list[int], dst_type: torch.dtype) -> None:
    """Scale rows between groups are 1.0 in the golden, unwritten by the kernel and 0 here: not compared."""
    y, mxscale = quantizer("grouped_dynamic_mx_quant")(
        as_numpy(x), np.array(ends), dst_type=VENDOR_FORMAT[dst_type]
    )
    actual, actual_scale = ops.grouped_dynamic_mx_quant(x, torch.tensor(ends), dst_type=dst_type)
    same(actual, y)
    start = 0
    for group, end in enumerate(ends):
        first = start // 64 + group
        rows = slice(first, first - (start - end) // 64)
        same(actual_scale[rows], mxscale[rows])
        start = end


def torch_format(code: int) -> torch.dtype:
    return next(dtype for dtype, vendor in VENDOR_FORMAT.items() if vendor == code)


@pytest.mark.parametrize(("shapes", "dtype", "attributes", "range_"), vendor_cases("dynamic_mx_quant"))
def test_vendor_cases_of_dynamic_mx_quant(shapes, dtype, attributes, range_):
    """With their shapes, axes, ranges and formats, but blocks of 32."""
    x = sample(shapes[0], dtype, *range_)
    check_single(x, attributes["axis"], torch_format(attributes["dst_type"]), attributes["scale_alg"])


@pytest.mark.parametrize(
    ("shapes", "dtype", "attributes", "range_"), vendor_cases("dynamic_mx_quant_with_dual_axis")
)
def test_vendor_cases_of_dynamic_mx_quant_with_dual_axis(shapes, dtype, attributes, range_):
    x = sample(shapes[0], dtype, *range_)
    check_dual(x, torch_format(attributes["dst_type"]), attributes["scale_alg"])


@pytest.mark.parametrize(
    ("shapes", "dtype", "attributes", "range_"), vendor_cases("grouped_dynamic_mx_quant")
)
def test_vendor_cases_of_grouped_dynamic_mx_quant(shapes, dtype, attributes, range_):
    x = sample(shapes[0], dtype, *range_)
    (groups,) = shapes[1]
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(0, len(x) + 1, (groups,), generator=generator).sort().values.tolist()
    ends[-1] = len(x)
    check_grouped(x, ends, torch_format(attributes["dst_type"]))


@pytest.mark.parametrize("alg", ALGORITHMS)
@pytest.mark.parametrize("info", FORMATS)
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
def test_sweep_of_one_axis(dtype, axis, info, alg):
    for shape in ((64, 64), (33, 130), (100, 70), (3, 40, 33)):
        x = wide_range(shape, dtype)
        check_single(x, axis, info.dtype, alg)
        x.view(-1)[7], x.view(-1)[-1] = float("nan"), float("-inf")
        check_single(x, axis, info.dtype, alg)


@pytest.mark.parametrize("alg", ALGORITHMS)
@pytest.mark.parametrize("info", FORMATS)
def test_every_bf16_pattern_as_amax_on_both_axes(info, alg):
    amax = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = (amax.float()[:, None] * torch.tensor([1.0, -0.97, 0.26, 1e-3])).bfloat16()
    x[:, 0] = amax
    check_single(x, -1, info.dtype, alg)
    check_single(x.t().contiguous(), -2, info.dtype, alg)


@pytest.mark.parametrize("alg", ALGORITHMS)
@pytest.mark.parametrize("info", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_sweep_of_both_axes(dtype, info, alg):
    for shape in ((64, 64), (33, 130), (2, 3, 40, 33)):
        check_dual(wide_range(shape, dtype), info.dtype, alg)


@pytest.mark.parametrize(
    "ends", [[200], [0, 0, 31, 96, 96, 200, 200], [1, 2, 3, 200], [64, 128, 200]], ids=str
)
@pytest.mark.parametrize("info", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_sweep_of_groups(dtype, info, ends):
    check_grouped(wide_range((200, 40), dtype), ends, info.dtype)


@pytest.mark.parametrize("alg", ALGORITHMS)
@pytest.mark.parametrize("info", FORMATS)
def test_fp32_amax_next_to_every_power_of_two(info, alg):
    """Where a logarithm in fp32 would round up to the next power of two."""
    powers = torch.exp2(torch.arange(-126, 128).double()).float()
    below, above = powers.nextafter(torch.tensor(0.0)), powers.nextafter(torch.tensor(torch.inf))
    amax = torch.cat([below, powers, above])
    check_single(amax[:, None] * torch.linspace(1, -0.9, 32), -1, info.dtype, alg)
