"""Products against float64 on the decoded operands, within the error of fp32 accumulation; and to the bit
where nothing is left to the order of additions: scales, their truncation, bias and rounding."""

import numpy as np
import pytest
import torch
from torch import Tensor

from mindspeed_lowp import ops
from mindspeed_lowp.formats import E2M1, E4M3, E5M2, HIF8, INT8, FormatInfo
from mindspeed_lowp.ops import gemm
from tests.ops.data import FORMATS, assert_same_bytes, normal

OUTPUTS = [pytest.param(dtype, id=str(dtype)[6:]) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
SHAPES = pytest.mark.parametrize("shape", [(64, 64, 64), (33, 300, 17), (1, 1, 1), (5, 2000, 7)], ids=str)
PAIRS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (HIF8, HIF8)]
KINDS = pytest.mark.parametrize(("left", "right"), PAIRS, ids=lambda info: info.name)


@pytest.fixture(params=["fp32", "bf16"])
def gemm_precision(request, monkeypatch):
    """Both ways of multiplying, whatever this CPU would choose."""
    monkeypatch.setattr(gemm, "bf16_gemm_is_native", lambda: request.param == "bf16")
    return request.param


def assert_close_to_exact(
    actual: Tensor, a: Tensor, b: Tensor, bias: Tensor | float = 0.0, scale: Tensor | float = 1.0
) -> None:
    """``actual`` equals ``(a @ b) * scale + bias`` (float64, exact operands) within the roundings of fp32
    and one at the end.

    A sum of K products in fp32, in any order, is off by at most ``(K - 1) u sum |a b| / (1 - K u)``, u =
    2**-24; products of codes have at most 8 significant bits and are exact. Two multiplications by scales
    and the bias add a rounding each. The last rounding keeps order, and makes Inf of what is too large.
    """
    exact = (a @ b) * scale + bias
    count = a.shape[-1] + 3
    magnitude = (a.abs() @ b.abs()) * abs(scale) + abs(bias)
    bound = count * 2.0**-24 / (1 - count * 2.0**-24) * magnitude + 2.0**-149
    low, high = ((exact + sign * bound).float().to(actual.dtype) for sign in (-1, 1))
    assert ((low <= actual) & (actual <= high)).all()


def quantized(x: Tensor, axis: int, info: FormatInfo) -> tuple[Tensor, Tensor, Tensor]:
    """MX codes, scales and exact values (float64)."""
    y, mxscale = ops.dynamic_mx_quant(x, axis=axis, dst_type=info.npu_code)
    values = ops.anti_mx_quant(y, mxscale, axis=axis, dst_type=torch.float32, src_type=info.npu_code)
    return y, mxscale, values.double()


def mx_matmul(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, **arguments) -> Tensor:
    return ops.quant_matmul(
        a,
        b,
        b_scale,
        pertoken_scale=a_scale,
        scale_dtype=293,
        pertoken_scale_dtype=293,
        group_sizes=[1, 1, 32],
        **arguments,
    )


CAST = {E4M3: ops.cast_e4m3, E5M2: ops.cast_e5m2, HIF8: ops.cast_hifloat8, INT8: ops.cast_int8}
DECODE = {E4M3: ops.decode_e4m3, E5M2: ops.decode_e5m2, HIF8: ops.decode_hifloat8, INT8: ops.decode_int8}


def codes(shape: tuple[int, ...], info: FormatInfo, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Codes of random numbers and their values (float64)."""
    x = CAST[info](normal(shape, torch.float32, seed) * (50 if info is INT8 else 4))
    return x, DECODE[info](x).double()


def names(left: FormatInfo, right: FormatInfo) -> dict[str, int]:
    """What names formats that torch has no dtype for."""
    pair = {"x1_dtype": left, "x2_dtype": right}
    return {name: info.npu_code for name, info in pair.items() if info.dtype == torch.uint8}


def scales(*shape: int, seed: int = 0) -> Tensor:
    """Positive scales with all 24 bits of their mantissas in use."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.1


def upper_19(product: np.ndarray) -> np.ndarray:
    return (product.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


# ---- one scale for a tensor, a row or a column ----


@pytest.mark.parametrize("output_dtype", OUTPUTS)
@pytest.mark.parametrize("with_bias", [False, True])
@KINDS
@SHAPES
def test_scales_of_tensors_rows_and_columns(shape, left, right, with_bias, output_dtype):
    m, k, n = shape
    (a, a_exact), (b, b_exact) = codes((m, k), left), codes((k, n), right, 1)
    bias = torch.randn(n) if with_bias else None
    for left_count in (1, m):
        for right_count in (1, n):
            pertoken, scale = scales(left_count), scales(right_count, seed=1)
            out = ops.quant_matmul(
                a,
                b,
                scale,
                pertoken_scale=pertoken,
                bias=bias,
                output_dtype=output_dtype,
                **names(left, right),
            )
            assert (out.shape, out.dtype) == ((m, n), output_dtype)
            both = pertoken.double()[:, None] * scale.double()
            if left_count == right_count == 1 and bias is None:
                both = torch.from_numpy(upper_19((pertoken * scale).numpy())).double()
            assert_close_to_exact(out, a_exact, b_exact, 0.0 if bias is None else bias.double(), both)


ONE = {E4M3: 0x38, E5M2: 0x3C, HIF8: 0x08}


def ones(shape: tuple[int, ...], info: FormatInfo) -> Tensor:
    return torch.full(shape, ONE[info], dtype=torch.uint8).view(info.dtype)


@KINDS
def test_two_scales_are_multiplied_and_cut_to_19_bits_without_a_bias_and_only_then(left, right):
    """The product of two ones is the scale itself."""
    a, b = ones((1, 1), left), ones((1, 1), right)
    seen = set()
    for seed in range(200):
        pertoken, scale = scales(1, seed=seed) * 2.0 ** (seed - 100), scales(1, seed=seed + 1000)
        arguments = {"pertoken_scale": pertoken, "output_dtype": torch.float32, **names(left, right)}
        out = ops.quant_matmul(a, b, scale, **arguments)
        product = (scale * pertoken).numpy()
        assert_same_bytes(out, torch.from_numpy(upper_19(product))[None])
        seen.add(bool(out.item() != product.item()))
        with_bias = ops.quant_matmul(a, b, scale, bias=torch.zeros(1), **arguments)
        assert_same_bytes(with_bias, torch.from_numpy(product)[None])
    assert True in seen


@KINDS
def test_scales_of_rows_and_columns_are_multiplied_one_after_the_other_uncut(left, right):
    a, b = ones((50, 1), left), CAST[right](torch.full((1, 40), 3.0))
    for left_count, right_count in ((50, 40), (50, 1), (1, 40)):
        pertoken, scale = scales(left_count), scales(right_count, seed=1)
        bias = torch.randn(40)
        for given in (None, bias):
            out = ops.quant_matmul(
                a,
                b,
                scale,
                pertoken_scale=pertoken,
                bias=given,
                output_dtype=torch.float32,
                **names(left, right),
            )
            expected = np.float32(3.0) * scale.numpy() * pertoken.numpy()[:, None]
            expected = np.broadcast_to(expected, (50, 40)) + (0 if given is None else given.numpy())
            assert expected.dtype == np.float32
            assert_same_bytes(out, torch.from_numpy(expected.copy()))


@pytest.mark.parametrize(
    ("batch1", "batch2"), [((3,), (3,)), ((3,), ()), ((2, 1), (4,)), ((), (5,))], ids=str
)
def test_leading_dimensions_share_the_scales(batch1, batch2):
    (a, a_exact), (b, b_exact) = codes((*batch1, 6, 70), HIF8), codes((*batch2, 70, 9), HIF8, 1)
    pertoken, scale = scales(6), scales(9, seed=1)
    out = ops.quant_matmul(
        a, b, scale, pertoken_scale=pertoken, output_dtype=torch.float32, x1_dtype=290, x2_dtype=290
    )
    assert out.shape == (a_exact @ b_exact).shape
    assert_close_to_exact(out, a_exact, b_exact, scale=pertoken.double()[:, None] * scale.double())


def test_a_bias_for_each_matrix_of_a_batch():
    (a, a_exact), (b, b_exact) = codes((3, 6, 70), E4M3), codes((3, 70, 9), E4M3, 1)
    bias = torch.randn(3, 1, 9)
    out = ops.quant_matmul(a, b, scales(1), pertoken_scale=scales(6), bias=bias, output_dtype=torch.float32)
    both = scales(6).double()[:, None] * scales(1).double()
    assert_close_to_exact(out, a_exact, b_exact, bias.double(), both)


def test_a_nan_scale_makes_nan_of_its_row_or_column_and_of_nothing_else():
    (a, _), (b, _) = codes((6, 70), E4M3), codes((70, 9), E4M3, 1)
    pertoken, scale = scales(6), scales(9)
    pertoken[2] = scale[5] = float("nan")
    out = ops.quant_matmul(a, b, scale, pertoken_scale=pertoken, output_dtype=torch.bfloat16)
    expected = torch.zeros(6, 9, dtype=torch.bool)
    expected[2] = expected[:, 5] = True
    assert torch.equal(out.isnan(), expected)
    nan = torch.tensor([float("nan")])
    assert ops.quant_matmul(a, b, nan, pertoken_scale=scales(1), output_dtype=torch.bfloat16).isnan().all()


def test_infinity_and_nan_codes_of_hifloat8_reach_the_product():
    a = ops.cast_hifloat8(torch.tensor([[1.0, 2.0], [float("inf"), 1.0], [float("nan"), 1.0]]))
    b = ops.cast_hifloat8(torch.ones(2, 1))
    out = ops.quant_matmul(
        a,
        b,
        torch.ones(1),
        pertoken_scale=torch.ones(1),
        output_dtype=torch.float32,
        x1_dtype=290,
        x2_dtype=290,
    )
    assert out.flatten().tolist()[:2] == [3.0, float("inf")]
    assert out[2].isnan().all()


# ---- int8 ----


@pytest.mark.parametrize("output_dtype", OUTPUTS[:2])
@SHAPES
def test_int8_sums_are_exact_and_scaled_per_row(shape, output_dtype):
    m, k, n = shape
    (a, a_exact), (b, b_exact) = codes((m, k), INT8), codes((k, n), INT8, 1)
    sums = (a_exact @ b_exact).numpy().astype(np.float32)
    for count in (1, n):
        pertoken, scale, bias = scales(m), scales(count, seed=1), torch.randn(n)
        for given in (None, bias):
            out = ops.quant_matmul(
                a, b, scale, pertoken_scale=pertoken, bias=given, output_dtype=output_dtype
            )
            expected = sums * scale.numpy() * pertoken.numpy()[:, None] + (
                0 if given is None else given.numpy()
            )
            assert expected.dtype == np.float32
            assert_same_bytes(out, torch.from_numpy(expected).to(output_dtype))


# ---- blocks of 128 ----


def blockwise(a: Tensor, b: Tensor, left: Tensor, right: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Operands (float64) times their scales of ``rows`` x 128 and 128 x 128 blocks."""
    left = left.double().repeat_interleave(rows, -2).repeat_interleave(128, -1)
    right = right.double().repeat_interleave(128, -2).repeat_interleave(128, -1)
    return (
        a * left[..., : a.shape[-2], : a.shape[-1]],
        b * right[..., : b.shape[-2], : b.shape[-1]],
    )


@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize("output_dtype", OUTPUTS)
@KINDS
@pytest.mark.parametrize("shape", [(128, 256, 128), (130, 300, 140), (1, 1, 1), (7, 129, 260)], ids=str)
def test_blocks_of_128(shape, left, right, output_dtype, rows):
    m, k, n = shape
    (a, a_exact), (b, b_exact) = codes((m, k), left), codes((k, n), right, 1)
    a_scale = scales(-(-m // rows), -(-k // 128))
    b_scale = scales(-(-k // 128), -(-n // 128), seed=1)
    out = ops.quant_matmul(
        a,
        b,
        b_scale,
        pertoken_scale=a_scale,
        output_dtype=output_dtype,
        group_sizes=[rows, 128, 128],
        **names(left, right),
    )
    assert_close_to_exact(out, *blockwise(a_exact, b_exact, a_scale, b_scale, rows))


@pytest.mark.parametrize("rows", [1, 128])
def test_each_block_of_k_is_scaled_by_the_product_of_its_scales_and_added_in_fp32(rows):
    """One element other than 0 in each block: nothing is left to the order of additions."""
    a, b = torch.zeros(3, 300), torch.zeros(300, 150)
    a[:, [5, 130, 290]] = b[[5, 130, 290]] = 1.0
    a_scale, b_scale = scales(3 if rows == 1 else 1, 3), scales(3, 2, seed=1)
    out = ops.quant_matmul(
        ops.cast_e4m3(a),
        ops.cast_e4m3(b),
        b_scale,
        pertoken_scale=a_scale,
        output_dtype=torch.float32,
        group_sizes=[rows, 128, 128],
    )
    left, right = a_scale.numpy().repeat(3 if rows > 1 else 1, 0), b_scale.numpy().repeat(128, 1)[:, :150]
    expected = np.zeros((3, 150), dtype=np.float32)
    for block in range(3):
        expected += left[:, block, None] * right[block]
    assert_same_bytes(out, torch.from_numpy(expected))


def test_blocks_with_leading_dimensions():
    (a, a_exact), (b, b_exact) = codes((2, 1, 6, 200), HIF8), codes((3, 200, 9), HIF8, 1)
    a_scale, b_scale = scales(2, 1, 6, 2), scales(3, 2, 1, seed=1)
    out = ops.quant_matmul(
        a,
        b,
        b_scale,
        pertoken_scale=a_scale,
        output_dtype=torch.float32,
        group_sizes=[1, 128, 128],
        x1_dtype=290,
        x2_dtype=290,
    )
    assert out.shape == (2, 3, 6, 9)
    assert_close_to_exact(out, *blockwise(a_exact, b_exact, a_scale, b_scale, 1))


def test_int8_blocks_take_a_bias():
    (a, a_exact), (b, b_exact) = codes((5, 300), INT8), codes((300, 140), INT8, 1)
    a_scale, b_scale, bias = scales(5, 3), scales(3, 2, seed=1), torch.randn(140)
    out = ops.quant_matmul(
        a,
        b,
        b_scale,
        pertoken_scale=a_scale,
        bias=bias,
        output_dtype=torch.bfloat16,
        group_sizes=[1, 128, 128],
    )
    assert_close_to_exact(out, *blockwise(a_exact, b_exact, a_scale, b_scale, 1), bias.double())


# ---- MX ----


@pytest.mark.parametrize("output_dtype", OUTPUTS)
@pytest.mark.parametrize("info", FORMATS)
@pytest.mark.parametrize("shape", [(64, 64, 64), (33, 100, 17), (1, 1, 1), (5, 2000, 7)], ids=str)
def test_mx(gemm_precision, shape, info, output_dtype):
    m, k, n = shape
    a, a_scale, a_exact = quantized(normal((m, k)), -1, info)
    b, b_scale, b_exact = quantized(normal((k, n), seed=1), -2, E4M3)
    bias = torch.randn(n)
    out = mx_matmul(a, a_scale, b, b_scale, output_dtype=output_dtype)
    assert_close_to_exact(out, a_exact, b_exact)
    out = mx_matmul(a, a_scale, b, b_scale, output_dtype=output_dtype, bias=bias)
    assert_close_to_exact(out, a_exact, b_exact, bias.double())


@pytest.mark.parametrize(
    ("batch1", "batch2"), [((3,), (3,)), ((3,), ()), ((2, 1), (4,)), ((), (5,))], ids=str
)
def test_mx_with_leading_dimensions(batch1, batch2):
    a, a_scale, a_exact = quantized(normal((*batch1, 6, 70)), -1, E4M3)
    b, b_scale, b_exact = quantized(normal((*batch2, 70, 9), seed=1), -2, E4M3)
    out = mx_matmul(a, a_scale, b, b_scale, output_dtype=torch.float32)
    assert out.shape == (a_exact @ b_exact).shape
    assert_close_to_exact(out, a_exact, b_exact)


def test_mx_with_a_bias_for_each_matrix():
    a, a_scale, a_exact = quantized(normal((3, 6, 70)), -1, E4M3)
    b, b_scale, b_exact = quantized(normal((3, 70, 9), seed=1), -2, E4M3)
    bias = torch.randn(3, 1, 9)
    out = mx_matmul(a, a_scale, b, b_scale, bias=bias, output_dtype=torch.float32)
    assert_close_to_exact(out, a_exact, b_exact, bias.double())


@pytest.mark.parametrize("output_dtype", OUTPUTS)
@pytest.mark.parametrize("shape", [(64, 64, 64), (33, 100, 17), (130, 300, 70)], ids=str)
def test_results_do_not_depend_on_memory_layout(gemm_precision, shape, output_dtype):
    m, k, n = shape
    a, a_scale, _ = quantized(normal((m, k)), -1, E4M3)
    b, b_scale, _ = quantized(normal((k, n), seed=1), -2, E4M3)
    arguments = {"output_dtype": output_dtype}
    expected = mx_matmul(a, a_scale, b, b_scale, **arguments)

    def turned(x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    def shifted(x: Tensor) -> Tensor:
        wide = torch.zeros(x.shape[0] + 1, x.shape[1] + 3, *x.shape[2:], dtype=torch.uint8)
        wide[1:, 2:-1] = x.view(torch.uint8)
        return wide.view(x.dtype)[1:, 2:-1]

    for change1, change2 in ((turned, turned), (turned, shifted), (shifted, turned), (shifted, shifted)):
        actual = mx_matmul(change1(a), change1(a_scale), change2(b), change2(b_scale), **arguments)
        assert_same_bytes(actual, expected)


def test_scales_may_come_as_float8_e8m0fnu():
    a, a_scale, _ = quantized(normal((8, 64)), -1, E4M3)
    b, b_scale, _ = quantized(normal((64, 8)), -2, E4M3)
    e8m0 = torch.float8_e8m0fnu
    expected = mx_matmul(a, a_scale, b, b_scale, output_dtype=torch.float32)
    actual = ops.quant_matmul(
        a,
        b,
        b_scale.view(e8m0),
        pertoken_scale=a_scale.view(e8m0),
        output_dtype=6,
        scale_dtype=e8m0,
        pertoken_scale_dtype=293,
        group_sizes=(1, 1, 32),
    )
    assert_same_bytes(actual, expected)


def test_a_broken_block_makes_nan_of_its_row_and_of_nothing_else(gemm_precision):
    x = normal((40, 100))
    x[7, 50] = float("inf")
    a, a_scale = ops.dynamic_mx_quant(x, dst_type=E4M3.dtype)
    b, b_scale, _ = quantized(normal((100, 9)), -2, E4M3)
    out = mx_matmul(a, a_scale, b, b_scale, output_dtype=torch.bfloat16)
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
    out = mx_matmul(a, a_scale, b, b_scale, output_dtype=torch.bfloat16)
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
        y, mxscale = ops.dynamic_mx_quant(x, axis=axis, dst_type=E4M3.dtype)
        assert gemm.may_hold_bf16_subnormals(gemm.Operand(y, E4M3, mxscale), axis) is expected
    x.fill_(1.0)
    y, mxscale = ops.dynamic_mx_quant(x, dst_type=E5M2.dtype)
    assert not gemm.may_hold_bf16_subnormals(gemm.Operand(y, E5M2, mxscale), 1)


FP4 = {"x1_dtype": 296, "x2_dtype": torch.float4_e2m1fn_x2}


def packed_along_rows(x: Tensor, axis: int) -> tuple[Tensor, Tensor, Tensor]:
    """Like `quantized`, the codes packed along the second last axis: a transposed view."""
    y, mxscale, exact = quantized(x.transpose(-1, -2).contiguous(), -3 - axis, E2M1)
    return y.transpose(-1, -2), mxscale.transpose(-2, -3), exact.transpose(-1, -2)


def packed_along_columns(x: Tensor, axis: int) -> tuple[Tensor, Tensor, Tensor]:
    return quantized(x, axis, E2M1)


PACKINGS = pytest.mark.parametrize("pack_left", [packed_along_columns, packed_along_rows])
PACKINGS2 = pytest.mark.parametrize("pack_right", [packed_along_columns, packed_along_rows])


@PACKINGS
@PACKINGS2
@pytest.mark.parametrize("output_dtype", OUTPUTS)
@pytest.mark.parametrize("shape", [(64, 64, 64), (34, 100, 18), (2, 4, 2), (6, 2000, 8)], ids=str)
def test_mx_fp4_packed_along_either_axis(gemm_precision, shape, output_dtype, pack_left, pack_right):
    m, k, n = shape
    a, a_scale, a_exact = pack_left(normal((m, k)), -1)
    b, b_scale, b_exact = pack_right(normal((k, n), seed=1), -2)
    assert a.numel() * 2 == m * k
    assert b.numel() * 2 == k * n
    bias = torch.randn(n)
    out = mx_matmul(a, a_scale, b, b_scale, output_dtype=output_dtype, **FP4)
    assert (out.shape, out.dtype) == ((m, n), output_dtype)
    assert_close_to_exact(out, a_exact, b_exact)
    out = mx_matmul(a, a_scale, b, b_scale, output_dtype=output_dtype, bias=bias, **FP4)
    assert_close_to_exact(out, a_exact, b_exact, bias.double())


@PACKINGS
@PACKINGS2
def test_mx_fp4_does_not_depend_on_memory_layout_or_on_the_packing(pack_left, pack_right):
    x, y = normal((130, 300)), normal((300, 70), seed=1)
    a, a_scale, _ = packed_along_columns(x, -1)
    b, b_scale, _ = packed_along_rows(y, -2)
    expected = mx_matmul(a, a_scale, b, b_scale, output_dtype=torch.float32, **FP4)
    a, a_scale, _ = pack_left(x, -1)
    b, b_scale, _ = pack_right(y, -2)
    for change in (torch.clone, Tensor.contiguous, lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)):
        out = mx_matmul(
            change(a), change(a_scale), change(b), change(b_scale), output_dtype=torch.float32, **FP4
        )
        assert_same_bytes(out, expected)


def test_mx_fp4_with_leading_dimensions():
    a, a_scale, a_exact = packed_along_columns(normal((3, 6, 70)), -1)
    b, b_scale, b_exact = packed_along_rows(normal((70, 10), seed=1), -2)
    out = mx_matmul(a, a_scale, b, b_scale, output_dtype=torch.float32, **FP4)
    assert out.shape == (3, 6, 10)
    assert_close_to_exact(out, a_exact, b_exact)


@pytest.mark.parametrize("group_sizes", [None, [1, 128, 128], [128, 128, 128]], ids=str)
@KINDS
def test_scaled_products_do_not_depend_on_memory_layout(left, right, group_sizes):
    m, k, n = 130, 300, 140
    a, b = codes((m, k), left)[0], codes((k, n), right, 1)[0]
    if group_sizes is None:
        a_scale, b_scale = scales(m), scales(n, seed=1)
    else:
        a_scale, b_scale = scales(-(-m // group_sizes[0]), 3), scales(3, 2, seed=1)
    arguments = {"output_dtype": torch.bfloat16, "group_sizes": group_sizes, **names(left, right)}
    expected = ops.quant_matmul(a, b, b_scale, pertoken_scale=a_scale, **arguments)

    def turned(x: Tensor) -> Tensor:
        return x.t().contiguous().t()

    def spread(x: Tensor) -> Tensor:
        wide = x.new_zeros([2 * size for size in x.shape])
        return wide[tuple(slice(0, None, 2) for _ in x.shape)].copy_(x)

    for change in (turned, spread):
        out = ops.quant_matmul(
            change(a), change(b), change(b_scale), pertoken_scale=change(a_scale), **arguments
        )
        assert_same_bytes(out, expected)


@pytest.mark.parametrize("group_sizes", [None, [1, 1, 32], [1, 128, 128], [128, 128, 128]], ids=str)
@pytest.mark.parametrize("shape", [(0, 64, 8), (8, 64, 0), (8, 0, 4)], ids=str)
def test_empty_matrices(shape, group_sizes):
    m, k, n = shape
    a, b = torch.zeros(m, k).to(torch.float8_e4m3fn), torch.zeros(k, n).to(torch.float8_e4m3fn)
    if group_sizes == [1, 1, 32]:
        out = mx_matmul(
            a,
            torch.zeros(m, -(-k // 64), 2, dtype=torch.uint8),
            b,
            torch.zeros(-(-k // 64), n, 2, dtype=torch.uint8),
            output_dtype=torch.bfloat16,
        )
    else:
        blocks = -(-k // 128)
        a_scale = torch.ones(1) if group_sizes is None else torch.ones(-(-m // group_sizes[0]), blocks)
        b_scale = torch.ones(1) if group_sizes is None else torch.ones(blocks, -(-n // 128))
        out = ops.quant_matmul(
            a, b, b_scale, pertoken_scale=a_scale, output_dtype=torch.bfloat16, group_sizes=group_sizes
        )
    assert_same_bytes(out, torch.zeros(m, n, dtype=torch.bfloat16))


# ---- added to a matrix ----


def test_add_quant_matmul_adds_in_fp32_and_returns_self():
    a, a_scale, a_exact = quantized(normal((33, 100)), -1, E5M2)
    b, b_scale, b_exact = quantized(normal((100, 17)), -2, E4M3)
    total = torch.randn(33, 17)
    before = total.clone()
    returned = ops.add_quant_matmul_(total, a, b, b_scale, x1_scale=a_scale)
    assert returned is total
    product = mx_matmul(a, a_scale, b, b_scale, output_dtype=torch.float32)
    assert_same_bytes(total, before + product)
    assert_close_to_exact(total, a_exact, b_exact, before.double())


def test_add_quant_matmul_into_a_view():
    a, a_scale, _ = quantized(normal((6, 64)), -1, E4M3)
    b, b_scale, _ = quantized(normal((64, 5)), -2, E4M3)
    whole = torch.zeros(8, 10)
    ops.add_quant_matmul_(whole[1:7, ::2], a, b, b_scale, x1_scale=a_scale)
    expected = torch.zeros(8, 10)
    expected[1:7, ::2] = mx_matmul(a, a_scale, b, b_scale, output_dtype=torch.float32)
    assert_same_bytes(whole, expected)


def test_add_quant_matmul_of_hifloat8_cuts_the_product_of_the_scales():
    (a, a_exact), (b, b_exact) = codes((33, 100), HIF8), codes((100, 17), HIF8, 1)
    total = torch.randn(33, 17)
    before = total.clone()
    pair = {"x1_dtype": 290, "x2_dtype": 290}
    assert ops.add_quant_matmul_(total, a, b, scales(1), x1_scale=scales(1, seed=1), **pair) is total
    product = ops.quant_matmul(
        a, b, scales(1), pertoken_scale=scales(1, seed=1), output_dtype=torch.float32, **pair
    )
    assert_same_bytes(total, before + product)
    both = torch.from_numpy(upper_19((scales(1) * scales(1, seed=1)).numpy())).double()
    assert_close_to_exact(total, a_exact, b_exact, before.double(), both)
