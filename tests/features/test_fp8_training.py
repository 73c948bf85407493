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


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "delayed", "custom"])
def test_recipe_of_transformer_engine(stops, recipe):
    message = stops(f"--fp8-format e4m3 --fp8-recipe {recipe}")
    assert message.startswith(f"error: --fp8-recipe {recipe}:") and "accepted: mxfp8" in message


def test_format_without_recipe(stops):
    message = stops("--fp8-format hybrid")
    assert message.startswith("error: --fp8-format hybrid needs --fp8-recipe")
    assert "add --fp8-recipe mxfp8" in message


@pytest.mark.parametrize("recipe", ["mxfp8", "delayed", "mxpf8"])
def test_recipe_without_format(stops, recipe):
    message = stops(f"--bf16 --fp8-recipe {recipe}")
    assert message.startswith(f"error: --fp8-recipe {recipe} has no effect without --fp8-format")
    assert "add --fp8-format e4m3" in message


@pytest.mark.parametrize("flag", ["--lowp-filter-fqns router", "--lowp-emulate"])
def test_companions_without_fp8(stops, flag):
    message = stops(f"--bf16 {flag}")
    assert message.startswith(f"error: {flag.split()[0]} has no effect without FP8 training")
    assert "--fp8-format e4m3 --fp8-recipe mxfp8" in message


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


@pytest.mark.parametrize(
    ("flags", "blocks"),
    [
        ("", []),
        ("--first-last-layers-bf16", [0, 3]),
        ("--first-last-layers-bf16 --num-layers-at-start-in-bf16 2 --num-layers-at-end-in-bf16 0", [0, 1]),
        ("--first-last-layers-bf16 --num-layers-at-start-in-bf16 0 --num-layers-at-end-in-bf16 3", [1, 2, 3]),
    ],
)
def test_first_and_last_blocks_are_kept(parse, flags, blocks):
    args = parse(f"{MXFP8} --bf16 --num-layers 4 {flags}")
    assert list(fp8_training.blocks_in_high_precision(args)) == blocks


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


@pytest.fixture
def convert(monkeypatch):
    """Runs the patched get_model on a stand-in for the model; gives what reached `convert_chunks`."""
    from mindspeed_lowp import megatron
    from mindspeed_lowp.layers import Conversion

    def convert(flags="", outcome=None, **arguments):
        calls = []
        outcome = Conversion(linears=["a.mlp", "b.mlp"]) if outcome is None else outcome

        def convert_chunks(model, linears, experts, check, blocks):
            calls.append((model, linears, experts))
            check(outcome)
            return outcome

        defaults = {"fp8": "e4m3", "fp8_recipe": "mxfp8", "lowp_filter_fqns": None, "lowp_emulate": False}
        defaults["num_experts"] = None
        args = Namespace(**defaults | arguments)
        monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *flags.split()])
        monkeypatch.setattr(megatron, "convert_chunks", convert_chunks)
        monkeypatch.setattr("megatron.training.get_args", lambda: args)
        model = [torch.nn.Linear(1, 1)]
        get_model = fp8_training.convert_model_wrapper(lambda provider, wrap_with_ddp=True: model)
        assert get_model("provider", wrap_with_ddp=False) is model
        if not calls:
            return None
        (call,) = calls
        assert call[0] is model
        return call[1:]

    return convert


@pytest.mark.parametrize(
    ("flags", "defer", "operands"),
    [
        ({}, False, "weight"),
        ({"mxfp8_defer_backward_quant": True}, True, "weight"),
        ({"mxfp8_defer_backward_quant": True, "mxfp8_defer_operands": "all"}, True, "all"),
        ({"fp8_quant_fb_split": True}, True, "all"),
    ],
)
def test_recipe_follows_the_flags(convert, flags, defer, operands):
    linears, experts = convert(fp8="hybrid", lowp_filter_fqns=["mlp"], **flags)
    recipe = linears.recipe
    assert experts.recipe == recipe
    assert (recipe.name, recipe.fp8_format) == ("mxfp8", "hybrid")
    assert (recipe.defer_backward_quant, recipe.defer_operands) == (defer, operands)
    assert list(linears.filter_fqns) == list(experts.filter_fqns) == ["mlp"]


def test_mindspeeds_own_fp8_training_is_left_alone(convert, monkeypatch):
    monkeypatch.setattr(fp8_training, "MINDSPEED_IS_HOST", True)
    assert convert(fp8="hif8", fp8_recipe="tensorwise") is None  # neither is a recipe of ours
    with pytest.raises(SystemExit, match=r"error: --fp8-.*tensorwise.*accepted: mxfp8"):
        convert("--lowp-filter-fqns mlp", fp8_recipe="tensorwise", lowp_filter_fqns=["mlp"])


def test_a_run_without_fp8_is_left_alone(convert):
    assert convert(fp8=None) is None


def test_start_up_lines(convert, capsys):
    from mindspeed_lowp.layers import Conversion

    kept = [f"layer{index}" for index in range(9)]
    convert(outcome=Conversion(linears=["a", "b"], grouped=["c"], kept=kept), num_experts=4)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("mxfp8 is emulated on this device (cpu)")
    assert lines[1:] == [
        "MX training active with recipe mxfp8",
        "Swapped to MXLinear_NPU layers: 2",
        "mxfp8 MoE training enabled",
        "[MXFP8/HiF8 GMM] Replaced 1 NPU GMM methods/functions",
        f"Kept in high precision: every MoE router, {', '.join(kept[:8])}, ...",
    ]


def test_dense_model_says_nothing_of_experts(convert, capsys):
    convert()
    output = capsys.readouterr().out
    assert "GMM" not in output and "MoE training" not in output


@pytest.mark.parametrize(
    ("conversion", "filters", "message"),
    [
        ({"linears": ["mlp"]}, ["mpl"], "--lowp-filter-fqns: 'mpl' is in no layer's name; the nearest: mlp"),
        ({"kept": ["mlp"]}, ["mlp"], "--lowp-filter-fqns: no layer of the model was converted: all are kept"),
        ({}, None, "--fp8-recipe mxfp8: no layer of the model was converted: there is no linear in it"),
    ],
)
def test_failed_conversion_names_the_flag(convert, conversion, filters, message):
    from mindspeed_lowp.layers import Conversion

    flags = "--lowp-filter-fqns mlp" if filters else ""
    with pytest.raises(SystemExit, match=f"^error: {message}"):
        convert(flags, Conversion(**conversion), lowp_filter_fqns=filters)
