"""What Megatron expects from Transformer Engine, supplied without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from megatron.core.extensions import transformer_engine_spec_provider
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, SequentialMLP, TEGroupedMLP

from mindspeed_lowp.megatron.grouped_linear import (
    TEColumnParallelGroupedLinear,
    TEGroupedLinear,
    TERowParallelGroupedLinear,
)
from mindspeed_lowp.megatron.te_attention import TEDotProductAttention
from mindspeed_lowp.megatron.te_linear import (
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TELinear,
    TERowParallelLinear,
)
from mindspeed_lowp.megatron.te_norm import TENorm

_EXTENSION = "megatron.core.extensions.transformer_engine"
_TRANSFORMER = "megatron.core.transformer"


class TESpecProvider(transformer_engine_spec_provider.TESpecProvider):
    """Megatron's choice of modules for `--transformer-impl transformer_engine`, all of them ours.

    The two that Megatron chooses by the version of Transformer Engine are chosen here as for a recent one.
    """

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        """The norm of layers, and of queries and keys."""
        return super().layer_norm(rms_norm, has_residual=has_residual)

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        """What builds the experts of a layer: grouped, or one after the other."""
        if moe_use_grouped_gemm:
            return _grouped_experts(self)
        submodules = MLPSubmodules(
            linear_fc1=self.column_parallel_linear(),
            linear_fc2=self.row_parallel_linear(),
            activation_func=self.activation_func(),
        )
        return partial(SequentialMLP, submodules=submodules)


def transformer_engine_patches() -> dict[str, Any]:
    """What takes the place of each name of Megatron's, by dotted name.

    Where Megatron finds no Transformer Engine, `megatron.core.extensions.transformer_engine` holds mocks, and
    some modules have None in place of what they import from it: those are named one by one.
    """
    modules = (
        TELinear,
        TEColumnParallelLinear,
        TELayerNormColumnParallelLinear,
        TERowParallelLinear,
        TEGroupedLinear,
        TEColumnParallelGroupedLinear,
        TERowParallelGroupedLinear,
        TENorm,
        TEDotProductAttention,
    )
    patches = {f"{_EXTENSION}.{module.__name__}": module for module in modules}
    patches[f"{_EXTENSION}_spec_provider.TESpecProvider"] = TESpecProvider
    left_out = {
        f"{_EXTENSION}_spec_provider": (TEColumnParallelGroupedLinear, TERowParallelGroupedLinear),
        "megatron.core.models.gpt.gpt_layer_specs": (TENorm, TESpecProvider),
        f"{_TRANSFORMER}.multi_token_prediction": (TESpecProvider,),
        f"{_TRANSFORMER}.multi_latent_attention": (
            TELinear,
            TEColumnParallelLinear,
            TELayerNormColumnParallelLinear,
        ),
        f"{_TRANSFORMER}.moe.moe_layer": (TELinear,),
    }
    for owner, wanted in left_out.items():
        patches |= {f"{owner}.{module.__name__}": module for module in wanted}
    patches[f"{_TRANSFORMER}.moe.moe_layer.HAVE_TE"] = True  # asked about TELinear only
    patches[f"{_TRANSFORMER}.transformer_block.LayerNormImpl"] = TENorm
    return patches


def grouped_experts_patches() -> dict[str, Any]:
    """What lets the local spec build grouped experts, by dotted name."""
    return {
        "megatron.core.models.backends.LocalSpecProvider.grouped_mlp_modules": grouped_mlp_modules_wrapper
    }


def grouped_mlp_modules_wrapper(grouped_mlp_modules: Callable[..., Any]) -> Callable[..., Any]:
    """Let the local spec build grouped experts over our linears, where `--moe-grouped-gemm` asks for them.

    Megatron 0.17 has grouped experts over Transformer Engine's linears only, and its local spec, by
    `LocalSpecProvider.grouped_mlp_modules`, ignores the flag.
    """

    @wraps(grouped_mlp_modules)
    def wrapper(self: LocalSpecProvider, moe_use_grouped_gemm: bool) -> Any:
        if not moe_use_grouped_gemm:
            return grouped_mlp_modules(self, moe_use_grouped_gemm)
        return _grouped_experts(self)

    return wrapper


def _grouped_experts(backend: BackendSpecProvider) -> Any:
    submodules = GroupedMLPSubmodules(
        linear_fc1=TEColumnParallelGroupedLinear,
        linear_fc2=TERowParallelGroupedLinear,
        activation_func=backend.activation_func(),
    )
    return partial(TEGroupedMLP, submodules=submodules)
