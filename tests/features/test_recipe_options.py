"""A recipe's options come from the flags that its dataclass has fields for; any other flag is refused."""

import pytest

from mindspeed_lowp.features.layer_selection import select
from mindspeed_lowp.features.recipe_options import recipe_from_args

pytestmark = pytest.mark.usefixtures("other_recipes")

HISTORY = "--bf16 --fp8-format hybrid --fp8-recipe history"


def recipe_of(args):
    [name] = select(args).recipes
    return recipe_from_args(name, args)


def test_options_reach_the_recipe_that_has_them(parse):
    flags = "--fp8-amax-history-len 16 --fp8-amax-compute-algo max --fp8-margin 2"
    recipe = recipe_of(parse(f"{HISTORY} {flags}"))
    assert (recipe.fp8_format, recipe.amax_history_len, recipe.amax_compute_algo, recipe.margin) == (
        "hybrid",
        16,
        "max",
        2,
    )


def test_options_that_are_left_out_have_megatrons_defaults(parse):
    recipe = recipe_of(parse(HISTORY))
    assert (recipe.amax_history_len, recipe.amax_compute_algo, recipe.margin) == (1, "most_recent", 0)


def test_a_value_out_of_range_is_told_by_its_flag(stops):
    message = stops(f"{HISTORY} --fp8-amax-history-len 0")
    assert message == "error: --fp8-amax-history-len 0: expected at least 1"


@pytest.mark.parametrize(
    "flag", ["--fp8-amax-history-len 4", "--fp8-amax-compute-algo=max", "--fp8-margin 0"]
)
def test_options_of_another_recipe(stops, flag):
    message = stops(f"--bf16 --fp8-format e4m3 --fp8-recipe one-copy {flag}")
    name = flag.replace("=", " ").split()[0]
    assert message.startswith(
        f"error: {name} cannot be used with --fp8-recipe one-copy: it belongs to the re"
    )


def test_a_recipe_of_one_format_needs_no_format(parse):
    for flags in ("", "--fp8-format special"):
        args = parse(f"--bf16 --fp8-recipe one-format {flags}")
        assert args.fp8 == "special" and recipe_of(args).fp8_format == "special"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--fp8-format special --fp8-recipe mxfp8",
            "special: the recipe mxfp8 takes e4m3 or hybrid; for special",
        ),
        (
            "--fp8-format e4m3 --fp8-recipe one-format",
            "e4m3: the recipe one-format takes special; for e4m3, set ",
        ),
        (
            "--fp8-format e5m2 --fp8-recipe history",
            "e5m2: the recipe history takes e4m3 or hybrid; for E5M2 gradients, hybrid",
        ),
    ],
)
def test_a_format_that_the_recipe_does_not_have(stops, flags, message):
    assert stops(f"--bf16 {flags}").startswith(f"error: --fp8-format {message}")


@pytest.mark.parametrize("flag", ["--mxfp8-defer-backward-quant", "--fp8-quant-fb-split"])
def test_nothing_to_defer(stops, flag):
    start = f"error: {flag} works with the recipe mxfp8 only, not with "
    assert stops(f"{HISTORY} {flag}") == f"{start}history: set --fp8-recipe mxfp8"
    message = stops(f"--bf16 --fp8-format e4m3 --fp8-recipe one-copy {flag}")
    assert message.startswith(f"{start}one-copy: one copy of a weight serves both axes there")


@pytest.mark.parametrize("flags", ["--fp8-recipe hif8", "--fp8-format hif8 --fp8-recipe tensorwise"])
def test_two_ways_to_ask_for_hifloat8_are_one(parse, flags):
    recipe = recipe_of(parse(f"--bf16 {flags}"))
    assert (recipe.name, recipe.fp8_format) == ("hif8", "hif8")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--fp8-format hif8 --fp8-recipe mxfp8", "--fp8-format hif8: the recipe mxfp8 takes e4m3 or "),
        ("--fp8-format hif8", "--fp8-format hif8: the recipe delayed (Megatron's default) takes e4m3"),
        ("--fp8-format e4m3 --fp8-recipe hif8", "--fp8-format e4m3: the recipe hif8 takes hif8; for e4m3"),
        (
            "--fp8-format e4m3 --fp8-recipe delayed --first-last-layers-bf16",
            "--first-last-layers-bf16 cannot be used with the recipe delayed (--fp8-recipe delayed); ",
        ),
        (
            "--fp8-format e4m3 --fp8-recipe tensorwise --fp8-amax-history-len 4",
            "--fp8-amax-history-len cannot be used with --fp8-recipe tensorwise: it belongs to ",
        ),
        (
            "--fp8-format e4m3 --fp8-recipe mxfp8-32x32 --mxfp8-defer-backward-quant",
            "--mxfp8-defer-backward-quant works with the recipe mxfp8 only, not with mxfp8-32x32: one copy ",
        ),
        ("--fp8-format e4m3 --fp8-recipe hif9", "--fp8-recipe hif9: no such recipe here; did you mean "),
        ("--fp8-format e4m3 --fp8-recipe MXFP8", "--fp8-recipe MXFP8: no such recipe here; did you mean -"),
        (
            "--fp8-format e4m3 --fp8-recipe delayed --fp8-margin 2000",
            "--fp8-margin 2000: expected a whole number from -126 to 127",
        ),
    ],
)
def test_combinations_that_cannot_be(stops, flags, message):
    assert stops(f"--bf16 {flags}").startswith(f"error: {message}")
