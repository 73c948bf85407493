"""Products against float64 on the dequantized operands, within the error of fp32 accumulation."""

import pytest
import torch
from torch import Tensor

from mindspeed_lowp import ops
from mindspeed_lowp.ops import gemm
from tests.ops.data import FORMATS, assert_same_bytes, normal

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OUTPUTS = [pytest.param(dtype, id=str(dtype)[6:]) for dtype in (torch.bfloat16, torch.float16, torch.float32)]


@pytest.fixture(params=["fp32", "bf16"])
def gemm_precision(request, monkeypatch):
    """Both ways of multiplying, whatever this CPU would choose."""
    monkeypatch.setattr(gemm, "bf16_gemm_is_native", lambda: request.param == "bf16")
    return request.param


def assert_close_to_exact(actual: Tensor, a: Tensor, b: Tensor, bias: Tensor | float = 0.0) -> None:
    """``actual`` equals ``a @ b + bias`` (float64, exact operands) within K roundings in fp32 and one at the
    end.

    A sum of K products in fp32, in any order, is off by at most ``(K - 1) u sum |a b| / (1 - K u)``, u =
    2**-24; products of MXFP8 values have at most 8 significant bits and are exact. The bias adds a rounding.
    """
    exact = a @ b + bias
    count = a.shape[-1] + 1
    magnitude = a.abs() @ b.abs() + abs(bias)
    bound = count * 2.0**-24 / (1 - count * 2.0**-24) * magnitude
    info = torch.finfo(actual.dtype)
    bound = bound + (exact.abs() + bound) * info.eps / 2 + info.smallest_normal * info.eps / 2
    assert ((actual.double() - exact).abs() <= bound).all()


def quantized(x: Tensor, axis: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and exact values (float64)."""
    y, mxscale = ops.dynamic_mx_quant(x, axis=axis, dst_type=dtype)
    return y, mxscale, ops.anti_mx_quant(y, mxscale, axis=axis, dst_type=torch.float32).double()


@pytest.mark.parametrize("output_dtype", OUTPUTS)
@pytest.mark.parametrize("info", FORMATS)
@pytest.mark.parametrize("shape", [(64, 64, 64), (33, 100, 17), (1, 1, 1), (5, 2000, 7)], ids=str)
def test_quant_matmul(gemm_precision, shape, info, output_dtype):
    m, k, n = shape
    a, a_scale, a_exact = quantized(normal((m, k)), -1, info.dtype)
    b, b_scale, b_exact = quantized(normal((k, n), seed=1), -2, E4M3)
    bias = torch.randn(n)
    arguments = {"pertoken_scale": a_scale, "output_dtype": output_dtype, "group_sizes": [1, 1, 32]}
    assert_close_to_exact(ops.quant_matmul(a, b, b_scale, **arguments), a_exact, b_exact)
    assert_close_to_exact(
        ops.quant_matmul(a, b, b_scale, bias=bias, **arguments), a_exact, b_exact, bias.double()
    )


@pytest.mark.parametrize(
    ("batch1", "batch2"), [((3,), (3,)), ((3,), ()), ((2, 1), (4,)), ((), (5,))], ids=str
)
def test_quant_matmul_with_leading_dimensions(batch1, batch2):
    a, a_scale, a_exact = quantized(normal((*batch1, 6, 70)), -1, E4M3)
    b, b_scale, b_exact = quantized(normal((*batch2, 70, 9), seed=1), -2, E4M3)
    out = ops.quant_matmul(a, b, b_scale, pertoken_scale=a_scale, output_dtype=torch.float32)
    assert out.shape == (a_exact @ b_exact).shape
    assert_close_to_exact(out, a_exact, b_exact)


def test_quant_matmul_with_a_bias_for_each_matrix():
    a, a_scale, a_exact = quantized(normal((3, 6, 70)), -1, E4M3)
    b, b_scale, b_exact = quantized(normal((3, 70, 9), seed=1), -2, E4M3)
    bias = torch.randn(3, 1, 9)
    out = ops.quant_matmul(a, b, b_scale, pertoken_scale=a_scale, bias=bias, output_dtype=torch.float32)
    assert_close_to_exact(out, a_exact, b_exact, bias.double())


@pytest.mark.parametrize("output_dtype", OUTPUTS)
@pytest.mark.parametrize("shape", [(64, 64, 64), (33, 100, 17), (130, 300, 70)], ids=str)
def test_results_do_not_depend_on_memory_layout(gemm_precision, shape, output_dtype):
    m, k, n = shape
    a, a_scale, _ = quantized(normal((m, k)), -1, E4M3)
    b, b_scale, _ = quantized(normal((k, n), seed=1), -2, E4M3)
    arguments = {"output_dtype": output_dtype}
    expected = ops.quant_matmul(a, b, b_scale, pertoken_scale=a_scale, **arguments)

    def turned(x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    def shifted(x: Tensor) -> Tensor:
        wide = torch.zeros(x.shape[0] + 1, x.shape[1] + 3, *x.shape[2:], dtype=torch.uint8)
        wide[1:, 2:-1] = x.view(torch.uint8)
        return wide.view(x.dtype)[1:, 2:-1]

    for change1, change2 in ((turned, turned), (turned, shifted), (shifted, turned), (shifted, shifted)):
        actual = ops.quant_matmul(
            change1(a), change2(b), change2(b_scale), pertoken_scale=change1(a_scale), **arguments
        )
        assert_same_bytes(actual, expected)


def test_scales_may_come_as_float8_e8m0fnu():
    a, a_scale, _ = quantized(normal((8, 64)), -1, E4M3)
    b, b_scale, _ = quantized(normal((64, 8)), -2, E4M3)
    e8m0 = torch.float8_e8m0fnu
    expected = ops.quant_matmul(a, b, b_scale, pertoken_scale=a_scale, output_dtype=torch.float32)
    actual = ops.quant_matmul(
        a,
        b,
        b_scale.view(e8m0),
        pertoken_scale=a_scale.view(e8m0),
        output_dtype=6,
        scale_dtype=e8m0,
        pertoken_scale_dtype=293,
    )
    assert_same_bytes(actual, expected)


def test_a_broken_block_makes_nan_of_its_row_and_of_nothing_else(gemm_precision):
    x = normal((40, 100))
    x[7, 50] = float("inf")
    a, a_scale = ops.dynamic_mx_quant(x, dst_type=E4M3)
    b, b_scale, _ = quantized(normal((100, 9)), -2, E4M3)
    out = ops.quant_matmul(a, b, b_scale, pertoken_scale=a_scale, output_dtype=torch.bfloat16)
    assert out.isnan().any(dim=1).nonzero().flatten().tolist() == [7]
    assert out[7].isnan().all()


def test_values_subnormal_in_bf16_reach_the_product(gemm_precision):
    """A bf16 GEMM would flush them; zero blocks, whose scale is as small, must not force the fp32 GEMM."""
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    x[:, :32] = 2.0**-130 * torch.arange(1, 5)[:, None]
    x[:, 40] = 1.0
    a, a_scale, a_exact = quantized(x, -1, E4M3)
    b, b_scale, b_exact = quantized(torch.full((64, 3), 2.0**100).bfloat16(), -2, E4M3)
    b.view(torch.uint8)[32:] = 0
    b_exact[32:] = 0.0
    out = ops.quant_matmul(a, b, b_scale, pertoken_scale=a_scale, output_dtype=torch.bfloat16)
    assert (out > 0).all()
    assert_close_to_exact(out, a_exact, b_exact)


def test_only_codes_other_than_zero_count_as_bf16_subnormals():
    x = torch.zeros(3, 70, dtype=torch.bfloat16)
    for value, axis, expected in (
        (0.0, 1, False),
        (-0.0, 0, False),
        (2.0**-133, 1, True),
        (-(2.0**-120), 0, True),
    ):
        x[1, 69] = value
        codes, mxscale = ops.dynamic_mx_quant(x, axis=axis, dst_type=E4M3)
        assert gemm.may_hold_bf16_subnormals(codes, mxscale, axis) is expected
    x.fill_(1.0)
    assert not gemm.may_hold_bf16_subnormals(*ops.dynamic_mx_quant(x, dst_type=E5M2), 1)


def test_add_quant_matmul_adds_in_fp32_and_returns_self():
    a, a_scale, a_exact = quantized(normal((33, 100)), -1, E5M2)
    b, b_scale, b_exact = quantized(normal((100, 17)), -2, E4M3)
    total = torch.randn(33, 17)
    before = total.clone()
    returned = ops.add_quant_matmul_(total, a, b, b_scale, x1_scale=a_scale)
    assert returned is total
    product = ops.quant_matmul(a, b, b_scale, pertoken_scale=a_scale, output_dtype=torch.float32)
    assert_same_bytes(total, before + product)
    assert_close_to_exact(total, a_exact, b_exact, before.double())


def test_add_quant_matmul_into_a_view():
    a, a_scale, _ = quantized(normal((6, 64)), -1, E4M3)
    b, b_scale, _ = quantized(normal((64, 5)), -2, E4M3)
    whole = torch.zeros(8, 10)
    ops.add_quant_matmul_(whole[1:7, ::2], a, b, b_scale, x1_scale=a_scale)
    expected = torch.zeros(8, 10)
    expected[1:7, ::2] = ops.quant_matmul(a, b, b_scale, pertoken_scale=a_scale, output_dtype=torch.float32)
    assert_same_bytes(whole, expected)
