"""Megatron's `GroupedMLP` (to version 0.16): experts over the operator of the package grouped_gemm.

It holds the weights of all experts as two parameters and multiplies by `grouped_gemm.ops.gmm`. Here its two
grouped linears become layers of their own, which can have a recipe, and the operator is supplied where
the package is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.transformer.moe.experts import GroupedMLP
from megatron.core.transformer.moe.grouped_gemm_util import grouped_gemm_is_available
from torch import Tensor, nn

from mindspeed_lowp.layers import WeightCache, lowp_grouped_linear
from mindspeed_lowp.megatron.delayed_scaling import KeepsHistory
from mindspeed_lowp.megatron.linear import divided
from mindspeed_lowp.recipes import Divided, Recipe, Role


def gmm(x: Tensor, weights: Tensor, tokens_per_expert: Tensor, trans_b: bool = False) -> Tensor:
    """Each expert's rows times its weight, in high precision: the signature of grouped_gemm's operator.

    x: [T, K], tokens sorted by expert; weights: [E, K, N], with trans_b [E, N, K];
    tokens_per_expert: E counts that sum to T. -> [T, N]
    """
    weights = weights.mT if trans_b else weights
    parts = x.split(tokens_per_expert.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


def grouped_experts_patches() -> dict[str, Any]:
    """What takes the place of grouped_gemm where it is missing, by dotted name."""
    util = "megatron.core.transformer.moe.grouped_gemm_util"
    if grouped_gemm_is_available():
        return {}
    ops = SimpleNamespace(gmm=gmm)
    return {f"{util}.grouped_gemm": SimpleNamespace(ops=ops), f"{util}.ops": ops}


class GroupedProduct(KeepsHistory, nn.Module):
    """One of the two grouped linears of a `GroupedMLP`, which holds the weights.

    tensors: those that are divided over the expert tensor-parallel group.
    recipe: None multiplies in the parameters' precision.
    """

    def __init__(self, *tensors: Role) -> None:
        super().__init__()
        self._divided = tensors
        self.recipe: Recipe | None = None
        self.weight_cache: WeightCache | None = None
        # Checkpoints of others have no such entry.
        self._register_load_state_dict_pre_hook(
            lambda state_dict, prefix, *_: state_dict.setdefault(f"{prefix}_extra_state")
        )

    def forward(
        self, x: Tensor, weights: Tensor, into_main_grad: bool, tokens_per_expert: Tensor | Sequence[int]
    ) -> Tensor:
        """x [T, K], weights [E, K, N], E counts that sum to T -> [T, N]

        into_main_grad: with a recipe, add the gradient to the `main_grad` of the Parameter that weights show.
        """
        if self.recipe is None:
            return gmm(x, weights, tokens_per_expert)
        return lowp_grouped_linear(
            x,
            weights,
            tokens_per_expert,
            self.recipe,
            into_main_grad=into_main_grad,
            weight_cache=self.weight_cache,
        )

    def divided_tensors(self) -> Divided:
        return divided(*self._divided, group=parallel_state.get_expert_tensor_parallel_group())


class LowpGroupedMLP(GroupedMLP):
    """GroupedMLP whose two grouped linears are layers, under the names that `TEGroupedMLP` gives them."""

    linear_fc1: GroupedProduct
    linear_fc2: GroupedProduct

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """The signature and arithmetic are Megatron's; without tokens, the weights get gradients of zero.

        [T, H] sorted by expert, E counts, the router's [T] -> [T, H], and no bias.
        """
        x, probs = permuted_local_hidden_states, permuted_probs.unsqueeze(-1)
        if self.config.moe_apply_probs_on_input:
            if self.config.moe_router_topk != 1:
                raise ValueError(
                    "--moe-apply-probs-on-input: a token goes to one expert then: add --moe-router-topk 1"
                )
            x, probs = (probs * x).to(x.dtype), torch.ones_like(probs)
        experts, hidden = self.num_local_experts, self.config.hidden_size
        w1, w2 = self.weight1.view(experts, hidden, -1), self.weight2.view(experts, -1, hidden)

        # Before data parallelism wraps the model there is no main_grad to add to.
        fused = self.config.gradient_accumulation_fusion and hasattr(self.weight1, "main_grad")

        fc1 = self.linear_fc1(x, w1, fused, tokens_per_expert)
        if not self.activation_recompute:
            activated = self.activation_func_with_probs(fc1, probs)
            return self.linear_fc2(activated, w2, fused, tokens_per_expert), None
        self.activation_checkpoint = CheckpointWithoutOutput()
        activated = self.activation_checkpoint.checkpoint(self.activation_func_with_probs, fc1, probs)
        fc2 = self.linear_fc2(activated, w2, fused, tokens_per_expert)
        self.activation_checkpoint.discard_output_and_register_recompute(fc2)
        return fc2, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """Megatron's entries; those of extra states, empty there, have the histories of the two linears."""
        result = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        for name, layer in self.named_children():
            result.pop(f"{prefix}{name}._extra_state")  # taken for a third weight
            for key, entry in result.items():
                if key.endswith(f".{name}._extra_state"):
                    entry.data = layer.get_extra_state()
        return result


def bring_out_linears(experts: GroupedMLP) -> None:
    """Give a GroupedMLP its two layers; it computes what it did."""
    experts.__class__ = LowpGroupedMLP
    experts.linear_fc1 = GroupedProduct("weight", "grad")
    experts.linear_fc2 = GroupedProduct("weight", "input")
    experts._register_load_state_dict_pre_hook(_join_extra_states)


def _join_extra_states(state_dict: dict, prefix: str, *_: object) -> None:
    """Sharded checkpoints have an extra state for each expert, alike: one is the layer's."""
    for name in ("linear_fc1", "linear_fc2"):
        keys = [
            key
            for key in state_dict
            if key.startswith(f"{prefix}expert") and key.endswith(f".{name}._extra_state")
        ]
        states = [state_dict.pop(key) for key in keys]
        if states:
            state_dict[f"{prefix}{name}._extra_state"] = states[0]
