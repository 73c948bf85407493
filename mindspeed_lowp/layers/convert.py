"""Give the layers of a built model their recipe, in place: the one way any layer gets converted.

A layer changes its class to one that multiplies as its recipe says, and stays the same object in all else:
its Parameters, its hooks, its place in the model. So optimizers, checkpoints and wrappers, whether made
before or after, see no difference. Which class becomes which is registered here, and by whoever brings more
layers.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from mindspeed_lowp.layers.checks import check_recipe
from mindspeed_lowp.layers.fast_path import call_linears
from mindspeed_lowp.layers.mx_linear import MXLinear
from mindspeed_lowp.recipes import NOT_DIVIDED, Recipe

# By exact class: a subclass of somebody else's has a forward of its own, and stays as it is.
_CONVERTED: dict[type[nn.Module], type[nn.Module]] = {}
_GROUPED: set[type[nn.Module]] = set()
_HOLDERS: dict[type[nn.Module], Callable[[nn.Module], None]] = {}


class ConversionError(ValueError):
    """No layer could be given the recipe, or a name matched none; the model is as it was."""


def register_layer(
    original: type[nn.Module], converted: type[nn.Module] | None = None, *, grouped: bool = False
) -> None:
    """From now on, layers of the class `original` are converted to `converted`, which adds only behaviour.

    A converted layer has an attribute `recipe`. converted may be left out where `original` has one itself.
    A tensor-parallel layer says by a method `divided_tensors() -> Divided` of which tensors it has a shard.
    grouped: it holds the linears of several experts.
    """
    converted = converted or original
    for layer in (original, converted):  # converting twice is converting once
        _CONVERTED[layer] = converted
        if grouped:
            _GROUPED.add(layer)


def register_holder(holder: type[nn.Module], bring_out: Callable[[nn.Module], None]) -> None:
    """From now on, modules of the class `holder`, which multiply by several weights of their own, are found.

    bring_out: changes such a module to one that computes the same through layers, its children.
    """
    _HOLDERS[holder] = bring_out


register_layer(nn.Linear, MXLinear)


def is_layer(module: nn.Module) -> bool:
    """Whether the module is a linear or a grouped linear, be it one that can be converted or a relative."""
    return isinstance(module, tuple(_CONVERTED))


def is_grouped(module: nn.Module) -> bool:
    return isinstance(module, tuple(_GROUPED))


def is_expert(module: nn.Module) -> bool:
    """Whether the layer belongs to an expert: a grouped one does, Megatron's linears say so of themselves."""
    return is_grouped(module) or bool(getattr(module, "is_expert", False))


@dataclass(frozen=True)
class Choice:
    """Which layers get `recipe`, by their fully qualified names: substrings, and case matters.

    recipe: None leaves all of them in high precision.
    fqns: only layers whose name contains one of these; all of them where there is none.
    filter_fqns: no layer whose name contains one of these.
    """

    recipe: Recipe | None
    fqns: Sequence[str] = ()
    filter_fqns: Sequence[str] = ()

    def recipe_for(self, name: str) -> Recipe | None:
        wanted = not self.fqns or any(part in name for part in self.fqns)
        return self.recipe if wanted and not any(part in name for part in self.filter_fqns) else None


@dataclass
class Conversion:
    """What happens to the layers of a model, by their fully qualified names.

    linears, grouped: converted; kept: left as they were, in high precision unless an earlier conversion gave
    them a recipe. experts: those of all three that are experts'.
    """

    linears: list[str] = field(default_factory=list)
    grouped: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    experts: list[str] = field(default_factory=list)

    @property
    def converted(self) -> list[str]:
        return self.linears + self.grouped

    @property
    def names(self) -> list[str]:
        return self.converted + self.kept

    @classmethod
    def union(cls, conversions: Iterable[Conversion]) -> Conversion:
        """Those of several ranks, or parts of a model, as one."""
        whole = cls()
        for conversion in conversions:
            for kind, names in vars(conversion).items():
                getattr(whole, kind).extend(names)
        return whole


def convert_layers(
    layers: Iterable[tuple[str, nn.Module]],
    choose: Callable[[str, nn.Module], Recipe | None],
    check: Callable[[Conversion], None],
) -> Conversion:
    """Convert each of `layers`, given with its name, to the recipe that `choose` has for it.

    check: gets what is going to happen before anything does, and raises where it must not.
    """
    plan, result = [], Conversion()
    for name, module in layers:
        recipe = choose(name, module) if _is_convertible(module) else None
        if recipe is None:
            result.kept.append(name)
        else:
            plan.append((module, recipe))
            (result.grouped if is_grouped(module) else result.linears).append(name)
        if is_expert(module):
            result.experts.append(name)
    check(result)
    for module, recipe in plan:
        _convert(module, recipe)
    return result


def _is_convertible(module: nn.Module) -> bool:
    # A forward of the instance's own (accelerate puts one there) would go on calling the old class's.
    return type(module) in _CONVERTED and "forward" not in vars(module)


def _convert(module: nn.Module, recipe: Recipe) -> None:
    module.__class__ = _CONVERTED[type(module)]
    if getattr(module, "recipe", None) != recipe:  # else it has that recipe already, and maybe state with it
        parts = module.divided_tensors() if hasattr(module, "divided_tensors") else NOT_DIVIDED
        module.recipe = recipe.for_layer(parts)


def by_name(linears: Choice, experts: Choice) -> Callable[[str, nn.Module], Recipe | None]:
    """For `convert_layers`: experts' layers by one choice, all others by another."""
    return lambda name, module: (experts if is_expert(module) else linears).recipe_for(name)


def named_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for module in list(model.modules()):
        if type(module) in _HOLDERS:
            _HOLDERS[type(module)](module)
    return ((name, module) for name, module in model.named_modules() if is_layer(module))


def convert_layers_of(
    model: nn.Module,
    choose: Callable[[str, nn.Module], Recipe | None],
    check: Callable[[Conversion], None],
    is_meant: Callable[[nn.Module], bool] = is_layer,
) -> Conversion:
    """`convert_layers` of any model: of those layers in it of which is_meant(layer) is true."""
    layers = ((name, module) for name, module in named_layers(model) if is_meant(module))
    conversion = convert_layers(layers, choose, check)
    call_linears(model)
    return conversion


def convert_model(
    model: nn.Module, recipe: Recipe, filter_fqns: Sequence[str] = (), fqns: Sequence[str] = ()
) -> Conversion:
    """Quantize the linear layers of any model as `recipe` says, in place; says what was done to which layer.

    nn.Linear becomes `MXLinear`; grouped linears of experts and Megatron's parallel linears (once
    `mindspeed_lowp.megatron.own_layers` is imported) get the recipe too. Subclasses with a forward of their
    own stay as they are. The Parameters stay the same objects, so optimizers, hooks and state_dict keys do as
    well, and converting twice is converting once. PyTorch's transformer encoders no longer fuse their linears
    in evaluation.

    filter_fqns: leave each layer as it is whose name, as in `model.named_modules()`, contains one of these;
        case matters. The last projection to the vocabulary is usually among them. With a second call the
        layers that the first one left can get another recipe.
    fqns: convert only the experts whose name contains one of these; all of them where there is none.

    Raises ConversionError, with the model as it was, when a name matches nothing or no layer is left, and
    TypeError for arguments of another kind.
    """
    check_recipe("convert_model", recipe)
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert_model: model is a {type(model).__name__}; give an nn.Module")
    for argument, value in {"filter_fqns": filter_fqns, "fqns": fqns}.items():
        if isinstance(value, str):
            raise TypeError(f"convert_model: {argument}={value!r} is a string; give a list: [{value!r}]")
        if not isinstance(value, Iterable) or not all(isinstance(part, str) for part in value):
            raise TypeError(f"convert_model: {argument}={value!r}; give a list of parts of layers' names")

    def check(conversion: Conversion) -> None:
        for argument, message in {
            "filter_fqns": unmatched(filter_fqns, conversion.names),
            "fqns": unmatched(fqns, conversion.experts, kind="expert"),
        }.items():
            if message:
                raise ConversionError(f"convert_model: {argument}: {message}")
        if not conversion.converted:
            raise ConversionError(f"convert_model: {nothing_converted(conversion)}")

    linears = Choice(recipe, filter_fqns=filter_fqns)
    experts = Choice(recipe, fqns=fqns, filter_fqns=filter_fqns)
    return convert_layers_of(model, by_name(linears, experts), check)


def unmatched(wanted: Sequence[str], names: Collection[str], kind: str = "layer") -> str | None:
    """What to say of those of `wanted` that are in none of the layers' names; None where each is in one."""
    parts = {part for name in names for part in name.split(".") if not part.isdigit()}
    lines = []
    for missing in (part for part in wanted if not any(part in name for name in names)):
        near = difflib.get_close_matches(missing, sorted(parts.union(names)), n=3, cutoff=0.0)
        hint = f"the nearest: {', '.join(near)}" if names else f"the model has no {kind}s"
        lines.append(f"{missing!r} is in no {kind}'s name; {hint}")
    return "; ".join(lines) or None


def nothing_converted(conversion: Conversion) -> str:
    why = "all are kept in high precision" if conversion.kept else "there is no linear in it"
    return f"no layer of the model was converted: {why}"
