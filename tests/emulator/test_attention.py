from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mindspeed_lowp.emulator.attention import npu_fusion_attention
from tests.emulator.gradients import assert_same_with_gradients

B, S, N, D = 2, 5, 4, 8
SCALE = 0.3

# How [B, N, S, D] becomes each layout, and comes back from it.
LAYOUTS = {
    "BNSD": (lambda x: x, lambda x, n: x),
    "BSND": (lambda x: x.transpose(1, 2), lambda x, n: x.transpose(1, 2)),
    "BSH": (
        lambda x: x.transpose(1, 2).reshape(B, -1, x.shape[1] * x.shape[3]),
        lambda x, n: x.reshape(B, -1, n, x.shape[2] // n).transpose(1, 2),
    ),
    "SBH": (
        lambda x: x.permute(2, 0, 1, 3).reshape(-1, B, x.shape[1] * x.shape[3]),
        lambda x, n: x.reshape(-1, B, n, x.shape[2] // n).permute(1, 2, 0, 3),
    ),
}
COMPRESSED = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def heads(queries: int = S, keys: int = S, kv_heads: int = N, dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(queries * 100 + keys + kv_heads)
    shapes = [(B, N, queries, D), (B, kv_heads, keys, D), (B, kv_heads, keys, D)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def sdpa(q, k, v, seen=None):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=SCALE, enable_gqa=True)


def band(queries: int, keys: int, before: int, after: int, offset: int) -> torch.Tensor:
    """Which keys are seen, one by one."""
    seen = torch.zeros(queries, keys, dtype=torch.bool)
    for i in range(queries):
        for j in range(keys):
            seen[i, j] = i + offset - before <= j <= i + offset + after
    return seen


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_heads", [N, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_and_shared_heads(layout, kv_heads, dtype):
    to_layout, from_layout = LAYOUTS[layout]

    def attend(q, k, v):
        return from_layout(npu_fusion_attention(*map(to_layout, (q, k, v)), N, layout, scale=SCALE)[0], N)

    assert_same_with_gradients(attend, sdpa, heads(keys=S + 2, kv_heads=kv_heads, dtype=dtype))


@pytest.mark.parametrize(
    ("queries", "keys", "options", "seen"),
    [
        (5, 5, {"sparse_mode": 2}, band(5, 5, 99, 0, 0)),
        (5, 7, {"sparse_mode": 2}, band(5, 7, 99, 0, 0)),
        (5, 7, {"sparse_mode": 3}, band(5, 7, 99, 0, 2)),
        (5, 7, {"sparse_mode": 4, "pre_tockens": 2, "next_tockens": 1}, band(5, 7, 2, 1, 2)),
    ],
)
def test_masks_by_position(queries, keys, options, seen):
    def attend(q, k, v):
        return npu_fusion_attention(q, k, v, N, "BNSD", atten_mask=COMPRESSED, scale=SCALE, **options)[0]

    assert_same_with_gradients(attend, lambda q, k, v: sdpa(q, k, v, seen), heads(queries, keys))


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("shape", [(S, S), (1, 1, S, S), (B, 1, S, S), (B, N, S, S)])
def test_masks_as_given(mode, shape):
    hidden = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4
    hidden[..., 0] = False

    def attend(q, k, v):
        mask = hidden.to(torch.uint8)
        return npu_fusion_attention(q, k, v, N, "BNSD", atten_mask=mask, scale=SCALE, sparse_mode=mode)[0]

    assert_same_with_gradients(attend, lambda q, k, v: sdpa(q, k, v, ~hidden), heads())


def test_a_given_mask_and_a_band():
    hidden = torch.zeros(S, S, dtype=torch.bool)
    q, k, v = heads()
    result = npu_fusion_attention(
        q, k, v, N, "BNSD", atten_mask=hidden, scale=SCALE, pre_tockens=1, next_tockens=0
    )[0]
    torch.testing.assert_close(result, sdpa(q, k, v, band(S, S, 1, 0, 0)))


def test_without_a_mask_every_key_is_seen():
    q, k, v = heads()
    for mode in range(5):
        result = npu_fusion_attention(q, k, v, N, "BNSD", scale=SCALE, sparse_mode=mode, next_tockens=0)[0]
        torch.testing.assert_close(result, sdpa(q, k, v))


def test_position_scores_are_added_before_scaling():
    pse = torch.randn(1, N, S, S, generator=torch.Generator().manual_seed(2))

    def attend(q, k, v, pse):
        return npu_fusion_attention(q, k, v, N, "BNSD", pse=pse, scale=SCALE)[0]

    assert_same_with_gradients(attend, lambda q, k, v, p: sdpa(q, k, v, SCALE * p), [*heads(), pse])


@pytest.mark.parametrize("mode", [None, 2, 3])
def test_packed_sequences_attend_to_themselves(mode):
    lengths = [(3, 3), (0, 0), (4, 6), (1, 1)]
    q_ends, k_ends = (torch.tensor(ends).cumsum(0).tolist() for ends in zip(*lengths, strict=True))
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(q_ends[-1] + 2, N, D, generator=generator)  # two rows of no sequence
    k, v = (torch.randn(k_ends[-1] + 2, 2, D, generator=generator) for _ in range(2))

    def attend(q, k, v):
        mask = {} if mode is None else {"atten_mask": COMPRESSED, "sparse_mode": mode}
        ends = {"actual_seq_qlen": [*q_ends, 0], "actual_seq_kvlen": [*k_ends, 0]}
        return npu_fusion_attention(q, k, v, N, "TND", scale=SCALE, **mask, **ends)[0]

    def exact(q, k, v):
        parts, i, j = [], 0, 0
        for queries, keys in lengths:
            one = (x.transpose(0, 1)[None] for x in (q[i : i + queries], k[j : j + keys], v[j : j + keys]))
            offset = keys - queries if mode == 3 else 0
            seen = None if mode is None else band(queries, keys, 99, 0, offset)
            if queries:
                parts.append(sdpa(*one, seen)[0].transpose(0, 1))
            i, j = i + queries, j + keys
        return torch.cat([*parts, torch.zeros(2, N, D, dtype=q.dtype)])

    assert_same_with_gradients(attend, exact, [q, k, v])


def test_statistics_of_the_softmax():
    q, k, v = heads()
    out, largest, total, empty, *random_state = npu_fusion_attention(q, k, v, N, "BNSD", scale=SCALE)
    scores = q @ k.mT * SCALE
    assert largest.shape == total.shape == (B, N, S, 8) and largest.dtype == torch.float32
    torch.testing.assert_close(largest, scores.amax(-1, keepdim=True).expand(-1, -1, -1, 8))
    log_sum = (largest + total.log())[..., 0]
    torch.testing.assert_close(log_sum, scores.logsumexp(-1))
    assert empty.numel() == 0 and random_state == [0, 0, 0] and out.is_contiguous()


def test_a_query_that_sees_nothing_gives_zero():
    hidden = torch.zeros(S, S, dtype=torch.bool)
    hidden[2] = True
    q, k, v = (x.requires_grad_() for x in heads())
    out = npu_fusion_attention(q, k, v, N, "BNSD", atten_mask=hidden, sparse_mode=1)[0]
    out.sum().backward()
    assert out[:, :, 2].eq(0).all() and q.grad[:, :, 2].eq(0).all() and v.grad.isfinite().all()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"keep_prob": 0.9}, "keep_prob"),
        ({"padding_mask": COMPRESSED}, "padding_mask"),
        ({"prefix": [1]}, "prefix"),
        ({"sink": torch.zeros(N)}, "sink"),
        ({"sparse_mode": 5, "atten_mask": COMPRESSED}, "sparse_mode"),
        ({"pse": torch.zeros(1, N, 3, S)}, "compressed pse"),
    ],
)
def test_what_is_not_emulated_says_so(options, name):
    with pytest.raises(NotImplementedError, match=f"npu_fusion_attention with .*{name}"):
        npu_fusion_attention(*heads(), N, "BNSD", **options)


def test_arguments_that_cannot_be():
    with pytest.raises(ValueError, match=r"atten_mask \[5, 5\]; sparse_mode=2 takes .*2048"):
        npu_fusion_attention(*heads(), N, "BNSD", atten_mask=COMPRESSED[:S, :S], sparse_mode=2)
    with pytest.raises(ValueError, match="input_layout='NBSD'"):
        npu_fusion_attention(*heads(), N, "NBSD")
    with pytest.raises(ValueError, match="TND needs actual_seq_qlen"):
        npu_fusion_attention(*(x[0] for x in heads()), N, "TND")
    with pytest.raises(ValueError, match="4 heads of query over 3 of key"):
        npu_fusion_attention(*heads(kv_heads=3), N, "BNSD")
