"""MXFP4 fake quantization against a transcription of its definition that shares no code with it."""

import numpy as np
import pytest
import torch
from torch import Tensor

from mindspeed_lowp import ops
from mindspeed_lowp.formats import E2M1
from mindspeed_lowp.ops import kernels
from mindspeed_lowp.ops.kernels import mxfp4
from mindspeed_lowp.ops.npu import mxfp4 as npu_mxfp4
from mindspeed_lowp.ops.reference import mxfp4 as reference
from tests.ops.data import FLOATS_AND_FP32, assert_same_bytes, cpu_level, wide_range

CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
MIDPOINTS = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
FP32 = torch.float32


def oracle(x: Tensor, scale_factor: float = 6.0, block_size: int = 32, scale_mode: str = "round") -> Tensor:
    with np.errstate(all="ignore"):
        values = x.float().numpy()
        result = np.empty_like(values)
        for first in range(0, values.shape[-1], block_size):
            block = values[..., first : first + block_size]
            divisor = scale_factor * 2 / 3 if scale_mode == "floor" else scale_factor
            raw = np.abs(block).max(-1, keepdims=True) / np.float32(divisor)
            logarithm = np.log2(np.maximum(raw, np.float32(2.0**-30)).astype(np.float64))
            if scale_mode == "round":
                scale = np.exp2(np.rint(logarithm.astype(np.float32)))
            else:
                scale = np.exp2({"floor": np.floor, "ceil": np.ceil}[scale_mode](logarithm)).astype(
                    np.float32
                )
            scaled = block / scale
            code = np.searchsorted(np.array(MIDPOINTS, np.float32), np.abs(scaled), side="right")
            sign = (scaled > 0).astype(np.float32) - (scaled < 0).astype(np.float32)
            result[..., first : first + block_size] = sign * CODES[np.minimum(code, 7)] * scale
    return torch.from_numpy(result).to(x.dtype)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Same bits, except that one NaN is as good as another."""
    assert torch.equal(actual.isnan(), expected.isnan())
    assert_same_bytes(actual.masked_fill(actual.isnan(), 0), expected.masked_fill(expected.isnan(), 0))


@pytest.fixture(params=["reference", *(cpu_level(level) for level in kernels.LEVELS)])
def implementation(request):
    """The reference, and the kernel of each CPU level."""
    if request.param == "reference":
        yield reference.quant_dequant_mxfp4
    else:
        kernels.use_level(request.param)
        yield mxfp4.quant_dequant_mxfp4
        kernels.use_level(kernels.supported_levels()[0])


def every_pattern(dtype: torch.dtype) -> Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.parametrize("scale_factor", [6.0, 1.0, 5.3, 0.01, 100.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_pattern_as_the_largest_magnitude_and_among_others(implementation, dtype, scale_factor):
    amax = every_pattern(dtype)
    blocks = (amax.float()[:, None] * torch.linspace(-1, 1, 32)).to(dtype)
    blocks[:, 3] = amax
    assert_same(implementation(blocks, scale_factor, 32), oracle(blocks, scale_factor))
    mixed = amax[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))].view(-1, 32)
    assert_same(implementation(mixed, scale_factor, 32), oracle(mixed, scale_factor))


@pytest.mark.parametrize("block_size", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
def test_shapes_and_block_sizes(implementation, dtype, block_size):
    for shape in [(1,), (2, 33), (3, 17), (4, 48, 33), (2, 3, 4100), (5, 0), (0, 5), (2, 1, 0, 3)]:
        x = wide_range(shape, dtype)
        actual = implementation(x, 6.0, block_size)
        assert actual.is_contiguous()
        assert_same(actual, oracle(x, 6.0, block_size))


@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
def test_random_bit_patterns(implementation, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (1 << 12, 132), dtype=torch.uint8, generator=generator).view(dtype)
    for scale_factor in (6.0, 0.001):
        for block_size in (2, 32):
            assert_same(implementation(x, scale_factor, block_size), oracle(x, scale_factor, block_size))


@pytest.mark.parametrize("scale_mode", ["floor", "ceil"])
@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
def test_other_rules_for_the_scale(implementation, dtype, scale_mode):
    """Every largest magnitude of 16 bits and its neighbours in fp32, other factors and block sizes."""
    amax = every_pattern(torch.bfloat16 if dtype == FP32 else dtype).to(dtype)
    if dtype == FP32:
        amax = torch.cat(
            [amax, (amax.view(torch.int32) + 1).view(FP32), (amax.view(torch.int32) - 1).view(FP32)]
        )
    blocks = (amax.float()[:, None] * torch.linspace(-1, 1, 32)).to(dtype)
    blocks[:, 3] = amax
    assert_same(implementation(blocks, 6.0, 32, scale_mode), oracle(blocks, 6.0, 32, scale_mode))
    for scale_factor, block_size in ((5.3, 16), (0.01, 64), (100.0, 128)):
        x = wide_range((37, 300), dtype)
        expected = oracle(x, scale_factor, block_size, scale_mode)
        assert_same(implementation(x, scale_factor, block_size, scale_mode), expected)


def test_the_floor_is_ocps_and_the_ceiling_saturates_nothing(implementation):
    """3.9 and 7.9 saturate by the first two, 8.3 by rounding only."""
    amax = torch.tensor([3.9, 4.0, 6.0, 7.9, 8.0, 8.3])
    x = torch.stack([amax, torch.full_like(amax, 0.25)], dim=1)
    for scale_mode, code in (
        ("floor", [3, 4, 6, 6, 8, 8]),
        ("round", [3, 3, 6, 6, 6, 6]),
        ("ceil", [4, 4, 6, 8, 8, 8]),
    ):
        assert implementation(x, 6.0, 32, scale_mode)[:, 0].tolist() == code


@pytest.mark.parametrize("exponent", [-30, 0, 70])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_midpoints_belong_to_the_upper_code(implementation, exponent, sign):
    """Each of the seven with its two neighbours in fp32, beside a 6 that makes the scale a power of two."""
    midpoints = torch.tensor(MIDPOINTS)
    below, above = midpoints.nextafter(torch.tensor(0.0)), midpoints.nextafter(torch.tensor(9.0))
    x = torch.stack([below, midpoints, above, torch.full((7,), 6.0)], dim=1) * sign
    codes = torch.from_numpy(CODES)
    expected = torch.stack([codes[:-1], codes[1:], codes[1:], torch.full((7,), 6.0)], dim=1) * sign
    actual = implementation(x * 2.0**exponent, 6.0, 32)
    assert_same_bytes(actual, expected * 2.0**exponent)


def test_the_scale_is_at_least_two_to_the_minus_30(implementation):
    """amax / 6 just at 2**-30.5, below which 2**-31 would be nearer, and far below."""
    smallest = 2.0**-30
    x = torch.tensor([[6.0, 0.75], [4.0, -0.25], [0.5, 0.24], [0.2, -0.2], [2.0**-119, 0.0]]) * smallest
    expected = torch.tensor([[6.0, 1.0], [4.0, -0.5], [0.5, 0.0], [0.0, -0.0], [0.0, 0.0]]) * smallest
    assert_same_bytes(implementation(x, 6.0, 32), expected)


def test_scales_turn_where_torchs_fp32_logarithm_does(implementation):
    """Every exponent, and every significand within 2**10 units of the square root of two."""
    significands = torch.arange(0x3504F3 - 1024, 0x3504F3 + 1024, dtype=torch.int32)
    fields = torch.arange(97, 255, dtype=torch.int32)
    amax = (fields[:, None] << 23 | significands).view(FP32)
    scale = torch.exp2(torch.round(torch.log2(amax)))
    assert (scale[:, 0] < scale[:, -1]).all()
    # 1.41 times the lower scale becomes 1.5 of it, 0.707 times the upper one 0.5.
    lower = amax > scale
    expected = torch.where(lower, 1.5, 0.5) * scale
    expected[-1, scale[-1].isinf()] = torch.nan
    assert_same(implementation(amax.reshape(-1, 1), 1.0, 32).view(amax.shape), expected)


def test_amax_is_divided_not_multiplied_by_a_reciprocal(implementation):
    """amax of which amax / 5.3 and amax * fp32(1 / 5.3) lie on two sides of a turning point."""
    turn = torch.tensor([0x3504FC + (97 << 23)], dtype=torch.int32).view(FP32)
    amax = (turn * 5.3).view(torch.int32) + torch.arange(-4, 5, dtype=torch.int32)
    amax = amax.view(FP32)
    divided = amax / torch.tensor(5.3) >= turn
    assert not torch.equal(divided, amax * (1 / torch.tensor(5.3)) >= turn)
    scale = torch.where(divided, 2.0**-29, 2.0**-30)
    code = implementation(amax[:, None], 5.3, 32)[:, 0] / scale
    assert_same_bytes(code, torch.where(divided, 4.0, 6.0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
def test_nan_and_inf_make_their_block_nan_and_no_other(implementation, dtype, bad):
    x = wide_range((3, 70), dtype)
    expected = oracle(x)
    x[1, 40] = bad
    expected[1, 32:64] = torch.nan
    assert_same(implementation(x, 6.0, 32), expected)


def test_signs_of_zero(implementation):
    """The definition's sign(x / scale): a division that underflows has none."""
    x = torch.tensor([[1.0, -0.0, -(2.0**-149)], [2.0**60, -(2.0**-89), -(2.0**-90)]])
    signs = torch.tensor([[False, False, True], [False, True, False]])
    assert torch.equal(implementation(x, 1.0, 32).signbit(), signs)


def test_the_factor_divides_six():
    x = wide_range((40, 70), FP32)
    for factor in (1.0, 2.0, 0.5, 1.5, 0.25):
        assert_same(ops.quant_dequant_mxfp4(x, factor), oracle(x, 6.0 / factor))
    assert_same(ops.quant_dequant_mxfp4(x), oracle(x))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t().contiguous().t(),
        lambda x: torch.nn.functional.pad(x, (3, 6))[:, 3:-6],
        lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
        lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    ],
    ids=["transposed", "wider", "strided", "misaligned"],
)
@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
def test_memory_layout_changes_nothing_and_input_is_untouched(implementation, dtype, view):
    x = wide_range((70, 130), dtype)
    given = view(x)
    before = given.clone()
    assert_same_bytes(implementation(given, 6.0, 32), oracle(x))
    assert_same_bytes(given, before)


@pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built")
def test_threads_change_nothing():
    before = torch.get_num_threads()
    try:
        for shape in ((1031, 1100), (1, 1_200_007)):
            x = wide_range(shape, torch.bfloat16)
            expected = reference.quant_dequant_mxfp4(x, 6.0, 32)
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                assert_same(mxfp4.quant_dequant_mxfp4(x, 6.0, 32), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(4, dtype=torch.float64),), "x has dtype torch.float64; use torch.bfloat16 or"),
        ((torch.ones(4, dtype=torch.int8),), "x has dtype torch.int8"),
        ((torch.tensor(1.0),), "x has 0 dimensions"),
        ((torch.ones(4), 0.0), "inv_scale_factor_scale=0.0 .* greater than 0"),
        ((torch.ones(4), -1.0), "inv_scale_factor_scale=-1.0"),
        ((torch.ones(4), float("nan")), "inv_scale_factor_scale=nan"),
        ((torch.ones(4), float("inf")), "inv_scale_factor_scale=inf"),
        ((torch.ones(4), 1e-300), "inv_scale_factor_scale=1e-300"),
        ((torch.ones(4), 1e300), "inv_scale_factor_scale=1e\\+300"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ops.quant_dequant_mxfp4(*arguments)


def test_an_npu_calls_the_toolkits_operator_by_its_contract_and_the_reference_without_it():
    assert not hasattr(torch.ops.amct, "quant_dequant_mxfp4")
    x = wide_range((3, 5, 70), torch.bfloat16)
    assert_same(npu_mxfp4.quant_dequant_mxfp4(x, 4.0, 32), oracle(x, 4.0))
    calls = []

    def toolkit(flat, inv_scale_factor_scale):
        assert flat.dtype == FP32
        assert flat.is_contiguous()
        assert flat.dim() == 1
        assert flat.numel() % 32 == 0
        assert flat.numel() > 0
        calls.append(inv_scale_factor_scale)
        return oracle(flat.view(-1, 32), E2M1.max / inv_scale_factor_scale).view(-1)

    library = torch.library.Library("amct", "FRAGMENT")
    try:
        library.define("quant_dequant_mxfp4(Tensor x, float inv_scale_factor_scale=1.0) -> Tensor")
        library.impl("quant_dequant_mxfp4", toolkit, "CompositeExplicitAutograd")
        for given in (x, x.transpose(0, 1), x[..., 3:35]):
            result = npu_mxfp4.quant_dequant_mxfp4(given, 4.0, 32)
            assert result.is_contiguous()
            assert_same(result, oracle(given, 4.0))
        assert calls == [1.5, 1.5, 1.5]
        # What the operator does not take: other block sizes, nothing at all.
        assert_same(npu_mxfp4.quant_dequant_mxfp4(x, 6.0, 16), oracle(x, 6.0, 16))
        assert npu_mxfp4.quant_dequant_mxfp4(x[:0], 6.0, 32).shape == (0, 5, 70)
        assert npu_mxfp4.quant_dequant_mxfp4(x[..., :0], 6.0, 32).shape == (3, 5, 0)
        assert len(calls) == 3
    finally:
        library._destroy()
