"""What Megatron expects from Transformer Engine, supplied without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP

from mindspeed_lowp.megatron.grouped_linear import TEColumnParallelGroupedLinear, TERowParallelGroupedLinear


def grouped_mlp_modules_wrapper(grouped_mlp_modules: Callable[..., Any]) -> Callable[..., Any]:
    """Let the local spec build grouped experts over our linears, where `--moe-grouped-gemm` asks for them.

    Megatron 0.17 has grouped experts over Transformer Engine's linears only, and its local spec, by
    `LocalSpecProvider.grouped_mlp_modules`, ignores the flag.
    """

    @wraps(grouped_mlp_modules)
    def wrapper(self: LocalSpecProvider, moe_use_grouped_gemm: bool) -> Any:
        if not moe_use_grouped_gemm:
            return grouped_mlp_modules(self, moe_use_grouped_gemm)
        submodules = GroupedMLPSubmodules(
            linear_fc1=TEColumnParallelGroupedLinear,
            linear_fc2=TERowParallelGroupedLinear,
            activation_func=self.activation_func(),
        )
        return partial(TEGroupedMLP, submodules=submodules)

    return wrapper
