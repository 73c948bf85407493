"""The vendor's golden functions, run from a checkout of hicann/ops-nn that OPS_NN_PATH names.

Quantizers must agree to the last byte, over the vendor's own case lists and over a sweep of ours; matmuls
within the error of fp32 accumulation.
"""

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from mindspeed_lowp import ops
from tests.ops.data import ALGORITHMS, FLOATS, FLOATS_AND_FP32, FORMATS, normal, wide_range
from tests.ops.test_mx_matmul import assert_close_to_exact
from tests.oracles.vendor import (
    INPUT,
    VENDOR_FORMAT,
    as_numpy,
    golden,
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


def operands(m: int, k: int, n: int, dst_type: torch.dtype):
    a, a_scale = ops.dynamic_mx_quant(normal((m, k)), dst_type=dst_type)
    b, b_scale = ops.dynamic_mx_quant(normal((k, n), seed=1), axis=-2, dst_type=torch.float8_e4m3fn)
    return a, a_scale, b, b_scale


def codes_as_numpy(x: Tensor) -> np.ndarray:
    oracle = ml_dtypes.float8_e4m3fn if x.dtype == torch.float8_e4m3fn else ml_dtypes.float8_e5m2
    return x.contiguous().view(torch.uint8).numpy().view(oracle)


def scales_as_numpy(x: Tensor) -> np.ndarray:
    import en_dtypes

    return x.contiguous().numpy().view(en_dtypes.float8_e8m0)


def assert_both_close(actual: Tensor, expected: np.ndarray, a: Tensor, b: Tensor, c: Tensor | float) -> None:
    """Ours and the golden's are each within the error of fp32 accumulation of the exact result."""
    for result in (actual, torch.from_numpy(np.asarray(expected, dtype=np.float32)).to(actual.dtype)):
        assert_close_to_exact(result, a, b, c)


def exact(codes: Tensor, mxscale: Tensor, axis: int) -> Tensor:
    return ops.anti_mx_quant(codes, mxscale, axis=axis, dst_type=torch.float32).double()


@pytest.mark.parametrize("output", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("info", FORMATS)
@pytest.mark.parametrize("shape", [(64, 64, 64), (33, 100, 17), (5, 320, 40)], ids=str)
def test_quant_matmul(shape, info, with_bias, output):
    a, a_scale, b, b_scale = operands(*shape, info.dtype)
    bias = torch.randn(shape[2]) if with_bias else None
    compute = golden("matmul/quant_batch_matmul_v3/tests/assets/qbmmv3_kernel_golden.py", "compute_mx")
    expected = compute(
        codes_as_numpy(a),
        codes_as_numpy(b),
        scales_as_numpy(b_scale),
        scales_as_numpy(a_scale),
        None if bias is None else bias.numpy(),
        "float32",
        False,
        False,
        output,
    )
    actual = ops.quant_matmul(
        a, b, b_scale, pertoken_scale=a_scale, bias=bias, output_dtype=INPUT[output], group_sizes=[1, 1, 32]
    )
    assert_both_close(
        actual, expected, exact(a, a_scale, 1), exact(b, b_scale, 0), 0.0 if bias is None else bias.double()
    )


@pytest.mark.parametrize("info", FORMATS)
@pytest.mark.parametrize("shape", [(64, 64, 64), (33, 192, 17)], ids=str)
def test_add_quant_matmul(shape, info):
    """The golden does not undo the interleaving of x2's scales: it gets them as [K / 32, N]."""
    a, a_scale, b, b_scale = operands(*shape, info.dtype)
    total = torch.randn(shape[0], shape[2])
    flat = b_scale.transpose(1, 2).reshape(-1, shape[2])
    add = golden(
        "matmul/quant_batch_matmul_inplace_add/tests/assets/golden.py",
        "quant_batch_matmul_inplace_add_golden",
    )
    (expected,) = add(
        codes_as_numpy(a),
        codes_as_numpy(b),
        scales_as_numpy(flat),
        total.numpy(),
        scales_as_numpy(a_scale),
        output_dtypes=["float32"],
    )
    actual = ops.add_quant_matmul_(total.clone(), a, b, b_scale, x1_scale=a_scale)
    assert_both_close(actual, expected, exact(a, a_scale, 1), exact(b, b_scale, 0), total.double())
