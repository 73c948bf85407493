from __future__ import annotations

import pytest
import torch

from mindspeed_lowp import ops
from mindspeed_lowp.emulator.grouped_matmul import npu_grouped_matmul, npu_grouped_matmul_add_
from mindspeed_lowp.emulator.moe import npu_moe_token_permute, npu_moe_token_unpermute
from tests.emulator.gradients import assert_same_with_gradients

EXPERTS = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1], [0, 2]])
COUNTS = [3, 0, 5, 1]
ENDS = torch.tensor(COUNTS).cumsum(0)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_expert(tokens):
    """Token by token."""
    return torch.stack(
        [tokens[t] for expert in range(3) for t in range(len(EXPERTS)) if expert in EXPERTS[t]]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_permute(dtype):
    tokens = random(5, 4, dtype=dtype)
    assert_same_with_gradients(lambda x: npu_moe_token_permute(x, EXPERTS)[0], by_expert, [tokens])
    permuted, places = npu_moe_token_permute(tokens, EXPERTS)
    assert places.dtype == torch.int32
    for i, place in enumerate(places.tolist()):
        assert torch.equal(permuted[place], tokens[i // 2])


def test_permute_keeps_the_first_rows():
    tokens = random(5, 4)
    whole, places = npu_moe_token_permute(tokens, EXPERTS)
    for wanted, kept in {7: whole[:7], -2: whole[:-2], 0: whole, None: whole}.items():
        rows, same = npu_moe_token_permute(tokens, EXPERTS, wanted)
        assert torch.equal(rows, kept) and torch.equal(same, places)
    one, _ = npu_moe_token_permute(tokens, EXPERTS[:, 0])
    assert torch.equal(one, tokens[[2, 4, 1, 0, 3]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpermute_sums_what_each_expert_made_of_a_token(dtype):
    _, places = npu_moe_token_permute(random(5, 4), EXPERTS)

    def exact(rows, probs):
        out = torch.zeros(5, 4, dtype=rows.dtype)
        for i, place in enumerate(places.tolist()):
            out[i // 2] = out[i // 2] + probs[i // 2, i % 2] * rows[place]
        return out

    inputs = [random(10, 4, dtype=dtype, seed=1), random(5, 2, dtype=dtype, seed=2)]
    assert_same_with_gradients(lambda rows, p: npu_moe_token_unpermute(rows, places, p), exact, inputs)


def test_unpermute_undoes_permute_and_counts_dropped_rows_as_zero():
    tokens = random(5, 4)
    permuted, places = npu_moe_token_permute(tokens, EXPERTS[:, :1])
    assert torch.equal(npu_moe_token_unpermute(permuted, places), tokens)
    dropped = npu_moe_token_unpermute(permuted[:-1], places)
    lost = int(places.argmax())
    assert dropped[lost].eq(0).all() and torch.equal(dropped[:lost], tokens[:lost])
    with pytest.raises(NotImplementedError, match="npu_moe_token_permute with padded_mode"):
        npu_moe_token_permute(tokens, EXPERTS, padded_mode=True)


def grouped(x, w, bias=None):
    parts = x.split(COUNTS)
    return torch.cat([part @ w[e] + (0 if bias is None else bias[e]) for e, part in enumerate(parts)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("listed", [False, True])
def test_groups_of_rows(dtype, listed):
    def multiply(x, w):
        weights = list(w) if listed else [w]
        (out,) = npu_grouped_matmul([x], weights, group_list=ENDS, split_item=3, group_type=0)
        return out

    inputs = [random(9, 6, dtype=dtype), random(4, 6, 5, dtype=dtype, seed=1)]
    assert_same_with_gradients(multiply, grouped, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_of_the_contracted_axis(dtype):
    def multiply(x, g):
        counts = torch.tensor(COUNTS)
        (out,) = npu_grouped_matmul(
            [x.t()], [g], group_list=counts, split_item=3, group_type=2, group_list_type=1
        )
        return out

    def exact(x, g):
        return torch.stack([a.T @ b for a, b in zip(x.split(COUNTS), g.split(COUNTS), strict=True)])

    assert_same_with_gradients(
        multiply, exact, [random(9, 6, dtype=dtype), random(9, 5, dtype=dtype, seed=1)]
    )


def test_bias_surplus_rows_and_output_dtype():
    x, w, bias = random(11, 6), random(4, 6, 5, seed=1), random(4, 5, seed=2)
    options = {"group_list": ENDS, "split_item": 2, "group_type": 0}
    (out,) = npu_grouped_matmul([x], [w], bias=[bias], output_dtype=torch.bfloat16, **options)
    torch.testing.assert_close(out[:9], grouped(x[:9], w, bias).bfloat16())
    assert out.dtype == torch.bfloat16 and out[9:].eq(0).all()
    assert torch.equal(out, npu_grouped_matmul([x], [w], bias=list(bias), **options)[0].bfloat16())


def test_quantized_products_are_those_of_ops():
    x, w = random(9, 64, dtype=torch.bfloat16), random(4, 64, 32, dtype=torch.bfloat16, seed=1)
    x_codes, x_scale = ops.dynamic_mx_quant(x, axis=-1, dst_type=torch.float8_e4m3fn)
    w_codes, w_scale = ops.dynamic_mx_quant(w, axis=-2, dst_type=torch.float8_e4m3fn)
    options = {
        "scale": [w_scale],
        "per_token_scale": [x_scale],
        "group_list": ENDS,
        "split_item": 3,
        "group_type": 0,
        "output_dtype": torch.bfloat16,
    }
    (ours,) = npu_grouped_matmul([x_codes], [w_codes], bias=None, group_list_type=0, **options)
    assert torch.equal(ours, ops.grouped_matmul([x_codes], [w_codes], **options)[0])
    torch.testing.assert_close(ours, grouped(x, w), rtol=0.1, atol=1.5)  # 8 bits


@pytest.mark.parametrize("flat", [False, True])
def test_added_products(flat):
    acc = random(4, 6, 5)
    x, g = random(9, 6, dtype=torch.bfloat16, seed=1), random(9, 5, dtype=torch.bfloat16, seed=2)
    pairs = zip(x.double().split(COUNTS), g.double().split(COUNTS), strict=True)
    expected = acc.double() + torch.stack([a.T @ b for a, b in pairs])
    target = acc.view(24, 5) if flat else acc
    assert npu_grouped_matmul_add_(target, x, g, ENDS) is target
    torch.testing.assert_close(acc.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_type": 0, "split_item": 0}, "split_item=0"),
        ({"group_type": -1, "split_item": 3}, "group_type=-1"),
        ({"group_type": 0, "split_item": 3, "act_type": 2}, "act_type=2"),
        ({"group_type": 0, "split_item": 3, "antiquant_scale": [ENDS]}, "antiquant_scale"),
    ],
)
def test_what_is_not_emulated_says_so(options, message):
    with pytest.raises(NotImplementedError, match=f"npu_grouped_matmul .*{message}"):
        npu_grouped_matmul([random(9, 6)], [random(4, 6, 5)], group_list=ENDS, **options)
