"""Recipes by the name that `--fp8-recipe` takes."""

from __future__ import annotations

from mindspeed_lowp.recipes.base import NOT_DIVIDED, Divided, Operand, Recipe, Role, format_hint
from mindspeed_lowp.recipes.blockwise import BlockwiseRecipe
from mindspeed_lowp.recipes.delayed import DelayedRecipe
from mindspeed_lowp.recipes.mxfp8 import MXFP8Recipe
from mindspeed_lowp.recipes.mxfp8_32x32 import MXFP832x32Recipe
from mindspeed_lowp.recipes.registry import (
    get_recipe,
    option_names,
    recipe_class,
    recipe_names,
    register_recipe,
    registered_recipes,
)
from mindspeed_lowp.recipes.tensorwise import HiF8Recipe, TensorwiseRecipe

__all__ = [
    "NOT_DIVIDED",
    "BlockwiseRecipe",
    "DelayedRecipe",
    "Divided",
    "HiF8Recipe",
    "MXFP8Recipe",
    "MXFP832x32Recipe",
    "Operand",
    "Recipe",
    "Role",
    "TensorwiseRecipe",
    "format_hint",
    "get_recipe",
    "option_names",
    "recipe_class",
    "recipe_names",
    "register_recipe",
    "registered_recipes",
]

for _recipe in (
    MXFP8Recipe,
    MXFP832x32Recipe,
    HiF8Recipe,
    TensorwiseRecipe,
    BlockwiseRecipe,
    DelayedRecipe,
):
    register_recipe(_recipe)
