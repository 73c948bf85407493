"""A recipe's options out of the parsed arguments: each field of its dataclass names one that it takes."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from mindspeed_lowp.features.command_line import stop, typed
from mindspeed_lowp.features.layer_selection import asked_by, known_recipe
from mindspeed_lowp.recipes import (
    Recipe,
    format_hint,
    option_names,
    recipe_class,
    recipe_names,
    registered_recipes,
)


@dataclass(frozen=True)
class _Option:
    """A field that recipes may have, the flags it comes from, and its value by the parsed arguments."""

    field: str
    flags: tuple[str, ...]
    value: Callable[[Namespace], Any]


def defer_policy(args: Namespace) -> tuple[bool, str]:
    """Whether quantization for backward is deferred, and for which operands."""
    if getattr(args, "fp8_quant_fb_split", False):
        return True, "all"
    deferred = bool(getattr(args, "mxfp8_defer_backward_quant", False))
    return deferred, getattr(args, "mxfp8_defer_operands", None) or "weight"


_OPTIONS = (
    _Option(
        "defer_backward_quant",
        ("--mxfp8-defer-backward-quant", "--fp8-quant-fb-split"),
        lambda args: defer_policy(args)[0],
    ),
    _Option("defer_operands", ("--mxfp8-defer-operands",), lambda args: defer_policy(args)[1]),
    _Option("amax_history_len", ("--fp8-amax-history-len",), lambda args: args.fp8_amax_history_len),
    _Option("amax_compute_algo", ("--fp8-amax-compute-algo",), lambda args: args.fp8_amax_compute_algo),
    _Option("margin", ("--fp8-margin",), lambda args: args.fp8_margin),
)


def recipe_from_args(name: str, args: Namespace) -> Recipe:
    """The recipe called `name` with the options that were typed; stops the run where they do not fit."""
    cls = known_recipe(name, args)
    values = {option.field: option.value(args) for option in _OPTIONS if option.field in option_names(cls)}
    try:
        return cls(fp8_format=_format(cls, args), **values)
    except ValueError as error:
        flags = {f"{option.field}=": f"{option.flags[0]} " for option in _OPTIONS}
        field, equals, rest = str(error).partition("=")
        stop(f"{flags.get(field + equals, f'--fp8-recipe {name}: {field}{equals}')}{rest}")


def check_options(names: Sequence[str], args: Namespace) -> None:
    """Stop the run where a typed flag belongs to a recipe that is not among those called `names`."""
    for option in _OPTIONS:
        flag = typed(*option.flags)
        if flag and not any(takes(name, option.field) for name in names):
            owners = [cls.name for cls in registered_recipes() if option.field in option_names(cls)]
            remedy = f"it belongs to the recipe {owners[0]}; leave it out" if owners else "leave it out"
            stop(f"{flag} cannot be used with {asked_by(args)}: {remedy}")


def check_format(names: Sequence[str], args: Namespace) -> None:
    """Stop the run where the typed --fp8-format is one of none of the recipes called `names`."""
    recipes = [recipe_class(name) for name in names]
    if typed("--fp8-format") and not any(args.fp8 in recipe.formats for recipe in recipes):
        _stop_for_format(recipes[0], args)


def takes(name: str, field: str) -> bool:
    """Whether there is a recipe called `name`, and it has this option."""
    return name in recipe_names() and field in option_names(recipe_class(name))


def _format(cls: type[Recipe], args: Namespace) -> str:
    """The format for one recipe: where there are two, the typed format may be meant for the other."""
    if getattr(args, "lowp_config", None) and not typed("--fp8-format"):
        return cls.formats[0]  # args.fp8 is then that of the file's first recipe
    if args.fp8 in cls.formats:
        return args.fp8
    if typed("--fp8-format") and len(cls.formats) > 1:
        _stop_for_format(cls, args)
    return cls.formats[0]


def _stop_for_format(cls: type[Recipe], args: Namespace) -> NoReturn:
    written = typed("--fp8-recipe") or getattr(args, "lowp_config", None)
    origin = "" if written else " (Megatron's default)"
    able = [recipe.name for recipe in registered_recipes() if args.fp8 in recipe.formats]
    remedy = f"; for {args.fp8}, set --fp8-recipe {able[0]}" if able else format_hint(args.fp8, cls.formats)
    stop(f"--fp8-format {args.fp8}: the recipe {cls.name}{origin} takes {' or '.join(cls.formats)}{remedy}")
