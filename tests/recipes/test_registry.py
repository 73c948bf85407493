"""Recipes from outside: registered by code, or announced by an installed package."""

import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest

from mindspeed_lowp import get_recipe, register_recipe
from mindspeed_lowp.recipes import MXFP8Recipe, Recipe, recipe_class, recipe_names, registry


@pytest.fixture(autouse=True)
def only_for_this_test(monkeypatch):
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    registry._announced.cache_clear()
    yield
    registry._announced.cache_clear()


def make(name="mine", base=MXFP8Recipe, **attributes):
    attributes = {"__module__": __name__, "__qualname__": "Mine", "name": name, **attributes}
    return dataclass(frozen=True)(type("Mine", (base,), attributes))


def test_a_registered_recipe_has_its_name_and_its_options():
    @register_recipe
    @dataclass(frozen=True)
    class Mine(MXFP8Recipe):
        name: ClassVar[str] = "mine"
        strength: int = 1

    recipe = get_recipe("mine", fp8_format="hybrid", strength=3)
    assert type(recipe) is Mine and (recipe.strength, recipe.fp8_format) == (3, "hybrid")
    assert recipe_names()[-1] == "mine" and "mxfp8" in recipe_names()
    with pytest.raises(ValueError, match="fp8_format='e5m2': mine takes one of e4m3, hybrid"):
        get_recipe("mine", fp8_format="e5m2")


def test_a_taken_name_tells_both_classes():
    with pytest.raises(
        ValueError, match=r"two recipes are called 'mxfp8': mindspeed_lowp\.recipes\.mxfp8:MX"
    ):
        register_recipe(make("mxfp8"))
    assert recipe_class("mxfp8") is MXFP8Recipe


def test_a_class_defined_again_takes_the_place_of_the_first():
    """As a cell of a notebook does that is run twice."""
    register_recipe(make())
    again = register_recipe(make())
    assert recipe_class("mine") is again


@dataclass(frozen=True)
class WithoutMethods(Recipe):
    name: ClassVar[str] = "without-methods"


class WithoutDataclass(Recipe):
    name = "without-dataclass"


WithoutDataclass.__abstractmethods__ = frozenset()


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (MXFP8Recipe(), r"MXFP8Recipe\(.*\) is not a recipe: expected a subclass of mindspeed_lowp.recipes"),
        (dict, "<class 'dict'> is not a recipe"),
        (WithoutMethods, "test_registry:WithoutMethods cannot be .*: it lacks grouped_matmul, grouped_wgrad"),
        (WithoutDataclass, r"it is not a dataclass; write @dataclass\(frozen=True\), under @register_recipe"),
        (make(""), "name = ''; expected one word"),
        (make("my recipe"), "name = 'my recipe'; expected one word"),
        (make(formats="e4m3"), r"formats = 'e4m3'; expected a tuple such as \('e4m3', 'hybrid'\)"),
    ],
)
def test_what_is_no_recipe_class_is_told_why(recipe, message):
    with pytest.raises(TypeError, match=message):
        register_recipe(recipe)


PACKAGE = """
from dataclasses import dataclass
from typing import ClassVar
from mindspeed_lowp.recipes import MXFP8Recipe

@dataclass(frozen=True)
class Announced(MXFP8Recipe):
    name: ClassVar[str] = "announced"

class Other(Announced):
    pass

something = 1
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install("name = module:Class", ...): a package `lowp-extra`, module `extra`, that announces these."""

    def install(*lines, package="lowp-extra"):
        (tmp_path / "extra.py").write_text(PACKAGE)
        info = tmp_path / f"{package.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("\n".join(["[mindspeed_lowp.recipes]", *lines]))

    monkeypatch.syspath_prepend(tmp_path)
    yield install
    sys.modules.pop("extra", None)


def test_an_announced_recipe_is_imported_when_it_is_asked_for(install):
    install("announced = extra:Announced")
    assert "announced" in recipe_names()
    get_recipe("mxfp8")
    assert "extra" not in sys.modules
    assert type(get_recipe("announced")).__module__ == "extra"
    assert type(get_recipe("announced")) is sys.modules["extra"].Announced
    assert recipe_names().count("announced") == 1


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("broken = no_such_module:X", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("broken = extra:Missing", "AttributeError: module 'extra' has no attribute 'Missing'"),
        ("broken = extra:something", "TypeError: 1 is not a recipe"),
        ("broken = extra:Announced", "ValueError: extra:Announced calls itself 'announced'"),
        ("mxfp8 = extra:Announced", "ValueError: extra:Announced calls itself 'announced'"),
    ],
)
def test_a_broken_entry_point_is_named_with_its_package(install, line, cause):
    install(line)
    name = line.split()[0]
    with pytest.raises(ValueError) as info:
        get_recipe(name)
    message = str(info.value)
    assert message.startswith(f"recipe '{name}': the entry point `{line}` of the package lowp-extra (group ")
    assert cause in message
    if name != "mxfp8":
        get_recipe("mxfp8")  # nothing is wrong with the others


def test_two_packages_that_announce_one_name_are_both_told(install):
    install("announced = extra:Announced")
    install("announced = extra:Other", package="lowp-other")
    with pytest.raises(ValueError, match="two recipes are called 'announced'") as info:
        get_recipe("announced")
    assert "extra:Announced" in str(info.value) and "extra:Other" in str(info.value)
    assert "of the package lowp-" in str(info.value)


def test_an_unknown_recipe_is_told_the_announced_ones(install):
    install("announced = extra:Announced")
    with pytest.raises(ValueError, match=r"unknown recipe 'anounced' \(did you mean 'announced'\?\)"):
        get_recipe("anounced")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "blockwise",
            {"defer_backward_quant": True},
            "the recipe blockwise has no option defer_backward_quant",
        ),
        ("blockwise", {"margin": 1}, "; it has: fp8_format$"),
        (
            "mxfp8",
            {"format": "e4m3"},
            r"no option format \(did you mean fp8_format\?\); it has: fp8_format, defer",
        ),
        ("delayed", {"history": 4}, "it has: fp8_format, amax_history_len, amax_compute_algo, margin$"),
        (None, {}, "name=None is not a string; available: mxfp8, "),
        (MXFP8Recipe, {}, "name=<class .*> is not a string"),
    ],
)
def test_an_option_that_a_recipe_does_not_have(name, options, message):
    with pytest.raises(TypeError, match=message):
        get_recipe(name, **options)
