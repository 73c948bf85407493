"""Conversion under torchtitan's names: a config, made from a recipe's name, is applied to a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from torch import nn

from mindspeed_lowp.layers.convert import (
    Conversion,
    ConversionError,
    convert_layers_of,
    is_grouped,
    nothing_converted,
)
from mindspeed_lowp.recipes import Recipe, get_recipe

if TYPE_CHECKING:
    from typing_extensions import Self

Filter = Callable[[nn.Module, str], bool]


@dataclass(frozen=True)
class _Config:
    recipe_name: str = "mxfp8"

    def __post_init__(self) -> None:
        get_recipe(self.recipe_name)

    @classmethod
    def from_recipe_name(cls, recipe_name: str | Enum) -> Self:
        """The config for a recipe's name, or for an enumeration's member that has it as its value."""
        return cls(recipe_name.value if isinstance(recipe_name, Enum) else recipe_name)


class MXLinearConfig(_Config):
    """What `linear_quantize_` makes of linear layers.

    recipe_name: "mxfp8", "mxfp8-32x32", "hif8", "tensorwise", "blockwise", "delayed", or one that was
        registered (`mindspeed_lowp.recipes.recipe_names()` lists all); the recipe's options keep their
        defaults.

    Raises ValueError for another name.
    """


class MoETrainingConfig(_Config):
    """What `grouped_quantize_` makes of experts' grouped linears.

    recipe_name: as in `MXLinearConfig`.
    """


def linear_quantize_(model: nn.Module, config: MXLinearConfig, filter_fn: Filter | None = None) -> Conversion:
    """Convert the model's linears, in place; filter_fn(module, name) says which, every one without it.

    Raises TypeError for a config of another kind, and ConversionError when no layer was converted.
    """
    _check_config("linear_quantize_", config, MXLinearConfig)
    return _quantize(model, config, filter_fn, lambda module: not is_grouped(module))


def grouped_quantize_(
    model: nn.Module, config: MoETrainingConfig, filter_fn: Filter | None = None
) -> Conversion:
    """The same for the grouped linears of experts."""
    _check_config("grouped_quantize_", config, MoETrainingConfig)
    return _quantize(model, config, filter_fn, is_grouped)


def _quantize(
    model: nn.Module, config: _Config, filter_fn: Filter | None, is_meant: Callable[[nn.Module], bool]
) -> Conversion:
    recipe = get_recipe(config.recipe_name)

    def choose(name: str, module: nn.Module) -> Recipe | None:
        return recipe if filter_fn is None or filter_fn(module, name) else None

    def check(conversion: Conversion) -> None:
        if not conversion.converted:
            raise ConversionError(nothing_converted(conversion))

    return convert_layers_of(model, choose, check, is_meant)


def _check_config(caller: str, config: object, expected: type[_Config]) -> None:
    if not isinstance(config, expected):
        raise TypeError(
            f"{caller}: config is a {type(config).__name__}; give {expected.__name__}.from_recipe_name(...)"
        )
