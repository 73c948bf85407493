"""Which of Megatron's layers become which of ours: imported where Megatron's own are to be converted.

With `grouped_experts_patches`, which brings the grouped experts of this version of Megatron.
"""

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from mindspeed_lowp.layers.convert import register_holder, register_layer
from mindspeed_lowp.megatron.linear import LowpColumnParallelLinear, LowpRowParallelLinear
from mindspeed_lowp.megatron_versions import HAS_GROUPED_MLP

register_layer(ColumnParallelLinear, LowpColumnParallelLinear)
register_layer(RowParallelLinear, LowpRowParallelLinear)
if HAS_GROUPED_MLP:
    from megatron.core.transformer.moe.experts import GroupedMLP

    from mindspeed_lowp.megatron.grouped_mlp import GroupedProduct, bring_out_linears, grouped_experts_patches

    register_holder(GroupedMLP, bring_out_linears)
    register_layer(GroupedProduct, grouped=True)
else:
    from mindspeed_lowp.megatron.grouped_linear import (
        TEColumnParallelGroupedLinear,
        TERowParallelGroupedLinear,
    )
    from mindspeed_lowp.megatron.te_linear import (
        TEColumnParallelLinear,
        TELayerNormColumnParallelLinear,
        TELinear,
        TERowParallelLinear,
    )
    from mindspeed_lowp.megatron.transformer_engine import grouped_experts_patches

    for layer in (TELinear, TEColumnParallelLinear, TELayerNormColumnParallelLinear, TERowParallelLinear):
        register_layer(layer)
    register_layer(TEColumnParallelGroupedLinear, grouped=True)
    register_layer(TERowParallelGroupedLinear, grouped=True)

__all__ = ["grouped_experts_patches"]
