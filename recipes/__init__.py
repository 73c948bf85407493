"""Recipes by the name that `--fp8-recipe` takes."""

from __future__ import annotations

from mindspeed_lowp.recipes.base import Operand, Recipe, Role
from mindspeed_lowp.recipes.mxfp8 import MXFP8Recipe
from mindspeed_lowp.recipes.registry import (
    get_recipe,
    recipe_class,
    recipe_names,
    register_recipe,
    registered_recipes,
)

__all__ = [
    "MXFP8Recipe",
    "Operand",
    "Recipe",
    "Role",
    "get_recipe",
    "recipe_class",
    "recipe_names",
    "register_recipe",
    "registered_recipes",
]

for _recipe in (MXFP8Recipe,):
    register_recipe(_recipe)
