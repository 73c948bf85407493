"""Delayed scaling in Megatron's training loop: when a step ends, and what a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_lowp.recipes import DelayedRecipe, Recipe
from mindspeed_lowp.recipes.delayed import advance

_KEY = "lowp_amax_history"


def delayed_recipes(chunks: Sequence[nn.Module]) -> Iterator[DelayedRecipe]:
    """The recipes, each with its history, of this rank's layers in the order of the model."""
    for chunk in chunks:
        for module in chunk.modules():
            recipe = _delayed_recipe(getattr(module, "recipe", None))
            if recipe is not None:
                yield recipe


def _delayed_recipe(recipe: object) -> DelayedRecipe | None:
    """The recipe with a history that a layer's recipe is or stands on."""
    scaling = recipe.scaling if isinstance(recipe, Recipe) else None
    return scaling if isinstance(scaling, DelayedRecipe) else None


def begin_step(chunks: Sequence[nn.Module]) -> None:
    """Forget what was seen outside of training steps, in evaluation: a checkpoint would not keep it."""
    for recipe in delayed_recipes(chunks):
        recipe.history.current.zero_()


def end_step(chunks: Sequence[nn.Module], amax_group: dist.ProcessGroup | None) -> None:
    """Let the magnitudes of this step, the largest over `amax_group`, decide the scales of the next ones."""
    advance(list(delayed_recipes(chunks)), amax_group)


class KeepsHistory:
    """A layer whose checkpoint has the history of its recipe, if it has one, as extra state."""

    recipe: object

    def get_extra_state(self) -> dict[str, torch.Tensor] | None:
        recipe = _delayed_recipe(self.recipe)
        return None if recipe is None else {_KEY: recipe.history.past.cpu()}

    def set_extra_state(self, state: object) -> None:
        """Anybody else's state, Transformer Engine's or none, means nothing here: history starts anew."""
        recipe = _delayed_recipe(self.recipe)
        if recipe is not None and isinstance(state, dict) and _KEY in state:
            recipe.history.restore(state[_KEY])
