"""Sorting tokens by the expert they go to, and summing them up where they came from."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_lowp.emulator.missing import not_emulated


def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """Each token once for each of its experts, all sorted by expert; equal ones stay in order.

    tokens: [T, H]; indices: [T, k] or [T], the experts of each token.
    num_out_tokens: how many rows to keep (the first ones); negative, how many to drop; None or 0, all.
    -> the rows, and where they went: `permuted[sorted_indices[i]] == tokens[i // k]`, int32 [T * k].
    """
    _refuse_padding("npu_moe_token_permute", padded_mode)
    order = torch.argsort(indices.flatten(), stable=True)
    topk = indices.numel() // max(len(tokens), 1)
    permuted = tokens[(order // max(topk, 1))[: num_out_tokens or None]]
    return permuted, torch.argsort(order).to(torch.int32)


def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: torch.Size | None = None,
) -> Tensor:
    """The inverse: each token the sum of its rows, weighted by probs [T, k] where they are given.

    Rows that `npu_moe_token_permute` dropped count as 0. Summed in fp32.
    """
    _refuse_padding("npu_moe_token_unpermute", padded_mode)
    places = sorted_indices.long()
    missing = len(places) - len(permuted_tokens)
    if missing > 0:
        permuted_tokens = torch.cat(
            (permuted_tokens, permuted_tokens.new_zeros(missing, permuted_tokens.shape[1]))
        )
    rows = permuted_tokens[places].float()
    if probs is None:
        return rows.to(permuted_tokens.dtype)
    rows = rows.unflatten(0, probs.shape) * probs.float().unsqueeze(-1)
    return rows.sum(1).to(permuted_tokens.dtype)


def _refuse_padding(operator: str, padded_mode: bool) -> None:
    if padded_mode:
        not_emulated(f"torch_npu.{operator} with padded_mode=True")
