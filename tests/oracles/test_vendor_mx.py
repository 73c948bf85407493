"""The vendor's golden functions of the MX quantizers, run from a checkout of hicann/ops-nn (OPS_NN_PATH).

Every byte must agree, over the vendor's own case lists and over a sweep of ours. The goldens have no
`scale_alg` 2 but for tiles, no `dst_type_max` or `max_low_bound`, and grouped only FP8 with `scale_alg` 0.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from mindspeed_lowp import ops
from mindspeed_lowp.formats import E1M2, E2M1, MXFP4_FORMATS, FormatInfo
from tests.ops.data import ALGORITHMS, FLOATS, FLOATS_AND_FP32, FORMATS, assert_same_bytes, wide_range
from tests.oracles.vendor import (
    VENDOR_FORMAT,
    as_numpy,
    needs_checkout,
    our_format,
    quantizer,
    same,
    sample,
    vendor_cases,
)

pytestmark = needs_checkout

FP4 = [pytest.param(info, id=info.name) for info in MXFP4_FORMATS]
ROUND_MODES = ["rint", "round", "floor"]
ALL_BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def check_single(
    x: Tensor, axis: int, info: FormatInfo, alg: int = 0, round_mode: str = "rint", block_size: int = 32
) -> None:
    expected = quantizer("dynamic_mx_quant")(
        as_numpy(x),
        axis=axis,
        round_mode=round_mode,
        dst_type=VENDOR_FORMAT[info],
        blocksize=block_size,
        scale_alg=alg,
        output_dtypes=("", ""),
    )
    actual = ops.dynamic_mx_quant(
        x,
        axis=axis,
        round_mode=round_mode,
        dst_type=info.npu_code,
        block_size=block_size,
        scale_alg=alg,
    )
    for a, e in zip(actual, expected, strict=True):
        same(a, e)


def check_dual(x: Tensor, info: FormatInfo, alg: int = 0, round_mode: str = "rint") -> None:
    expected = quantizer("dynamic_mx_quant_with_dual_axis")(
        as_numpy(x), round_mode=round_mode, dst_type=VENDOR_FORMAT[info], scale_alg=alg
    )
    actual = ops.dynamic_mx_quant_with_dual_axis(
        x, round_mode=round_mode, dst_type=info.npu_code, scale_alg=alg
    )
    for a, e in zip(actual, expected, strict=True):
        same(a, e)


def check_grouped(x: Tensor, ends: list[int], info: FormatInfo) -> None:
    """Scale rows between groups are 1.0 in the golden, unwritten by the kernel and 0 here: not compared."""
    y, mxscale = quantizer("grouped_dynamic_mx_quant")(
        as_numpy(x), np.array(ends), dst_type=VENDOR_FORMAT[info]
    )
    actual, actual_scale = ops.grouped_dynamic_mx_quant(x, torch.tensor(ends), dst_type=info.npu_code)
    same(actual, y)
    start = 0
    for group, end in enumerate(ends):
        first = start // 64 + group
        rows = slice(first, first - (start - end) // 64)
        same(actual_scale[rows], mxscale[rows])
        start = end


def check_tiles(
    x: Tensor, info: FormatInfo, alg: int = 0, dst_type_max: float = 0.0, round_mode: str = "rint"
) -> int:
    """Equal bytes, but for elements that the golden's sum in bf16 rounds up; returns how many there are."""
    y, scale1, scale2 = quantizer("dynamic_block_mx_quant")(
        as_numpy(x), round_mode, VENDOR_FORMAT[info], alg, dst_type_max
    )
    actual = ops.dynamic_block_mx_quant(
        x, round_mode=round_mode, dst_type=info.npu_code, scale_alg=alg, dst_type_max=dst_type_max
    )
    same(actual[1], scale1)
    same(actual[2], scale2)
    if x.dtype != torch.bfloat16 or round_mode != "round":
        same(actual[0], y)
        return 0
    scale = np.repeat(scale1.reshape(*x.shape[:-1], -1).astype(np.float64), 32, axis=-1)[..., : x.shape[-1]]
    steps = np.abs(as_numpy(x).astype(np.float64)) / scale / info.smallest
    lifted = steps == 255 / 512
    y = y.view(np.uint8) & np.where(lifted, 8, 15).astype(np.uint8)
    assert_same_bytes(actual[0], torch.from_numpy(y[..., ::2] | y[..., 1::2] << 4))
    return int(lifted.sum())


# ---- the vendor's cases ----


@pytest.mark.parametrize(("shapes", "dtype", "attributes", "range_"), vendor_cases("dynamic_mx_quant"))
def test_vendor_cases_of_dynamic_mx_quant(shapes, dtype, attributes, range_):
    check_single(
        sample(shapes[0], dtype, *range_),
        attributes["axis"],
        our_format(attributes["dst_type"]),
        attributes["scale_alg"],
        attributes["round_mode"],
        attributes["blocksize"],
    )


@pytest.mark.parametrize(
    ("shapes", "dtype", "attributes", "range_"), vendor_cases("dynamic_mx_quant_with_dual_axis")
)
def test_vendor_cases_of_dynamic_mx_quant_with_dual_axis(shapes, dtype, attributes, range_):
    x = sample(shapes[0], dtype, *range_)
    check_dual(x, our_format(attributes["dst_type"]), attributes["scale_alg"], attributes["round_mode"])


@pytest.mark.parametrize(
    ("shapes", "dtype", "attributes", "range_"), vendor_cases("grouped_dynamic_mx_quant")
)
def test_vendor_cases_of_grouped_dynamic_mx_quant(shapes, dtype, attributes, range_):
    x = sample(shapes[0], dtype, *range_)
    (groups,) = shapes[1]
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(0, len(x) + 1, (groups,), generator=generator).sort().values.tolist()
    ends[-1] = len(x)
    check_grouped(x, ends, our_format(attributes["dst_type"]))


@pytest.mark.parametrize(("shapes", "dtype", "attributes", "range_"), vendor_cases("dynamic_block_mx_quant"))
def test_vendor_cases_of_dynamic_block_mx_quant(shapes, dtype, attributes, range_):
    check_tiles(
        sample(shapes[0], dtype, *range_),
        our_format(attributes["dst_type"]),
        attributes["scale_alg"],
        attributes["dst_type_max"],
        attributes["round_mode"],
    )


# ---- our sweep ----


def with_nonfinite(x: Tensor) -> Tensor:
    x = x.clone()
    x.view(-1)[7], x.view(-1)[-1] = float("nan"), float("-inf")
    return x


def mixed(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Lines of one magnitude each, all over the range, some of zeros, with NaN and Inf among them."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator, dtype=torch.double)
    low, high = (-24, 12) if dtype == torch.float16 else (-140, 120)
    lines = torch.randint(low, high, (*shape[:-1], 1), generator=generator).double()
    x = (x * torch.exp2(lines)).to(dtype)
    x[..., :1, :] = 0.0
    return with_nonfinite(x)


@pytest.mark.parametrize("alg", ALGORITHMS)
@pytest.mark.parametrize("info", FORMATS)
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
def test_sweep_of_one_axis(dtype, axis, info, alg):
    for shape in ((64, 64), (33, 130), (100, 70), (3, 40, 33)):
        x = wide_range(shape, dtype)
        check_single(x, axis, info, alg)
        check_single(with_nonfinite(x), axis, info, alg)


@pytest.mark.parametrize("round_mode", ROUND_MODES)
@pytest.mark.parametrize("info", FP4)
@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
def test_sweep_of_one_axis_of_fp4(dtype, info, round_mode):
    for shape in ((64, 64), (33, 130), (3, 40, 34)):
        for x in (wide_range(shape, dtype), mixed(shape, dtype)):
            for axis in range(-len(shape), 0):
                if dtype != torch.float32 or shape[axis] >= 32:
                    check_single(x, axis, info, round_mode=round_mode)


@pytest.mark.parametrize("block_size", [64, 96, 224, 1024])
@pytest.mark.parametrize("dtype", FLOATS)
def test_sweep_of_block_sizes(dtype, block_size):
    for shape in ((5, 2080), (300, 6), (2, 100, 34)):
        x = mixed(shape, dtype)
        for axis in (-1, -2):
            check_single(x, axis, our_format(36), 1, "rint", block_size)
            check_single(x, axis, E2M1, 0, "floor", block_size)


@pytest.mark.parametrize("alg", ALGORITHMS)
@pytest.mark.parametrize("info", FORMATS)
def test_every_bf16_pattern_as_amax_on_both_axes(info, alg):
    x = (ALL_BF16.float()[:, None] * torch.tensor([1.0, -0.97, 0.26, 1e-3])).bfloat16()
    x[:, 0] = ALL_BF16
    check_single(x, -1, info, alg)
    check_single(x.t().contiguous(), -2, info, alg)


@pytest.mark.parametrize("round_mode", ROUND_MODES)
@pytest.mark.parametrize("info", FP4)
def test_every_bf16_pattern_as_amax_of_fp4(info, round_mode):
    x = (ALL_BF16.float()[:, None] * torch.tensor([1.0, -0.97, 0.26, -1e-3])).bfloat16()
    x[:, 0] = ALL_BF16
    check_single(x, -1, info, round_mode=round_mode)


@pytest.mark.parametrize("alg", ALGORITHMS)
@pytest.mark.parametrize("info", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_sweep_of_both_axes(dtype, info, alg):
    for shape in ((64, 64), (33, 130), (2, 3, 40, 33)):
        check_dual(wide_range(shape, dtype), info, alg)


@pytest.mark.parametrize("round_mode", ROUND_MODES)
@pytest.mark.parametrize("info", FP4)
@pytest.mark.parametrize("dtype", FLOATS)
def test_sweep_of_both_axes_of_fp4(dtype, info, round_mode):
    for shape in ((64, 64), (33, 130), (2, 3, 40, 34)):
        check_dual(mixed(shape, dtype), info, round_mode=round_mode)


@pytest.mark.parametrize(
    "ends", [[200], [0, 0, 31, 96, 96, 200, 200], [1, 2, 3, 200], [64, 128, 200]], ids=str
)
@pytest.mark.parametrize("info", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_sweep_of_groups(dtype, info, ends):
    check_grouped(wide_range((200, 40), dtype), ends, info)


@pytest.mark.parametrize("info", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_sweep_of_tiles(dtype, info):
    for shape in ((64, 64), (33, 130), (2, 40, 34)):
        check_tiles(wide_range(shape, dtype), info)
        check_tiles(mixed(shape, dtype), info)


@pytest.mark.parametrize(
    ("info", "alg", "dst_type_max"),
    [(E1M2, 0, 0.0), (E2M1, 0, 0.0), (E2M1, 2, 0.0), (E2M1, 2, 6.0), (E2M1, 2, 7.0)],
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.parametrize("round_mode", ROUND_MODES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_sweep_of_tiles_of_fp4(dtype, round_mode, info, alg, dst_type_max):
    for shape in ((64, 64), (33, 130), (2, 40, 34)):
        check_tiles(wide_range(shape, dtype), info, alg, dst_type_max, round_mode)
        check_tiles(mixed(shape, dtype), info, alg, dst_type_max, round_mode)


@pytest.mark.parametrize(("alg", "dst_type_max"), [(0, 0.0), (2, 6.0), (2, 7.0)])
@pytest.mark.parametrize("round_mode", ROUND_MODES)
def test_tiles_of_one_amax_each(alg, dst_type_max, round_mode):
    """All bf16 patterns of one exponent, at both ends of the range and in between, as amax of 256 tiles."""
    lifted = 0
    for exponent in (0, 1, 2, 3, 5, 127, 253, 254):
        amax = torch.arange(exponent << 7, exponent + 1 << 7, dtype=torch.int16).view(torch.bfloat16)
        fractions = torch.cat([torch.arange(-32, 0), torch.arange(1, 33)]) / 32
        x = (amax.float()[:, None] * fractions).bfloat16().repeat_interleave(32, dim=0)
        lifted += check_tiles(x, E2M1, alg, dst_type_max, round_mode)
    assert (lifted > 0) == (round_mode == "round")


@pytest.mark.parametrize("alg", ALGORITHMS)
@pytest.mark.parametrize("info", FORMATS)
def test_fp32_amax_next_to_every_power_of_two(info, alg):
    """Where a logarithm in fp32 would round up to the next power of two."""
    powers = torch.exp2(torch.arange(-126, 128).double()).float()
    below, above = powers.nextafter(torch.tensor(0.0)), powers.nextafter(torch.tensor(torch.inf))
    amax = torch.cat([below, powers, above])
    check_single(amax[:, None] * torch.linspace(1, -0.9, 32), -1, info, alg)


@pytest.mark.parametrize("round_mode", ROUND_MODES)
@pytest.mark.parametrize("info", FP4)
def test_fp32_elements_next_to_every_threshold_of_fp4(info, round_mode):
    """Multiples of a quarter of FP4's smallest step, and their neighbours, under scales of 1."""
    top = 2.0**info.emax
    values = torch.arange(0, 2 * top, info.smallest / 4)[:-1]
    values = torch.cat([values, values.nextafter(torch.tensor(0.0)), values.nextafter(torch.tensor(9.0))])
    x = torch.stack([torch.cat([torch.full((1,), top), v[None], -v[None], torch.zeros(29)]) for v in values])
    check_single(x, -1, info, round_mode=round_mode)
