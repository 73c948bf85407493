"""Attention in one operator: `softmax(mask(scale * (pse + q kᵀ))) v`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mindspeed_lowp.emulator.missing import not_emulated

_ANY = 2147483647  # no limit on how far a query looks

# The side of the one triangle that stands for a causal mask of any size.
_COMPRESSED = 2048

# The modes whose mask follows from positions: from which corner queries and keys are counted.
_LEFT_UP, _RIGHT_DOWN, _BAND = 2, 3, 4


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = _ANY,
    next_tockens: int = _ANY,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """Attention of query over key and value, with gradients for all three (and pse).

    query: in `input_layout` BNSD, BSND, BSH, SBH, or TND (sequences of several lengths in a row, whose
        cumulative lengths are actual_seq_qlen and actual_seq_kvlen). key and value may have fewer heads, of
        which each serves as many of query's `head_num` in turn (GQA).
    pse: added to q kᵀ; broadcasts to [B, N, Sq, Skv].
    atten_mask: True (1) where a key is hidden. Without it every query sees every key, whatever sparse_mode.
    sparse_mode: 0, the mask as it is, and only keys from `pre_tockens` before to `next_tockens` after the
        query; 1, the mask as it is; 2, causal from the first query and key on; 3, causal up to the last
        ones; 4, such a band around them. With 2 to 4 atten_mask is the compressed one [2048, 2048].
    inner_precise, gen_mask_parallel, sync: how the NPU goes about it; no effect.
    -> the attention in query's layout and dtype; maximum and sum of each row's softmax, fp32 [B, N, Sq, 8] (8
        times the same; [T, N, 8] for TND); an empty tensor; and 0, 0, 0, the random state of no dropout.

    A query that sees no key gives 0. Raises NotImplementedError for dropout, sinks and the other modes.
    """
    _refuse(
        keep_prob=keep_prob != 1.0,
        padding_mask=padding_mask is not None,
        prefix=prefix is not None,
        sink=sink is not None,
        dropout_mask=dropout_mask is not None,
        sparse_mode=sparse_mode not in (0, 1, _LEFT_UP, _RIGHT_DOWN, _BAND) and atten_mask is not None,
        softmax_layout=softmax_layout not in ("", "TND"),
    )
    if atten_mask is not None and sparse_mode >= _LEFT_UP and atten_mask.shape[-2:] != (_COMPRESSED,) * 2:
        raise ValueError(
            f"npu_fusion_attention: atten_mask {list(atten_mask.shape)}; sparse_mode={sparse_mode} takes the "
            f"compressed one, [{_COMPRESSED}, {_COMPRESSED}], of any sequence length"
        )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = None
        if atten_mask is not None:
            hidden = _hidden(atten_mask, q.shape[-2], k.shape[-2], sparse_mode, pre_tockens, next_tockens)
        return _attend(q, k, v, hidden, pse, scale)

    if input_layout == "TND":
        lengths = (actual_seq_qlen, actual_seq_kvlen)
        out, largest, total = _attend_packed(query, key, value, lengths, attend)
    else:
        to_bnsd, from_bnsd, key_heads = _layout(input_layout, query, key, head_num)
        heads = (head_num, key_heads, key_heads)
        out, largest, total = attend(*map(to_bnsd, (query, key, value), heads))
        out = from_bnsd(out)
    out = out.to(query.dtype)
    statistics = (part.detach().expand(*part.shape[:-1], 8).contiguous() for part in (largest, total))
    return out, *statistics, query.new_empty(0), 0, 0, 0


def _refuse(**arguments: bool) -> None:
    for name, is_asked in arguments.items():
        if is_asked:
            not_emulated(f"torch_npu.npu_fusion_attention with this {name}")


def _layout(
    name: str, query: Tensor, key: Tensor, heads: int
) -> tuple[Callable[[Tensor, int], Tensor], Callable[[Tensor], Tensor], int]:
    """From a layout to BNSD given the heads, and back; and how many heads the key has.

    In BSH and SBH, H holds the heads one after another.
    """
    if name in ("BSH", "SBH"):
        key_heads = key.shape[-1] // (query.shape[-1] // heads)
        order = (0, 2, 1, 3) if name == "BSH" else (1, 2, 0, 3)
        back = (0, 2, 1, 3) if name == "BSH" else (2, 0, 1, 3)
        return (
            lambda x, heads: x.unflatten(-1, (heads, -1)).permute(order),
            lambda x: x.permute(back).flatten(2),
            key_heads,
        )
    if name == "BNSD":
        return (lambda x, heads: x), (lambda x: x), key.shape[1]
    if name == "BSND":
        return (lambda x, heads: x.transpose(1, 2)), (lambda x: x.transpose(1, 2)), key.shape[2]
    raise ValueError(
        f"npu_fusion_attention: input_layout={name!r}: expected one of BSH, SBH, BSND, BNSD, TND"
    )


def _attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: tuple[Sequence[int] | None, Sequence[int] | None],
    attend: Callable[..., tuple[Tensor, Tensor, Tensor]],
) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences one after another, [T, N, D]; each attends to itself. Trailing lengths of 0 are unused."""
    if lengths[0] is None or lengths[1] is None:
        raise ValueError("npu_fusion_attention: TND needs actual_seq_qlen and actual_seq_kvlen")
    parts, start_q, start_k = [], 0, 0
    for end_q, end_k in zip(*(map(int, ends) for ends in lengths), strict=True):
        if end_q > start_q:
            q, k, v = query[start_q:end_q], key[start_k:end_k], value[start_k:end_k]
            one = attend(*(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)))
            parts.append([part.squeeze(0).transpose(0, 1) for part in one])
        start_q, start_k = max(start_q, end_q), max(start_k, end_k)
    rest = len(query) - start_q
    joined = [torch.cat(sequences) for sequences in zip(*parts, strict=True)]
    return tuple(torch.cat((part, part.new_zeros(rest, *part.shape[1:]))) for part in joined)


def _hidden(mask: Tensor, queries: int, keys: int, mode: int, before: int, after: int) -> Tensor:
    """Which keys each query does not see, broadcasting to [B, N, Sq, Skv]."""
    if mode == 1:
        return mask.bool()
    query = torch.arange(queries, device=mask.device).unsqueeze(1)
    distance = torch.arange(keys, device=mask.device) - query  # how far a key is after the query
    if mode == _LEFT_UP:
        return distance > 0
    if mode == 0:
        return mask.bool() | (distance > after) | (distance < -before)
    distance = distance - (keys - queries)  # counted from the last ones
    return distance > 0 if mode == _RIGHT_DOWN else (distance > after) | (distance < -before)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, pse: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, N, Sq, D], k and v with as many heads or a divisor -> fp32 result and the softmax' statistics."""
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"npu_fusion_attention: {q.shape[1]} heads of query over {k.shape[1]} of key")
    shared = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(shared, 1) for x in (k, v))
    scores = q.float() @ k.transpose(-1, -2)
    if pse is not None:
        if pse.shape[-2] != q.shape[-2]:
            not_emulated("torch_npu.npu_fusion_attention with a compressed pse")
        scores = scores + pse.float()
    scores = scores * scale
    blind = None
    if hidden is not None:
        hidden = hidden.expand(scores.shape)
        blind = hidden.all(-1, keepdim=True)
        scores = scores.masked_fill(hidden, torch.finfo(torch.float32).min)
    largest = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - largest.detach())
    total = weights.sum(-1, keepdim=True)
    weights = weights / total
    if blind is not None:
        weights = weights.masked_fill(blind, 0.0)
    return weights @ v, largest, total
