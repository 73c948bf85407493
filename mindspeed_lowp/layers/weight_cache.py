"""Quantizing a weight once for as long as it stays what it is: its operands, kept by the layer.

With gradient accumulation a weight serves several micro-batches before the optimizer changes it. A layer
with a `WeightCache` quantizes it when an axis is first needed, and takes that again until the weight changes.

That costs memory: the codes and scales of both axes, 2.06 bytes a parameter in MX formats (half of that where
one copy serves both axes), from the first use to the optimizer step. Without reuse, dual-axis quantization
keeps the axis of backward, 1.03 bytes, for each micro-batch between its forward and its backward; deferral
keeps nothing. So with one micro-batch under way reuse takes back what deferral frees, and more; with several,
as in a pipeline, it needs less than dual-axis quantization by itself.

A change is seen when the weight is another tensor, has another version or other memory. Not seen are writes
through `.data`, to a flat buffer that the weight is a view of, and by fused optimizers: `drop_reused_weights`
is for those. Every step of a torch optimizer calls it; whoever else writes so has to.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from mindspeed_lowp.layers.weight_grad import parameter_of
from mindspeed_lowp.recipes import Operand, Recipe

Quantize = Callable[[Sequence[int]], dict[int, Operand]]


class StaleWeightError(RuntimeError):
    """A reused quantized weight is not the weight's any more."""


class WeightCache:
    """The quantized operands of one layer's weight, or weights, by axis.

    It belongs to its layer and goes with it. A copy of the layer, by deepcopy or pickle, gets an empty one.

    name: the layer's, for messages.
    check: compare what is reused with a new quantization each time, and raise StaleWeightError where they
        differ.
    """

    def __init__(self, name: str = "", check: bool = False) -> None:
        self.name = name
        self.check = check
        self.drop()
        _caches.add(self)
        _watch_optimizers()

    def __reduce__(self) -> tuple:
        return WeightCache, (self.name, self.check)

    def drop(self) -> None:
        self._weights: tuple[_Stamp, ...] = ()
        self._recipe: Recipe | None = None
        self._operands: dict[int, Operand] = {}

    @torch.compiler.disable  # what is held is state that no graph may take for constant
    def operands(
        self, weights: Sequence[Tensor], recipe: Recipe, axes: Sequence[int], quantize: Quantize
    ) -> dict[int, Operand]:
        """What `quantize(axes)` gives for these weights by this recipe; called for axes not held only."""
        if torch.is_inference_mode_enabled() or any(weight.is_inference() for weight in weights):
            return quantize(axes)  # such tensors have no version, and may not take part in training
        if not self._is_of(weights, recipe):
            self.drop()
            self._weights, self._recipe = tuple(map(_Stamp, weights)), recipe
        held = tuple(axis for axis in axes if axis in self._operands)
        if held and self.check:
            self._compare(quantize(held))
        missing = tuple(axis for axis in axes if axis not in self._operands)
        if missing:
            whole = recipe.one_copy_serves_both_axes("weight")
            self._operands |= quantize((-1, -2) if whole else missing)
        return {axis: self._operands[axis] for axis in axes}

    @torch.compiler.disable
    def holds(self, weights: Sequence[Tensor], recipe: Recipe, axis: int) -> bool:
        """Whether this axis of these weights would be reused."""
        return axis in self._operands and self._is_of(weights, recipe)

    def is_of_any(self, ids: set[int]) -> bool:
        """Whether the operands are those of a weight with one of these ids."""
        return any(id(stamp.weight()) in ids for stamp in self._weights)

    @property
    def nbytes(self) -> int:
        """The bytes of everything held, each storage once."""
        storages = [tensor.untyped_storage() for operand in self._operands.values() for tensor in operand]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def _is_of(self, weights: Sequence[Tensor], recipe: Recipe) -> bool:
        return (
            recipe is self._recipe
            and len(weights) == len(self._weights)
            and all(stamp.is_of(weight) for stamp, weight in zip(self._weights, weights, strict=True))
        )

    def _compare(self, fresh: dict[int, Operand]) -> None:
        for axis, operand in fresh.items():
            for a, b in zip(operand, self._operands[axis], strict=True):
                if not torch.equal(_bytes(a), _bytes(b)):
                    raise StaleWeightError(
                        f"{self.name}: the weight is no longer what was quantized for reuse (axis {axis}): "
                        "something wrote to it unseen, through .data or its raw memory. Call "
                        "mindspeed_lowp.layers.drop_reused_weights() after such a write, or train without "
                        "--fp8-reuse-quantized-weight"
                    )


class _Stamp:
    """Which tensor a weight is and what can be seen of changes to it. It does not keep the weight alive.

    A view of a Parameter in another shape counts as that Parameter: it is made anew at each use.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weakref.ref(parameter_of(weight))
        self._version, self._address, self._shape = weight._version, weight.data_ptr(), weight.shape
        # An address may come back: memory that was freed is given to the next tensor.
        self._storage = StorageWeakRef(weight.untyped_storage())

    def is_of(self, weight: Tensor) -> bool:
        return (
            self.weight() is parameter_of(weight)
            and weight._version == self._version
            and weight.data_ptr() == self._address
            and weight.shape == self._shape
            and StorageWeakRef(weight.untyped_storage()) == self._storage
        )


_caches: weakref.WeakSet[WeightCache] = weakref.WeakSet()


def drop_reused_weights(weights: Iterable[Tensor] | None = None) -> None:
    """Forget what was quantized of these weights, or of all there are, because they may have changed."""
    ids = None if weights is None else set(map(id, weights))
    for cache in list(_caches):
        if ids is None or cache.is_of_any(ids):
            cache.drop()


@functools.cache
def _watch_optimizers() -> None:
    """From now on, a step of any torch optimizer drops everything: fused ones change no version counter."""
    register_optimizer_step_post_hook(lambda *_: drop_reused_weights())


def reuse_quantized_weights(model: nn.Module, check: bool = False) -> int:
    """Let each layer of `model` that has a recipe reuse its quantized weight until that changes.

    check: see `WeightCache`. Returns the number of layers. Raises TypeError for a layer that has a recipe,
    but no attribute `weight_cache`.
    """
    count = 0
    for name, module in model.named_modules():
        if isinstance(getattr(module, "recipe", None), Recipe):
            if not hasattr(module, "weight_cache"):
                raise TypeError(f"{name}: a {type(module).__name__} cannot reuse its quantized weight")
            module.weight_cache = WeightCache(name, check)
            count += 1
    return count


def reused_bytes(model: nn.Module | None = None) -> int:
    """The bytes of quantized weights held for reuse at this moment: by the layers of `model`, or by all."""
    if model is None:
        return sum(cache.nbytes for cache in list(_caches))
    caches = (getattr(module, "weight_cache", None) for module in model.modules())
    return sum(cache.nbytes for cache in caches if cache is not None)


def quantize_weights(
    cache: WeightCache | None,
    weights: Sequence[Tensor],
    recipe: Recipe,
    axes: Sequence[int],
    quantize: Quantize,
) -> dict[int, Operand]:
    """`quantize(axes)`, by way of the layer's cache if it has one."""
    return quantize(axes) if cache is None else cache.operands(weights, recipe, axes, quantize)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
