"""Attention under Transformer Engine's name, without it: the arithmetic is that of Megatron's own."""

from __future__ import annotations

import math

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mindspeed_lowp.megatron.extra_state import ignore_extra_state


class TEDotProductAttention(DotProductAttention):
    """Megatron's `DotProductAttention`, whose keys and values may differ in width (multi-latent attention).

    k_channels, v_channels: the width of a head's keys and of its values; kv_channels where they are left out.
    cp_comm_type: names a communication of context parallelism, which there is none of.

    Raises ValueError for what only Transformer Engine's kernels can do: context parallelism, the largest
    logit, `num_splits`; in forward, packed sequences and a bias of the scores.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = "p2p",
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        _need_transformer_engine(
            {
                f"--context-parallel-size {config.context_parallel_size}": config.context_parallel_size > 1,
                "--qk-clip": config.qk_clip,
                "--log-max-attention-logit": config.log_max_attention_logit,
                "--batch-invariant-mode": config.batch_invariant_mode,
                "num_splits": num_splits is not None,
            }
        )
        if softmax_scale is None and k_channels is not None:
            softmax_scale = 1 / math.sqrt(k_channels)
        super().__init__(
            config,
            layer_number,
            attn_mask_type,
            attention_type,
            attention_dropout=attention_dropout,
            softmax_scale=softmax_scale,
            pg_collection=pg_collection,
        )
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
        ignore_extra_state(self)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        """Attend; heads and groups (of queries that share keys and values) are those of this rank.

        query: [sq, b, heads, k_channels]
        key: [sk, b, groups, k_channels]
        value: [sk, b, groups, v_channels]
        attention_mask: True where a query must not see a key; None for the mask of the attn_mask_type given
            at construction, which the one given here does not change.
        -> [sq, b, heads * v_channels]
        """
        _need_transformer_engine(
            {
                "packed sequences (--sft)": packed_seq_params is not None,
                "a bias of attention scores (--position-embedding-type relative)": attention_bias is not None,
                "num_splits": num_splits is not None,
            }
        )
        return super().forward(query, key, value, attention_mask)


def _need_transformer_engine(asked: dict[str, bool]) -> None:
    """Raise ValueError for the first thing that is asked for."""
    for what, is_asked in asked.items():
        if is_asked:
            raise ValueError(f"{what}: attention without Transformer Engine cannot do that; leave it out")
