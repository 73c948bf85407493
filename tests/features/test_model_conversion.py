"""The built model is converted as the arguments say, and the log says what was done."""

from argparse import Namespace

import pytest
import torch

from mindspeed_lowp.features import model_conversion
from mindspeed_lowp.features.mindspeed_layers import MindSpeedLayersFeature

MXFP8 = "--fp8-format e4m3 --fp8-recipe mxfp8"


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
    assert list(model_conversion.blocks_in_high_precision(args)) == blocks


@pytest.fixture
def convert(monkeypatch):
    """Runs the patched get_model on a stand-in for the model; gives what reached `convert_chunks`."""
    from mindspeed_lowp.layers import Conversion
    from mindspeed_lowp.megatron import convert as conversion

    def convert(flags="", outcome=None, **arguments):
        calls = []
        outcome = Conversion(linears=["a.mlp", "b.mlp"]) if outcome is None else outcome

        def convert_chunks(model, choices, check, blocks):
            calls.append((model, *choices))
            check(outcome)
            return outcome

        defaults = {"fp8": "e4m3", "fp8_recipe": "mxfp8", "lowp_filter_fqns": None, "lowp_emulate": False}
        defaults["num_experts"] = None
        args = Namespace(**defaults | arguments)
        monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *flags.split()])
        monkeypatch.setattr(conversion, "convert_chunks", convert_chunks)
        monkeypatch.setattr(model_conversion, "by_name", lambda linears, experts: (linears, experts))
        monkeypatch.setattr("megatron.training.get_args", lambda: args)
        model = [torch.nn.Linear(1, 1)]
        get_model = model_conversion.convert_model_wrapper(lambda provider, wrap_with_ddp=True: model)
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


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"fp8_recipe": "its-own"}, "--fp8-recipe its-own, which is MindSpeed's alone"),
        ({"fp8_recipe": "delayed"}, "--fp8-recipe delayed, whose history is MindSpeed's"),
        ({"moe_fb_overlap": True}, "--moe-fb-overlap, which multiplies in functions of its own"),
    ],
)
def test_what_mindspeed_computes_by_itself_is_left_alone(convert, monkeypatch, capsys, arguments, why):
    monkeypatch.setattr(model_conversion, "MINDSPEED_IS_HOST", True)
    assert convert(**arguments) is None
    assert capsys.readouterr().out == f"MindSpeed's own FP8 recipes stay, because of {why}\n"
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", "--lowp-filter-fqns", "mlp"])
    with pytest.raises(SystemExit, match=f"error: --lowp-filter-fqns cannot be used with {why}"):
        MindSpeedLayersFeature().pre_validate_args(
            Namespace(**{"fp8": "e4m3", "fp8_recipe": "mxfp8", **arguments})
        )


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
