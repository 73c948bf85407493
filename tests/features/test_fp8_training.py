"""`--fp8-recipe` and its companions: accepted with effect, or refused by name."""

from argparse import ArgumentParser, Namespace
from types import SimpleNamespace

import pytest
import torch

from mindspeed_lowp.features import fp8_training

MXFP8 = "--fp8-format e4m3 --fp8-recipe mxfp8"


@pytest.mark.parametrize("precision", ["--bf16", "--fp16", ""])
@pytest.mark.parametrize("fp8_format", ["e4m3", "hybrid"])
def test_mxfp8_is_accepted(parse, fp8_format, precision):
    args = parse(f"--fp8-format {fp8_format} --fp8-recipe mxfp8 --lowp-filter-fqns output gate {precision}")
    assert (args.fp8, args.fp8_recipe) == (fp8_format, "mxfp8")
    assert args.lowp_filter_fqns == ["output", "gate"]


def test_high_precision_training_is_left_alone(parse):
    args = parse("--bf16")
    assert args.fp8 is None and args.lowp_filter_fqns is None and args.lowp_emulate is False


def test_misspelt_recipe(stops):
    message = stops("--fp8-format e4m3 --fp8-recipe mxpf8")
    assert message.startswith("error: --fp8-recipe mxpf8: no such recipe here")
    assert "did you mean --fp8-recipe mxfp8?" in message and "accepted: mxfp8" in message


def test_recipe_of_transformer_engine_alone(stops):
    message = stops("--fp8-format e4m3 --fp8-recipe custom")
    assert message.startswith("error: --fp8-recipe custom:") and "accepted: mxfp8" in message


def test_format_without_recipe_takes_megatrons_default(parse):
    assert parse("--fp8-format hybrid").fp8_recipe == "delayed"


@pytest.mark.parametrize("recipe", ["mxfp8", "delayed", "mxpf8"])
def test_recipe_without_format(stops, recipe):
    message = stops(f"--bf16 --fp8-recipe {recipe}")
    assert message.startswith(f"error: --fp8-recipe {recipe} has no effect without --fp8-format")
    assert "add --fp8-format e4m3" in message


@pytest.mark.parametrize(
    "flag",
    [
        "--lowp-filter-fqns router",
        "--lowp-emulate",
        "--fp8-margin 0",
        "--fp8-amax-history-len 1024",
        "--fp8-amax-compute-algo max",
        "--first-last-layers-bf16",
        "--num-layers-at-start-in-bf16 1",
        "--num-layers-at-end-in-bf16 1",
    ],
)
def test_companions_without_fp8(stops, flag):
    message = stops(f"--bf16 {flag}")
    assert message.startswith(f"error: {flag.split()[0]} has no effect without FP8 training")
    assert message.endswith("add --fp8-format e4m3 --fp8-recipe mxfp8")


@pytest.mark.parametrize("flag", ["--fp8-interval 2", "--no-fp8-wgrad", "--keep-fp8-transpose-cache"])
def test_flags_without_effect_in_any_training(stops, flag):
    message = stops(f"--bf16 {flag}")
    assert message == f"error: {flag.split()[0]} has no effect without FP8 training: leave it out"


@pytest.mark.parametrize(
    "flag",
    [
        "--fp8-margin 0",
        "--fp8-interval 1",
        "--fp8-amax-history-len 1024",
        "--fp8-amax-compute-algo=max",
        "--fp8-quantizer-factory a.b",
        "--no-fp8-wgrad",
        "--disable-fp8-wgrad",
        "--fp8-param-gather",
        "--reuse-grad-buf-for-mxfp8-param-ag",
        "--keep-fp8-transpose-cache",
        "--fp4-format e2m1",
        "--fp4-recipe nvfp4",
        "--moe-router-padding-for-fp8",
        "--te-precision-config-file x",
        "--use-torch-fsdp2",
        "--use-megatron-fsdp",
    ],
)
def test_flags_that_mxfp8_does_not_honour(stops, flag):
    message = stops(f"{MXFP8} --bf16 {flag}")
    assert message.startswith(
        f"error: {flag.replace('=', ' ').split()[0]} cannot be used with --fp8-recipe mxfp8"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--num-layers-at-end-in-bf16 1",
            "--num-layers-at-end-in-bf16 has no effect without --first-",
        ),
        (
            "--num-layers-at-start-in-bf16 0",
            "--num-layers-at-start-in-bf16 has no effect without --",
        ),
        (
            "--first-last-layers-bf16 --num-layers-at-start-in-bf16 5",
            "--num-layers-at-start-in-bf16 5: expected a number from 0 to --num-layers 4",
        ),
        (
            "--first-last-layers-bf16 --num-layers-at-end-in-bf16 -1",
            "--num-layers-at-end-in-bf16 -1: expected a number from 0 to --num-layers 4",
        ),
    ],
)
def test_first_and_last_blocks_that_cannot_be_kept(stops, flags, message):
    assert stops(f"{MXFP8} --bf16 --num-layers 4 {flags}").startswith(f"error: {message}")


def test_pre_parser_without_megatrons_options_is_accepted():
    parser = ArgumentParser()
    feature = fp8_training.FP8TrainingFeature()
    feature.register_args(parser)
    feature.register_args(parser)
    assert parser.parse_args(["--lowp-emulate"]).lowp_emulate
    assert feature.is_need_apply(Namespace(fp8_format="e4m3"))
    assert not feature.is_need_apply(Namespace())


def pretend_npu(monkeypatch, name):
    npu = SimpleNamespace(is_available=lambda: True, get_device_name=lambda: name)
    monkeypatch.setattr(torch, "npu", npu, raising=False)


def test_older_npu_is_refused_or_emulated(stops, parse, monkeypatch):
    pretend_npu(monkeypatch, "Ascend910B3")
    message = stops(f"{MXFP8} --bf16")
    assert message.startswith("error: --fp8-recipe mxfp8:")
    assert "[MXFP8/HiF8] is only supported on Ascend950 or higher architecture" in message
    assert "add --lowp-emulate" in message
    assert parse(f"{MXFP8} --bf16 --lowp-emulate").lowp_emulate


def test_emulation_is_refused_where_the_hardware_computes(stops, parse, monkeypatch):
    pretend_npu(monkeypatch, "Ascend950PR_9589")
    assert parse(f"{MXFP8} --bf16").fp8_recipe == "mxfp8"
    assert stops(f"{MXFP8} --bf16 --lowp-emulate").startswith(
        "error: --lowp-emulate: Ascend950PR_9589 computes"
    )
