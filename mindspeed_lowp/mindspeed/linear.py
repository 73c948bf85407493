"""MindSpeed's parallel linears with a recipe of ours: the same modules, their matrix products ours.

A linear of MindSpeed multiplies in one of four autograd functions, which get the layer's `fp8_meta`. There
the layer's recipe is put, and the functions are wrapped: with a recipe they multiply as `lowp_linear` does,
without as before. Everything else (sharding, the layer norm and its recomputation, checkpoints) stays
MindSpeed's.

Results are those of MindSpeed's own recipes, to the last bit where the two do the same. So biases are added
to the rounded product, and gradients go into `main_grad` in fp32 where MindSpeed fuses that: with MX recipes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from mindspeed.te.pytorch.fp8.metadata import FP8Metadata
from mindspeed.te.pytorch.fp8.state_manager import FP8GlobalStateManager
from mindspeed.te.pytorch.module.layernorm_column_parallel_linear import (
    MindSpeedTELayerNormColumnParallelLinear,
)
from mindspeed.te.pytorch.module.linear import TEColumnParallelLinear, TERowParallelLinear
from torch import Tensor, nn

from mindspeed_lowp.layers import TensorParallel, WeightCache, WeightGrad, lowp_linear
from mindspeed_lowp.layers.convert import register_layer
from mindspeed_lowp.recipes import Recipe
from mindspeed_lowp.recipes.mx import MXRecipe


class LayerMetadata(FP8Metadata):
    """The `fp8_meta` of a layer that is ours.

    recipe: None multiplies in high precision, whatever the block around the layer says.
    fuses: whether MindSpeed adds weight gradients to `main_grad` itself.
    """

    recipe: Recipe | None = None
    weight_cache: WeightCache | None = None
    fuses: bool = False

    @property
    def fp8_enable(self) -> bool:
        return self.recipe is not None and FP8GlobalStateManager.is_fp8_enabled()

    def is_fp8_enable(self) -> bool:
        return self.fp8_enable


class WithRecipe:
    """A linear whose recipe and cache of quantized weights are where MindSpeed's functions find them."""

    fp8_meta: LayerMetadata

    @property
    def recipe(self) -> Recipe | None:
        return self.fp8_meta.recipe

    @recipe.setter
    def recipe(self, recipe: Recipe | None) -> None:
        self.fp8_meta.recipe = recipe

    @property
    def weight_cache(self) -> WeightCache | None:
        return self.fp8_meta.weight_cache

    @weight_cache.setter
    def weight_cache(self, cache: WeightCache | None) -> None:
        self.fp8_meta.weight_cache = cache

    def claim(self) -> None:
        """After the layer's class was changed to this one: it has no recipe yet."""
        self.fp8_meta.__class__ = LayerMetadata
        self.fp8_meta.fuses = self.config.gradient_accumulation_fusion

    def multiply_expert(self, x: Tensor, weight: Tensor) -> Tensor:
        """For experts under expert parallelism, which MindSpeed multiplies without fusing anything."""
        return lowp_linear(x, weight, None, self.recipe, weight_cache=self.weight_cache)


class LowpTEColumnParallelLinear(WithRecipe, TEColumnParallelLinear):
    def forward(self, input_: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if not (self.explicit_expert_comm and self.fp8_meta.fp8_enable):
            return super().forward(input_, weight)
        y = self.multiply_expert(input_, self.weight if weight is None else weight)
        return y, self.bias if self.skip_bias_add else None


class LowpTERowParallelLinear(WithRecipe, TERowParallelLinear):
    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        if not (self.explicit_expert_comm and self.fp8_meta.fp8_enable):
            return super().forward(input_)
        y = self.multiply_expert(input_, self.weight)
        if self.skip_bias_add:
            return y, self.bias
        return y if self.bias is None else y + self.bias, None


class LowpTELayerNormColumnParallelLinear(WithRecipe, MindSpeedTELayerNormColumnParallelLinear):
    """Its forward reaches the product through the functions alone."""


#: Which class becomes which.
CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    TEColumnParallelLinear: LowpTEColumnParallelLinear,
    TERowParallelLinear: LowpTERowParallelLinear,
    MindSpeedTELayerNormColumnParallelLinear: LowpTELayerNormColumnParallelLinear,
}
for _original, _ours in CLASSES.items():
    register_layer(_original, _ours)


class _Function:
    """What stands in place of one of the autograd functions: called by `apply`, as they are."""

    def __init__(self, original: Any, multiply: Callable[[Tensor, Tensor, LayerMetadata], Tensor]) -> None:
        self.original, self.multiply = original, multiply

    def apply(self, input_: Tensor, weight: Tensor, bias: Tensor | None, fp8_meta: FP8Metadata) -> Tensor:
        if not isinstance(fp8_meta, LayerMetadata) or not fp8_meta.is_fp8_enable():
            return self.original.apply(input_, weight, bias, fp8_meta)
        y = self.multiply(input_, weight, fp8_meta)
        return y if bias is None else y + bias


def column_wrapper(original: Any) -> _Function:
    """ColumnParallelNoSeq: the input gradient is summed over the tensor-parallel group."""

    def multiply(x: Tensor, weight: Tensor, meta: LayerMetadata) -> Tensor:
        parallel = TensorParallel(meta.tp_group, allreduce_dgrad=True) if meta.tp_world_size > 1 else None
        return _multiply(x, weight, meta, parallel)

    return _Function(original, multiply)


def column_sequence_wrapper(original: Any) -> _Function:
    """ColumnParallelSeq: x holds this rank's rows."""

    def multiply(x: Tensor, weight: Tensor, meta: LayerMetadata) -> Tensor:
        return _multiply(x, weight, meta, TensorParallel(meta.tp_group, sequence_parallel=True))

    return _Function(original, multiply)


def row_wrapper(original: Any) -> _Function:
    """RowParallelNoSeq: the product is summed over the tensor-parallel group."""

    def multiply(x: Tensor, weight: Tensor, meta: LayerMetadata) -> Tensor:
        y = _multiply(x, weight, meta)
        return reduce_from_tensor_model_parallel_region(y) if meta.tp_world_size > 1 else y

    return _Function(original, multiply)


def row_sequence_wrapper(original: Any) -> _Function:
    """RowParallelSeq: of the sum each rank gets its rows."""

    def multiply(x: Tensor, weight: Tensor, meta: LayerMetadata) -> Tensor:
        return reduce_scatter_to_sequence_parallel_region(_multiply(x, weight, meta))

    return _Function(original, multiply)


_FUNCTIONS = "mindspeed.te.pytorch.module.linear"
#: What is to wrap which name.
WRAPPERS: dict[str, Callable[[Any], Any]] = {
    f"{_FUNCTIONS}.ColumnParallelNoSeq": column_wrapper,
    f"{_FUNCTIONS}.ColumnParallelSeq": column_sequence_wrapper,
    f"{_FUNCTIONS}.RowParallelNoSeq": row_wrapper,
    f"{_FUNCTIONS}.RowParallelSeq": row_sequence_wrapper,
}


def _multiply(
    x: Tensor, weight: Tensor, meta: LayerMetadata, parallel: TensorParallel | None = None
) -> Tensor:
    fused = meta.fuses and isinstance(meta.recipe, MXRecipe) and hasattr(weight, "main_grad")
    return lowp_linear(
        x,
        weight,
        None,
        meta.recipe,
        parallel=parallel,
        weight_grad=WeightGrad(into_main_grad=fused),
        weight_cache=meta.weight_cache,
    )
