"""Grouped products equal the products of their groups; empty groups and surplus rows give exact zeros."""

import pytest
import torch

from mindspeed_lowp import ops
from mindspeed_lowp.formats import E2M1, E4M3, E5M2, HIF8
from tests.ops.data import assert_same_bytes, normal
from tests.ops.test_matmul import (
    assert_close_to_exact,
    blockwise,
    codes,
    mx_matmul,
    packed_along_columns,
    packed_along_rows,
    scales,
    upper_19,
)

OUTPUTS = [pytest.param(dtype, id=str(dtype)[6:]) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
GROUPS = {
    "even": [64, 128, 192, 256],
    "uneven": [1, 70, 200, 256],
    "first empty": [0, 100, 130, 256],
    "last empty": [100, 130, 256, 256],
    "all empty": [0, 0, 0, 0],
    "surplus rows": [10, 10, 70, 90],
}
ROWS, K, N = 256, 70, 40
KINDS = pytest.mark.parametrize(("left", "right"), [(E5M2, E4M3), (HIF8, HIF8)], ids=lambda info: info.name)
TWO_OUTPUTS = pytest.mark.parametrize("output_dtype", [OUTPUTS[0], OUTPUTS[2]])


def counts(ends):
    return torch.tensor(ends).diff(prepend=torch.tensor([0]))


@pytest.mark.parametrize("output_dtype", OUTPUTS)
@pytest.mark.parametrize("ends", GROUPS.values(), ids=GROUPS)
def test_mx_split_m(ends, output_dtype):
    x, x_scale = ops.dynamic_mx_quant(normal((ROWS, K)), dst_type=E4M3.dtype)
    _, _, weight, scale = ops.dynamic_mx_quant_with_dual_axis(
        normal((len(ends), K, N), seed=1), dst_type=E4M3.dtype
    )
    x.view(torch.uint8)[ends[-1] :] = 0x7F  # poison: NaN
    x_scale[ends[-1] :] = 0xFF

    def run(group_list, group_list_type):
        (out,) = ops.grouped_matmul(
            [x],
            [weight],
            scale=[scale],
            per_token_scale=[x_scale],
            group_list=group_list,
            split_item=3,
            group_type=0,
            group_list_type=group_list_type,
            output_dtype=output_dtype,
            scale_dtype=293,
            per_token_scale_dtype=293,
        )
        return out

    out = run(torch.tensor(ends), 0)
    assert (out.shape, out.dtype) == ((ROWS, N), output_dtype)
    start = 0
    for group, end in enumerate(ends):
        expected = mx_matmul(
            x[start:end], x_scale[start:end], weight[group], scale[group], output_dtype=output_dtype
        )
        assert_same_bytes(out[start:end], expected)
        start = end
    assert not out[start:].any()
    assert_same_bytes(run(counts(ends), 1), out)


def split_k_operands(ends):
    """Codes and scales quantized over the groups' rows, in buffers whose surplus rows are poisoned."""
    used, group_list = ends[-1], torch.tensor(ends)
    operands = []
    for width, dtype, seed in ((K, E4M3.dtype, 0), (N, E5M2.dtype, 1)):
        codes, mxscale = ops.grouped_dynamic_mx_quant(
            normal((used, width), seed=seed), group_list, dst_type=dtype
        )
        buffer = torch.full((ROWS, width), 0x7F, dtype=torch.uint8).view(dtype)
        buffer[:used] = codes
        scales = torch.full((ROWS // 64 + len(ends), width, 2), 0xFF, dtype=torch.uint8)
        scales[: len(mxscale)] = mxscale
        operands += [buffer, scales]
    return (*operands, group_list)


@pytest.mark.parametrize("output_dtype", OUTPUTS)
@pytest.mark.parametrize("ends", GROUPS.values(), ids=GROUPS)
def test_mx_split_k(ends, output_dtype):
    a, a_scale, b, b_scale, group_list = split_k_operands(ends)

    def run(group_list, group_list_type):
        (out,) = ops.grouped_matmul(
            [a.t()],
            [b],
            scale=[b_scale],
            per_token_scale=[a_scale.transpose(0, 1)],
            group_list=group_list,
            split_item=3,
            group_type=2,
            group_list_type=group_list_type,
            output_dtype=output_dtype,
        )
        return out

    out = run(group_list, 0)
    assert (out.shape, out.dtype) == ((len(ends), K, N), output_dtype)
    start = 0
    for group, end in enumerate(ends):
        first = start // 64 + group
        rows = slice(first, first - (start - end) // 64)
        expected = mx_matmul(
            a[start:end].t(),
            a_scale[rows].transpose(0, 1),
            b[start:end],
            b_scale[rows],
            output_dtype=output_dtype,
        )
        assert_same_bytes(out[group], expected)
        if start == end:
            assert not out[group].any()
        start = end
    assert_same_bytes(run(counts(ends), 1), out)


@pytest.mark.parametrize("ends", GROUPS.values(), ids=GROUPS)
def test_mx_add_quant_gmm(ends):
    a, a_scale, b, b_scale, group_list = split_k_operands(ends)
    total = torch.randn(len(ends), K, N)
    before = total.clone()
    arguments = {"x1_scale": a_scale.transpose(0, 1), "x1_scale_dtype": 293, "x2_scale_dtype": 293}
    assert ops.add_quant_gmm_(total, a.t(), b, b_scale, group_list, **arguments) is total
    (products,) = ops.grouped_matmul(
        [a.t()],
        [b],
        scale=[b_scale],
        per_token_scale=[a_scale.transpose(0, 1)],
        group_list=group_list,
        split_item=3,
        group_type=2,
        output_dtype=torch.float32,
    )
    assert_same_bytes(total, before + products)
    again = before.clone()
    ops.add_quant_gmm_(again, a.t(), b, b_scale, counts(ends), group_list_type=1, **arguments)
    assert_same_bytes(again, total)


# ---- FP4 ----


@pytest.mark.parametrize("pack_weight", [packed_along_columns, packed_along_rows])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("ends", GROUPS.values(), ids=GROUPS)
def test_mx_fp4_split_m(ends, with_bias, pack_weight):
    x, x_scale, _ = packed_along_columns(normal((ROWS, K)), -1)
    weight, scale, _ = pack_weight(normal((len(ends), K, N), seed=1), -2)
    x_scale[ends[-1] :] = 0xFF  # poison: NaN
    bias = torch.randn(len(ends), N) if with_bias else None
    (out,) = ops.grouped_matmul(
        [x],
        [weight],
        bias=None if bias is None else [bias],
        scale=[scale],
        per_token_scale=[x_scale],
        group_list=torch.tensor(ends),
        split_item=2,
        group_type=0,
        output_dtype=torch.bfloat16,
        x_dtype=E2M1.npu_code,
        weight_dtype=E2M1.npu_code,
    )
    assert out.shape == (ROWS, N)
    start = 0
    for group, end in enumerate(ends):
        expected = mx_matmul(
            x[start:end],
            x_scale[start:end],
            weight[group],
            scale[group],
            bias=None if bias is None else bias[group],
            output_dtype=torch.bfloat16,
            x1_dtype=296,
            x2_dtype=296,
        )
        assert_same_bytes(out[start:end], expected)
        start = end
    assert not out[start:].any()


# ---- scales of groups, rows and columns ----


def gmm(
    x, weight, per_token_scale, scale, ends, group_type, info1, info2, output_dtype=torch.float32, **changed
):
    names = {"x_dtype": info1, "weight_dtype": info2}
    (out,) = ops.grouped_matmul(
        [x],
        [weight],
        scale=[scale],
        per_token_scale=[per_token_scale],
        split_item=3,
        group_type=group_type,
        output_dtype=output_dtype,
        **{name: HIF8.npu_code for name, info in names.items() if info is HIF8},
        **({"group_list": torch.tensor(ends)} | changed),
    )
    return out


def poisoned(x, used, axis):
    """``x`` (codes) with NaN beyond ``used`` along ``axis``."""
    nan = 0x80 if x.dtype == torch.uint8 else 0x7F
    x.view(torch.uint8).narrow(axis, used, x.shape[axis] - used).fill_(nan)
    return x


@TWO_OUTPUTS
@KINDS
@pytest.mark.parametrize(
    ("rows", "columns"),
    [("[G]", "[G]"), ("[G, 1]", "[G, 1]"), ("[T]", "[G]"), ("[G]", "[G, N]"), ("[T]", "[G, N]")],
)
@pytest.mark.parametrize("ends", GROUPS.values(), ids=GROUPS)
def test_split_m(ends, left, right, rows, columns, output_dtype):
    groups = len(ends)
    (x, exact), (weight, weight_exact) = codes((ROWS, K), left), codes((groups, K, N), right, 1)
    shapes = {"[G]": (groups,), "[G, 1]": (groups, 1), "[T]": (ROWS,), "[G, N]": (groups, N)}
    per_token_scale, scale = scales(*shapes[rows]), scales(*shapes[columns], seed=1)
    poisoned(x, ends[-1], 0)
    if rows == "[T]":
        per_token_scale[ends[-1] :] = float("nan")
    out = gmm(x, weight, per_token_scale, scale, ends, 0, left, right, output_dtype)
    assert (out.shape, out.dtype) == ((ROWS, N), output_dtype)
    start = 0
    for group, end in enumerate(ends):
        mine = per_token_scale[start:end] if rows == "[T]" else per_token_scale[group].reshape(1)
        both = mine.double()[:, None] * scale[group].double().reshape(-1)
        if rows != "[T]" and columns != "[G, N]":
            both = torch.from_numpy(upper_19((mine * scale[group].reshape(1)).numpy())).double()
        assert_close_to_exact(out[start:end], exact[start:end], weight_exact[group], scale=both)
        start = end
    assert not out[start:].any()
    again = gmm(
        x,
        weight,
        per_token_scale,
        scale,
        ends,
        0,
        left,
        right,
        output_dtype,
        group_list=counts(ends),
        group_list_type=1,
    )
    assert_same_bytes(again, out)


@TWO_OUTPUTS
@KINDS
@pytest.mark.parametrize(
    ("rows", "columns"),
    [("[G]", "[G]"), ("[G, 1]", "[G, 1]"), ("[G, M]", "[G]"), ("[G]", "[G, N]"), ("[G, M]", "[G, N]")],
)
@pytest.mark.parametrize("ends", GROUPS.values(), ids=GROUPS)
def test_split_k(ends, left, right, rows, columns, output_dtype):
    groups = len(ends)
    (x, exact), (weight, weight_exact) = codes((ROWS, K), left), codes((ROWS, N), right, 1)
    shapes = {"[G]": (groups,), "[G, 1]": (groups, 1), "[G, M]": (groups, K), "[G, N]": (groups, N)}
    per_token_scale, scale = scales(*shapes[rows]), scales(*shapes[columns], seed=1)
    poisoned(x, ends[-1], 0)
    poisoned(weight, ends[-1], 0)
    out = gmm(x.t(), weight, per_token_scale, scale, ends, 2, left, right, output_dtype)
    assert (out.shape, out.dtype) == ((groups, K, N), output_dtype)
    start = 0
    for group, end in enumerate(ends):
        mine, other = per_token_scale[group].reshape(-1), scale[group].reshape(-1)
        both = mine.double()[:, None] * other.double()
        if len(mine) == len(other) == 1:
            both = torch.from_numpy(upper_19((mine * other).numpy())).double()
        assert_close_to_exact(out[group], exact[start:end].t(), weight_exact[start:end], scale=both)
        if start == end:
            assert not out[group].any()
        start = end
    again = gmm(
        x.t(),
        weight,
        per_token_scale,
        scale,
        ends,
        2,
        left,
        right,
        output_dtype,
        group_list=counts(ends),
        group_list_type=1,
    )
    assert_same_bytes(again, out)


@pytest.mark.parametrize("group_type", [0, 2])
def test_groups_equal_plain_products_to_the_bit(group_type):
    """One row for each group: a scale for a row is not a scale for the matrix."""
    ends, one = [1, 2, 3, 4], torch.float8_e4m3fn
    for rows, columns in ((4, (4, 1)), (4, (4, N)), ((4, 1), (4, 1)), ((4, 1), (4, N))):
        rows = (rows,) if isinstance(rows, int) else rows
        if group_type == 2 and rows == (4,):
            continue
        per_token_scale, scale = scales(*rows), scales(*columns, seed=1)
        if group_type == 0:
            x, weight = torch.ones(4, 1).to(one), torch.ones(4, 1, N).to(one)
            out = gmm(x, weight, per_token_scale, scale, ends, 0, None, None)
        else:
            x, weight = torch.ones(4, 1).to(one), torch.ones(4, N).to(one)
            out = gmm(x.t(), weight, per_token_scale, scale, ends, 2, None, None)[:, 0]
        product = scale * per_token_scale.reshape(4, 1)
        if rows == columns == (4, 1):
            product = torch.from_numpy(upper_19(product.numpy()))
        assert_same_bytes(out, product.expand(4, N).contiguous())


def test_as_many_rows_as_groups_take_the_vector_for_rows_and_the_column_for_groups():
    ends, one = [2, 2, 4, 4], torch.float8_e4m3fn
    x, weight = torch.ones(4, 1).to(one), torch.ones(4, 1, 3).to(one)
    values = torch.tensor([1.0, 2.0, 4.0, 8.0])
    by_row = gmm(x, weight, values, torch.ones(4), ends, 0, None, None)
    assert by_row[:, 0].tolist() == [1.0, 2.0, 4.0, 8.0]
    by_group = gmm(x, weight, values[:, None], torch.ones(4), ends, 0, None, None)
    assert by_group[:, 0].tolist() == [1.0, 1.0, 4.0, 4.0]


# ---- blocks of 128 ----

WIDE = 300


@TWO_OUTPUTS
@KINDS
@pytest.mark.parametrize("ends", GROUPS.values(), ids=GROUPS)
def test_blocks_split_m(ends, left, right, output_dtype):
    groups = len(ends)
    (x, exact), (weight, weight_exact) = codes((ROWS, WIDE), left), codes((groups, WIDE, 140), right, 1)
    per_token_scale, scale = scales(ROWS, 3), scales(groups, 3, 2, seed=1)
    poisoned(x, ends[-1], 0)
    per_token_scale[ends[-1] :] = float("nan")
    out = gmm(x, weight, per_token_scale, scale, ends, 0, left, right, output_dtype)
    start = 0
    for group, end in enumerate(ends):
        rows = slice(start, end)
        operands = blockwise(exact[rows], weight_exact[group], per_token_scale[rows], scale[group], 1)
        assert_close_to_exact(out[rows], *operands)
        start = end
    assert not out[start:].any()


@TWO_OUTPUTS
@KINDS
@pytest.mark.parametrize("ends", [[128, 128, 300], [1, 70, 200], [0, 0, 0], [10, 140, 290]], ids=str)
def test_blocks_split_k(ends, left, right, output_dtype):
    groups, rows, m, n = len(ends), 300, 20, 140
    (x, exact), (weight, weight_exact) = codes((rows, m), left), codes((rows, n), right, 1)
    per_token_scale, scale = torch.full((2 + groups, m), torch.nan), torch.full((2 + groups, 2), torch.nan)
    poisoned(x, ends[-1], 0)
    poisoned(weight, ends[-1], 0)
    start, used = 0, []
    for group, end in enumerate(ends):
        first = start // 128 + group
        used.append(slice(first, first - (start - end) // 128))
        per_token_scale[used[-1]] = scales(*per_token_scale[used[-1]].shape, seed=group)
        scale[used[-1]] = scales(*scale[used[-1]].shape, seed=group + 10)
        start = end
    out = gmm(x.t(), weight, per_token_scale.t(), scale, ends, 2, left, right, output_dtype)
    assert (out.shape, out.dtype) == ((groups, m, n), output_dtype)
    start = 0
    for group, end in enumerate(ends):
        left_scale, right_scale = per_token_scale[used[group]].t(), scale[used[group]]
        operands = blockwise(exact[start:end].t(), weight_exact[start:end], left_scale, right_scale, 1)
        assert_close_to_exact(out[group], *operands)
        if start == end:
            assert not out[group].any()
        start = end


# ---- added to matrices ----


@pytest.mark.parametrize("columns", ["[G]", "[G, 1]", "[G, N]"])
@pytest.mark.parametrize("rows", ["[G]", "[G, 1]"])
@pytest.mark.parametrize("ends", GROUPS.values(), ids=GROUPS)
def test_add_quant_gmm_of_hifloat8(ends, rows, columns):
    groups = len(ends)
    x1, x2 = codes((ROWS, K), HIF8)[0], codes((ROWS, N), HIF8, 1)[0]
    shapes = {"[G]": (groups,), "[G, 1]": (groups, 1), "[G, N]": (groups, N)}
    x1_scale, x2_scale = scales(*shapes[rows]), scales(*shapes[columns], seed=1)
    poisoned(x1, ends[-1], 0)
    poisoned(x2, ends[-1], 0)
    total = torch.randn(groups, K, N)
    before = total.clone()
    arguments = {"x1_scale": x1_scale, "x1_dtype": 290, "x2_dtype": 290}
    returned = ops.add_quant_gmm_(total, x1.t(), x2, x2_scale, torch.tensor(ends), **arguments)
    assert returned is total
    assert_same_bytes(total, before + gmm(x1.t(), x2, x1_scale, x2_scale, ends, 2, HIF8, HIF8))
    again = before.clone()
    ops.add_quant_gmm_(again, x1.t(), x2, x2_scale, counts(ends), group_list_type=1, **arguments)
    assert_same_bytes(again, total)
