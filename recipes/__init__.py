"""Recipes by the name that `--fp8-recipe` takes."""

from __future__ import annotations

import difflib

from mindspeed_lowp.recipes.base import Operand, Recipe, Role
from mindspeed_lowp.recipes.mxfp8 import MXFP8Recipe

__all__ = ["RECIPES", "MXFP8Recipe", "Operand", "Recipe", "Role", "get_recipe"]

RECIPES: dict[str, type[Recipe]] = {recipe.name: recipe for recipe in (MXFP8Recipe,)}


def get_recipe(name: str, **options: object) -> Recipe:
    """The recipe called `name`, with its own options (see the recipe's class).

    Raises ValueError for an unknown name, and TypeError for an option the recipe does not have.

    >>> get_recipe("mxfp8", fp8_format="hybrid", defer_backward_quant=True).defers("weight")
    True
    """
    if name not in RECIPES:
        close = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"unknown recipe {name!r}{hint}; available: {', '.join(RECIPES)}")
    return RECIPES[name](**options)
