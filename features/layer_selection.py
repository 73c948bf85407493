"""Which layers get which recipe: `--lowp-config`, and the flags that choose layers by name.

What is typed wins over what the file says.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from typing import NamedTuple

from mindspeed_lowp.features.base import Feature
from mindspeed_lowp.features.command_line import add_option, nearest, stop, typed
from mindspeed_lowp.features.lowp_config import (
    GROUPED,
    LINEAR,
    NAMES_KEY,
    LowpConfig,
    Section,
    read_config,
)
from mindspeed_lowp.recipes import Recipe, recipe_class, recipe_names

TITLE = "low-precision training"

# Recipes that have a name of their own, and another as a format of a wider one.
_SAME = {("tensorwise", "hif8"): "hif8"}


@dataclass(frozen=True)
class Names:
    """Parts of layer names, and where the user wrote them.

    may_miss: they come from a torchtitan file, whose names need not be in a model of Megatron.
    """

    values: tuple[str, ...] = ()
    origin: str = ""
    may_miss: bool = False


@dataclass(frozen=True)
class Selection:
    """One kind of layers. recipe: its name; None leaves them in high precision."""

    recipe: str | None
    filter_fqns: Names
    fqns: Names


class Selections(NamedTuple):
    """linears, and those of experts; notes for the log: what a flag took from the file, and what is void."""

    linears: Selection
    experts: Selection
    notes: tuple[str, ...]

    @property
    def recipes(self) -> list[str]:
        return list(dict.fromkeys(kind.recipe for kind in (self.linears, self.experts) if kind.recipe))


class LayerSelectionFeature(Feature):
    """Options and checks only; with a file, or a recipe of one format, it turns FP8 training on."""

    def __init__(self) -> None:
        super().__init__("lowp-config")

    def is_need_apply(self, args: Namespace) -> bool:
        return False

    def register_args(self, parser: ArgumentParser) -> None:
        add_option(
            parser,
            TITLE,
            "--lowp-filter-fqns",
            nargs="+",
            action="extend",
            metavar="NAME",
            help="Keep in high precision each layer whose fully qualified name contains one of these names "
            "(case matters). The output layer and the router are kept so in any case.",
        )
        add_option(
            parser,
            TITLE,
            "--lowp-moe-fqns",
            nargs="+",
            action="extend",
            metavar="NAME",
            help="Of the experts, quantize only the layers whose fully qualified name contains one of these "
            "names (case matters).",
        )
        add_option(
            parser,
            TITLE,
            "--no-use-gmm-fp8",
            action="store_false",
            dest="use_gmm_fp8",
            help="Keep the experts in high precision.",
        )
        add_option(
            parser,
            TITLE,
            "--lowp-config",
            metavar="FILE",
            help="Read recipes and layer names from a TOML file with torchtitan's sections "
            f"[model] converters, [{LINEAR}] and [{GROUPED}]. Flags win over it.",
        )

    def pre_validate_args(self, args: Namespace) -> None:
        if getattr(args, "lowp_config", None):
            self._turn_on_from_file(args, read_config(args.lowp_config))
        elif not getattr(args, "fp8", None) and typed("--fp8-recipe"):
            self._turn_on_by_recipe(args)
        self._check_experts(args)

    def _turn_on_from_file(self, args: Namespace, config: LowpConfig) -> None:
        if not typed("--fp8-recipe"):
            args.fp8_recipe = (config.linear or config.grouped).recipe_name
        if not typed("--fp8-format"):
            args.fp8 = known_recipe(args.fp8_recipe, args).formats[0]

    def _turn_on_by_recipe(self, args: Namespace) -> None:
        """A recipe of a single format needs no --fp8-format."""
        if args.fp8_recipe in recipe_names():
            formats = known_recipe(args.fp8_recipe, args).formats
            if len(formats) == 1:
                args.fp8 = formats[0]

    def _check_experts(self, args: Namespace) -> None:
        names = getattr(args, "lowp_moe_fqns", None)
        off = not getattr(args, "use_gmm_fp8", True)
        if names and off:
            stop("--lowp-moe-fqns names experts to quantize, --no-use-gmm-fp8 wants none: leave one out")
        flag = "--lowp-moe-fqns" if names else "--no-use-gmm-fp8"
        if (names or off) and not getattr(args, "num_experts", None):
            stop(f"{flag} has no effect on a model without experts: add --num-experts, or leave it out")


def select(args: Namespace) -> Selections:
    """What is typed and what stands in the file, as one. For runs in FP8."""
    path = getattr(args, "lowp_config", None)
    config = read_config(path) if path else _every_layer(args)
    notes = list(config.notes)

    def wins(flag: str, over: str) -> None:
        if path:
            notes.append(f"{flag} wins over {over} of {path}")

    linear, grouped = config.linear, config.grouped
    filters = getattr(args, "lowp_filter_fqns", None)
    expert_names = getattr(args, "lowp_moe_fqns", None)
    if grouped and not getattr(args, "use_gmm_fp8", True):
        wins("--no-use-gmm-fp8", f"[{GROUPED}]")
        grouped = None
    if path and grouped and not getattr(args, "num_experts", None):
        notes.append(f"{path}: [{GROUPED}] has no effect: the model has no experts")
    if grouped is None and expert_names:
        wins("--lowp-moe-fqns", "converters, which do without experts,")
        grouped = Section(recipe_name(args))

    def selection(name: str, section: Section | None, flag: str, given: list[str] | None) -> tuple:
        """The recipe of one kind of layers, and the names for it."""
        if section is None:
            return None, Names()
        recipe, key = section.recipe_name, NAMES_KEY[name]
        if typed("--fp8-recipe") and recipe != recipe_name(args):
            wins(f"--fp8-recipe {recipe_name(args)}", f'recipe_name = "{recipe}" in [{name}]')
            recipe = recipe_name(args)
        if given and section.names:
            wins(flag, f"{key} in [{name}]")
        names = Names(tuple(given), flag) if given else Names(section.names, f"{path}: [{name}] {key}", True)
        if not path or typed("--fp8-format"):  # else the format is that of another section, perhaps
            recipe = _SAME.get((recipe, args.fp8), recipe)
        return recipe, names

    linear_recipe, kept = selection(LINEAR, linear, "--lowp-filter-fqns", filters)
    expert_recipe, wanted = selection(GROUPED, grouped, "--lowp-moe-fqns", expert_names)
    if filters:
        kept = kept_experts = Names(tuple(filters), "--lowp-filter-fqns")
    else:
        kept_experts = Names()  # the file's filter is for linears only
    linears = Selection(linear_recipe, filter_fqns=kept, fqns=Names())
    experts = Selection(expert_recipe, filter_fqns=kept_experts, fqns=wanted)
    return Selections(linears, experts, tuple(notes))


def _every_layer(args: Namespace) -> LowpConfig:
    section = Section(recipe_name(args))
    return LowpConfig(section, section, ())


def asked_by(args: Namespace) -> str:
    """What the user wrote to get low precision."""
    if getattr(args, "lowp_config", None) and not typed("--fp8-recipe"):
        return f"--lowp-config {args.lowp_config}"
    return f"--fp8-recipe {recipe_name(args)}"


def recipe_name(args: Namespace) -> str:
    """The recipe that was asked for, which MindSpeed may have been told another name of."""
    return getattr(args, "lowp_recipe", None) or args.fp8_recipe


def known_recipe(name: str, args: Namespace) -> type[Recipe]:
    """The recipe's class; stops the run where there is none, in terms of the flag."""
    if name in recipe_names():
        try:
            return recipe_class(name)
        except ValueError as error:
            stop(f"--fp8-recipe {name}: {error}")
    accepted = ", ".join(recipe_names())
    if not typed("--fp8-recipe"):
        stop(
            f"--fp8-format {args.fp8} needs --fp8-recipe as well (the default, {name}, is not available "
            f"here): add --fp8-recipe mxfp8; accepted: {accepted}"
        )
    close = nearest(name.lower(), recipe_names(), count=1)
    hint = f"did you mean --fp8-recipe {close[0]}? " if close else ""
    stop(f"--fp8-recipe {name}: no such recipe here; {hint}accepted: {accepted}")
