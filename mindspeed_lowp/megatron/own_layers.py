"""Which of Megatron's layers become which of ours: imported where Megatron's own are to be converted."""

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from mindspeed_lowp.layers.convert import register_layer
from mindspeed_lowp.megatron.grouped_linear import TEColumnParallelGroupedLinear, TERowParallelGroupedLinear
from mindspeed_lowp.megatron.linear import LowpColumnParallelLinear, LowpRowParallelLinear
from mindspeed_lowp.megatron.te_linear import (
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TELinear,
    TERowParallelLinear,
)

register_layer(ColumnParallelLinear, LowpColumnParallelLinear)
register_layer(RowParallelLinear, LowpRowParallelLinear)
for layer in (TELinear, TEColumnParallelLinear, TELayerNormColumnParallelLinear, TERowParallelLinear):
    register_layer(layer)
register_layer(TEColumnParallelGroupedLinear, grouped=True)
register_layer(TERowParallelGroupedLinear, grouped=True)
