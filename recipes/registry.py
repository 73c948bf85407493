"""Recipes by name: this package's own, those registered by code, those announced by installed packages."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from mindspeed_lowp.recipes.base import Recipe

# A package announces `name = "package.module:Class"` in it; the module is imported once the recipe is wanted.
ENTRY_POINT_GROUP = "mindspeed_lowp.recipes"

_registered: dict[str, type[Recipe]] = {}

AnyRecipe = TypeVar("AnyRecipe", bound=type[Recipe])


def register_recipe(recipe: AnyRecipe) -> AnyRecipe:
    """Make a recipe known by its `name`, to `get_recipe` and to `--fp8-recipe`; a decorator.

    recipe: a subclass of Recipe that is a frozen dataclass, with `name` and `formats`. Its fields are its
        options. A class of the same module and name takes the place of an earlier one.

    Raises TypeError for what is no such class, and ValueError for a name that another class has.
    """
    _check(recipe)
    known = _registered.get(recipe.name)
    if known is not None and _path(known) != _path(recipe):
        raise ValueError(f"two recipes are called {recipe.name!r}: {_path(known)} and {_path(recipe)}")
    _registered[recipe.name] = recipe
    return recipe


def recipe_names() -> list[str]:
    """Every name that `recipe_class` takes; no package is imported for it."""
    return list(dict.fromkeys([*_registered, *(point.name for point in _announced())]))


def registered_recipes() -> list[type[Recipe]]:
    """The classes known so far; announced ones that nobody has asked for are not among them."""
    return list(_registered.values())


def recipe_class(name: str) -> type[Recipe]:
    """The recipe called `name`.

    Raises ValueError for an unknown name, and for one whose entry point is broken or not the only one.
    """
    for point in _announced():
        if point.name == name:
            _register_announced(point)
    if name not in _registered:
        known = recipe_names()
        close = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"unknown recipe {name!r}{hint}; available: {', '.join(known)}")
    return _registered[name]


def get_recipe(name: str, **options: object) -> Recipe:
    """The recipe called `name`, with its own options (see the recipe's class).

    Raises ValueError for an unknown name and for a value that an option cannot have, and TypeError for an
    option that the recipe does not have.

    >>> get_recipe("mxfp8", fp8_format="hybrid", defer_backward_quant=True).defers("weight")
    True
    """
    if not isinstance(name, str):
        raise TypeError(f"get_recipe: name={name!r} is not a string; available: {', '.join(recipe_names())}")
    cls = recipe_class(name)
    accepted = option_names(cls)
    for option in options:
        if option not in accepted:
            close = difflib.get_close_matches(option, accepted, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise TypeError(f"the recipe {name} has no option {option}{hint}; it has: {', '.join(accepted)}")
    return cls(**options)


def option_names(recipe: type[Recipe]) -> list[str]:
    """The options of a recipe: the fields of its dataclass that can be given."""
    return [field.name for field in dataclasses.fields(recipe) if field.init]


@cache
def _announced() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=ENTRY_POINT_GROUP))


def _register_announced(point: EntryPoint) -> None:
    package = f" of the package {point.dist.name}" if point.dist is not None else ""
    try:
        recipe = point.load()
        register_recipe(recipe)
        if recipe.name != point.name:
            raise ValueError(f"{_path(recipe)} calls itself {recipe.name!r}; the two names must be the same")
    except Exception as error:
        raise ValueError(
            f"recipe {point.name!r}: the entry point `{point.name} = {point.value}`{package} (group "
            f"{ENTRY_POINT_GROUP}) cannot be used: {type(error).__name__}: {error}"
        ) from error


def _path(recipe: type[Recipe]) -> str:
    return f"{recipe.__module__}:{recipe.__qualname__}"


def _check(recipe: object) -> None:
    """Raise TypeError for what is not a class that `get_recipe` can make a recipe of."""
    if not (isinstance(recipe, type) and issubclass(recipe, Recipe)):
        raise TypeError(f"{recipe!r} is not a recipe: expected a subclass of mindspeed_lowp.recipes.Recipe")
    problem = None
    name, formats = getattr(recipe, "name", None), getattr(recipe, "formats", None)
    if inspect.isabstract(recipe):
        problem = f"it lacks {', '.join(sorted(recipe.__abstractmethods__))}"
    elif not dataclasses.is_dataclass(recipe):
        problem = "it is not a dataclass; write @dataclass(frozen=True), under @register_recipe"
    elif not isinstance(name, str) or not name or name.split() != [name]:
        problem = f"name = {name!r}; expected one word"
    elif not isinstance(formats, tuple) or not formats:
        problem = f"formats = {formats!r}; expected a tuple such as ('e4m3', 'hybrid')"
    if problem:
        raise TypeError(f"{_path(recipe)} cannot be registered as a recipe: {problem}")
