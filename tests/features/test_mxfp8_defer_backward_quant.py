"""Deferral: every refusal names the flag that was typed and says what to set."""

from argparse import ArgumentParser, Namespace

import pytest

from mindspeed_lowp.features.mxfp8_defer_backward_quant import MXFP8DeferBackwardQuantFeature, defer_policy

MXFP8 = "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8"
BOTH_NAMES = pytest.mark.parametrize("flag", ["--mxfp8-defer-backward-quant", "--fp8-quant-fb-split"])


@pytest.mark.parametrize(
    ("flags", "policy"),
    [
        ("", (False, "weight")),
        ("--mxfp8-defer-backward-quant", (True, "weight")),
        ("--mxfp8-defer-backward-quant --mxfp8-defer-operands weight", (True, "weight")),
        ("--mxfp8-defer-backward-quant --mxfp8-defer-operands all", (True, "all")),
        ("--fp8-quant-fb-split", (True, "all")),
        ("--fp8-quant-fb-split --mxfp8-defer-operands all", (True, "all")),
        ("--fp8-quant-fb-split --mxfp8-defer-backward-quant", (True, "all")),
    ],
)
def test_policy(parse, flags, policy):
    assert defer_policy(parse(f"{MXFP8} {flags}")) == policy


@BOTH_NAMES
@pytest.mark.parametrize("given", ["--bf16", "--bf16 --fp8-recipe mxfp8"])
def test_deferral_without_fp8(stops, flag, given):
    message = stops(f"{given} {flag}")
    assert message == f"error: {flag} needs FP8 training: add --fp8-format e4m3 --fp8-recipe mxfp8"


@BOTH_NAMES
@pytest.mark.parametrize(
    ("recipe", "remedy"),
    [
        (recipe, "one copy of a weight serves both axes there, nothing to defer; leave {flag} out")
        for recipe in ("mxfp8-32x32", "tensorwise", "blockwise", "delayed")
    ]
    + [("mxpf8", "set --fp8-recipe mxfp8")],
)
def test_deferral_with_another_recipe(stops, flag, recipe, remedy):
    message = stops(f"--bf16 --fp8-format e4m3 --fp8-recipe {recipe} {flag}")
    assert message == (
        f"error: {flag} works with the recipe mxfp8 only, not with {recipe}: {remedy.format(flag=flag)}"
    )


@pytest.mark.parametrize("given", ["--bf16", MXFP8])
@pytest.mark.parametrize("operands", ["weight", "all"])
def test_operands_without_deferral(stops, given, operands):
    message = stops(f"{given} --mxfp8-defer-operands {operands}")
    assert message.startswith(f"error: --mxfp8-defer-operands {operands} has no effect without ")
    assert "add --mxfp8-defer-backward-quant" in message
    assert "--fp8-quant-fb-split" not in message


def test_old_name_contradicts_weight(stops):
    message = stops(f"{MXFP8} --fp8-quant-fb-split --mxfp8-defer-operands weight")
    assert message.startswith("error: --fp8-quant-fb-split means --mxfp8-defer-operands all and contradicts")
    assert "type --mxfp8-defer-backward-quant" in message


def test_host_with_the_old_option_already():
    parser = ArgumentParser()
    parser.add_argument("--fp8-quant-fb-split", action="store_true")
    feature = MXFP8DeferBackwardQuantFeature()
    feature.register_args(parser)
    feature.register_args(parser)
    args = parser.parse_args(["--fp8-quant-fb-split"])
    assert defer_policy(args) == (True, "all")


def test_arguments_that_know_nothing_of_it():
    """MindSpeed validates configurations as well, which may lack any of the attributes."""
    MXFP8DeferBackwardQuantFeature().pre_validate_args(Namespace())
