"""MindSpeed's grouped experts with a recipe of ours.

Transformer Engine's kind, in both of `--te-gmm-mode`, are linears: they multiply by `lowp_grouped_linear`.
The older `GroupedMLP` (`--moe-use-legacy-grouped-gemm`) asks a function for its matrix products, which is
wrapped: while one of ours runs, it gets what multiplies by that layer's recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from mindspeed.core.transformer.moe.grouped_matmul_util import BF16GMMFunction
from mindspeed.core.transformer.moe.moe_feature.adaptor import MindSpeedGmmExperts
from mindspeed.te.pytorch.module.grouped_linear import (
    MindSpeedTEColumnParallelGroupedLinear,
    MindSpeedTEGroupedLinearGMM,
    MindSpeedTERowParallelGroupedLinear,
)
from mindspeed.te.pytorch.module.performance_grouped_linear import (
    MindSpeedTEPerformanceColumnParallelGroupedLinear,
    MindSpeedTEPerformanceRowParallelGroupedLinear,
)
from torch import Tensor, nn

from mindspeed_lowp.layers import WeightCache, lowp_grouped_linear
from mindspeed_lowp.layers.convert import register_layer
from mindspeed_lowp.recipes import Recipe

Counts = Tensor | Sequence[int]


class _GroupedWithRecipe:
    """recipe: None multiplies in the parameters' precision."""

    recipe: Recipe | None = None
    weight_cache: WeightCache | None = None

    def claim(self) -> None:
        """After the layer's class was changed to this one: it has no recipe yet."""


class _SeparateWeights(_GroupedWithRecipe):
    """`--te-gmm-mode compatible`: a Parameter [N, K] for each expert."""

    def forward(self, x: Tensor, m_splits: Counts) -> tuple[Tensor, None]:
        if self.recipe is None:
            transposed = [weight.T.contiguous() for weight in self.total_weight]
            counts = 1  # what m_splits are, to the operator: not cumulative
            return MindSpeedTEGroupedLinearGMM.apply(
                x, m_splits, counts, self.total_weight, *transposed
            ), None
        y = lowp_grouped_linear(x, self.total_weight, m_splits, self.recipe, weight_cache=self.weight_cache)
        return y, None


class _StackedWeights(_GroupedWithRecipe):
    """`--te-gmm-mode performance`: one Parameter for all experts."""

    def forward(self, x: Tensor, m_splits: Counts) -> tuple[Tensor, None]:
        hidden = self.config.hidden_size
        shape = (hidden, -1) if self.parallel_mode == "column" else (-1, hidden)
        weight = self.weight.view(self.num_gemms, *shape)  # [E, K, N]
        if self.recipe is None:
            return BF16GMMFunction.gmm_apply(x, weight, None, m_splits, self.weight), None
        fused = self.config.gemm_gradient_accumulation_fusion
        return _multiply(x, weight, m_splits, self.recipe, self.weight_cache, fused), None


class LowpTEColumnParallelGroupedLinear(_SeparateWeights, MindSpeedTEColumnParallelGroupedLinear):
    pass


class LowpTERowParallelGroupedLinear(_SeparateWeights, MindSpeedTERowParallelGroupedLinear):
    pass


class LowpTEPerformanceColumnParallelGroupedLinear(
    _StackedWeights, MindSpeedTEPerformanceColumnParallelGroupedLinear
):
    pass


class LowpTEPerformanceRowParallelGroupedLinear(
    _StackedWeights, MindSpeedTEPerformanceRowParallelGroupedLinear
):
    pass


_running: ContextVar[LowpGmmExperts | None] = ContextVar("experts whose forward runs", default=None)


class LowpGmmExperts(_GroupedWithRecipe, MindSpeedGmmExperts):
    """Two products with a weight each, and so two caches."""

    _caches: tuple[WeightCache | None, WeightCache | None] = (None, None)

    @property
    def weight_cache(self) -> WeightCache | None:
        return self._caches[0]

    @weight_cache.setter
    def weight_cache(self, cache: WeightCache | None) -> None:
        second = None if cache is None else WeightCache(cache.name, cache.check)
        self._caches = (cache, second)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        token = _running.set(self)
        try:
            return super().forward(*args, **kwargs)
        finally:
            _running.reset(token)

    def gmm_apply(
        self, x: Tensor, weight: Tensor, bias: None, tokens_per_expert: Counts, weight_param: Tensor
    ) -> Tensor:
        """In place of MindSpeed's function of that name: weight [E, K, N] is a view of weight_param."""
        cache = self._caches[weight_param is self.weight2]
        fused = self.config.gemm_gradient_accumulation_fusion
        return _multiply(x, weight, tokens_per_expert, self.recipe, cache, fused)


def quant_func_wrapper(get_gmm_quant_func: Callable[[], Any]) -> Callable[[], Any]:
    """What multiplies for the layer that runs; None means high precision."""

    def get_function() -> Any:
        layer = _running.get()
        if layer is None:
            return get_gmm_quant_func()
        return None if layer.recipe is None else layer

    return get_function


#: Which class becomes which, and what is to wrap which name.
CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    MindSpeedTEColumnParallelGroupedLinear: LowpTEColumnParallelGroupedLinear,
    MindSpeedTERowParallelGroupedLinear: LowpTERowParallelGroupedLinear,
    MindSpeedTEPerformanceColumnParallelGroupedLinear: LowpTEPerformanceColumnParallelGroupedLinear,
    MindSpeedTEPerformanceRowParallelGroupedLinear: LowpTEPerformanceRowParallelGroupedLinear,
    MindSpeedGmmExperts: LowpGmmExperts,
}
for _original, _ours in CLASSES.items():
    register_layer(_original, _ours, grouped=True)
WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "mindspeed.core.transformer.moe.grouped_matmul_util.get_gmm_quant_func": quant_func_wrapper,
}


def _multiply(
    x: Tensor, weight: Tensor, counts: Counts, recipe: Recipe, cache: WeightCache | None, fused: bool
) -> Tensor:
    return lowp_grouped_linear(x, weight, counts, recipe, into_main_grad=fused, weight_cache=cache)
