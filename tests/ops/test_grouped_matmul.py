"""Grouped products equal the products of their groups; empty groups and surplus rows give exact zeros."""

import pytest
import torch

from mindspeed_lowp import ops
from tests.ops.data import assert_same_bytes, normal

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
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


def counts(ends):
    return torch.tensor(ends).diff(prepend=torch.tensor([0]))


@pytest.mark.parametrize("output_dtype", OUTPUTS)
@pytest.mark.parametrize("ends", GROUPS.values(), ids=GROUPS)
def test_split_m(ends, output_dtype):
    x, x_scale = ops.dynamic_mx_quant(normal((ROWS, K)), dst_type=E4M3)
    _, _, weight, scale = ops.dynamic_mx_quant_with_dual_axis(
        normal((len(ends), K, N), seed=1), dst_type=E4M3
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
        expected = ops.quant_matmul(
            x[start:end],
            weight[group],
            scale[group],
            pertoken_scale=x_scale[start:end],
            output_dtype=output_dtype,
        )
        assert_same_bytes(out[start:end], expected)
        start = end
    assert not out[start:].any()
    assert_same_bytes(run(counts(ends), 1), out)


def split_k_operands(ends):
    """Codes and scales quantized over the groups' rows, in buffers whose surplus rows are poisoned."""
    used, group_list = ends[-1], torch.tensor(ends)
    operands = []
    for width, dtype, seed in ((K, E4M3, 0), (N, E5M2, 1)):
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
def test_split_k(ends, output_dtype):
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
        expected = ops.quant_matmul(
            a[start:end].t(),
            b[start:end],
            b_scale[rows],
            pertoken_scale=a_scale[rows].transpose(0, 1),
            output_dtype=output_dtype,
        )
        assert_same_bytes(out[group], expected)
        if start == end:
            assert not out[group].any()
        start = end
    assert_same_bytes(run(counts(ends), 1), out)


@pytest.mark.parametrize("ends", GROUPS.values(), ids=GROUPS)
def test_add_quant_gmm(ends):
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
