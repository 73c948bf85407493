"""Quantization-aware training: every refusal names the flag that was typed and says what to set."""

from argparse import ArgumentParser, Namespace

import pytest
import torch

from mindspeed_lowp.features import qat
from mindspeed_lowp.features.qat import QATFeature
from mindspeed_lowp.qat import FakeQuantRecipe, MXFP4Grid, MXFP8Grid, get_qat_recipe
from mindspeed_lowp.recipes import get_recipe

MOE = "--num-experts 2 --bf16"
MINDSPEEDS_CHOICES = ["w4a16-mxfp4", "w4a16-mxfp4-moe-only", "w8a16-mxfp8", "w4a4-mxfp4", "w4a8-moe-only"]


@pytest.mark.parametrize("scheme", ["w4a16-mxfp4", "w4a4-mxfp4", "w4a8-mxfp4", "w8a16-mxfp8"])
def test_every_scheme_is_accepted_with_its_options(parse, scheme):
    args = parse(f"{MOE} --qat-scheme {scheme}-moe-only --qat-skip-names a b --qat-skip-names c")
    assert args.qat_scheme == f"{scheme}-moe-only"
    assert args.qat_skip_names == ["a", "b", "c"]
    assert (args.qat_clip_grad, args.qat_scale_mode) == (False, None)
    args = parse(f"--bf16 --qat-scheme {scheme} --qat-clip-grad --qat-scale-mode floor")
    assert (args.qat_clip_grad, args.qat_scale_mode) == (True, "floor")
    assert QATFeature().is_need_apply(args) and not QATFeature().is_need_apply(parse("--bf16"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--qat-clip-grad",
            "--qat-clip-grad has no effect without --qat-scheme: add --qat-scheme w4a16-mxfp4",
        ),
        ("--qat-skip-names a", "--qat-skip-names has no effect without --qat-scheme"),
        ("--qat-scale-mode ceil", "--qat-scale-mode has no effect without --qat-scheme"),
        (
            "--qat-scheme w4a4-mxfp4-moe-only",
            "--qat-scheme w4a4-mxfp4-moe-only has no effect on a model without experts: add --num-experts, "
            "or set --qat-scheme w4a4-mxfp4",
        ),
        (
            "--qat-scheme w8a16-mxfp8 --qat-scale-mode round",
            "--qat-scale-mode round: --qat-scheme w8a16-mxfp8 takes floor, ceil",
        ),
        (
            "--qat-scheme w4a4-mxfp4 --qat-scale-mode ceil --qat-clip-grad",
            "--qat-clip-grad has no effect with --qat-scale-mode ceil",
        ),
        (
            "--qat-scheme w4a4-mxfp4 --use-torch-fsdp2",
            "--use-torch-fsdp2 cannot be used with --qat-scheme w4a4-mxfp4: sharded parameters",
        ),
    ],
)
def test_what_would_have_no_effect_stops_the_run(stops, flags, message):
    assert stops(f"--bf16 {flags}").startswith(f"error: {message}")


def test_inputs_in_mxfp8_saturate_whatever_the_rule_of_the_weights(parse):
    parse("--bf16 --qat-scheme w4a8-mxfp4 --qat-scale-mode ceil --qat-clip-grad")


def test_a_host_with_the_option_already(monkeypatch):
    """MindSpeed has it: its choices stay, ours join them."""
    parser = ArgumentParser()
    parser.add_argument("--qat-scheme", choices=list(MINDSPEEDS_CHOICES), default=None)
    feature = QATFeature()
    feature.register_args(parser)
    feature.register_args(parser)
    for scheme in ("w4a8-moe-only", "w4a8-mxfp4-moe-only", "w8a16-mxfp8-moe-only"):
        assert parser.parse_args(["--qat-scheme", scheme]).qat_scheme == scheme


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the patched get_model on two linears; gives them, the scheme that it saw, and the log."""
    from mindspeed_lowp import convert_model

    def run(flags, recipe=None, mindspeed=False):
        parser = ArgumentParser()
        QATFeature().register_args(parser)
        parser.add_argument("--num-experts", type=int)
        args = parser.parse_args(flags.split())
        monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *flags.split()])
        monkeypatch.setattr(qat, "MINDSPEED_IS_HOST", mindspeed)
        monkeypatch.setattr("megatron.training.get_args", lambda: args)
        monkeypatch.setattr("megatron.training.print_rank_0", print)
        model = torch.nn.ModuleDict({"fc1": torch.nn.Linear(2, 2), "fc2": torch.nn.Linear(2, 2)})
        if recipe is not None:
            convert_model(model, recipe, filter_fqns=["fc2"])
        seen = []

        def get_model(provider):
            seen.append(args.qat_scheme)
            return [model]

        assert qat.fake_quantize_model_wrapper(get_model)("provider") == [model]
        assert args == parser.parse_args(flags.split())
        recipes = {name: getattr(layer, "recipe", None) for name, layer in model.items()}
        return recipes, seen, capsys.readouterr().out.splitlines()

    return run


def test_layers_get_the_recipe_of_the_flags(run):
    recipes, _, log = run("--qat-scheme w4a8-mxfp4 --qat-clip-grad --qat-scale-mode ceil")
    for recipe in recipes.values():
        assert recipe == get_qat_recipe("w4a8-mxfp4", clip_grad=True, scale_mode="ceil")
        assert recipe.weight == MXFP4Grid(scale_mode="ceil") and recipe.input == MXFP8Grid()
    assert log == [
        "QAT active with scheme w4a8-mxfp4: scales by ceil, no gradient for what saturates",
        "Fake-quantized layers: 2 linears, 0 grouped; multiplied in high precision",
        "Not fake-quantized: none",
    ]


def test_over_the_recipes_that_layers_have(run):
    mxfp8 = get_recipe("mxfp8", defer_backward_quant=True)
    recipes, _, log = run("--qat-scheme w4a16-mxfp4", recipe=mxfp8)
    assert recipes == {
        "fc1": get_qat_recipe("w4a16-mxfp4", base=mxfp8),
        "fc2": get_qat_recipe("w4a16-mxfp4"),
    }
    assert log[1].endswith("2 linears, 0 grouped; multiplied in high precision and mxfp8")


def test_skipped_layers_keep_what_they_have(run):
    mxfp8 = get_recipe("mxfp8")
    recipes, _, log = run("--qat-scheme w4a16-mxfp4 --qat-skip-names fc1", recipe=mxfp8)
    assert recipes["fc1"] == mxfp8 and isinstance(recipes["fc2"], FakeQuantRecipe)
    assert log[-1] == "Not fake-quantized: fc1"


def test_a_run_without_it_is_left_alone(run):
    assert run("") == ({"fc1": None, "fc2": None}, [None], [])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--qat-scheme w4a16-mxfp4 --qat-skip-names fc",
            "--qat-skip-names: no layer of the model was converted",
        ),
        (
            "--qat-scheme w4a16-mxfp4 --qat-skip-names fc1 fc3",
            "--qat-skip-names: 'fc3' is in no layer's name; ",
        ),
        ("--qat-scheme w4a16-mxfp4 --num-experts 2", "--qat-scheme w4a16-mxfp4: the experts of this model"),
    ],
)
def test_nothing_to_do_stops_the_run(run, flags, message):
    with pytest.raises(SystemExit) as info:
        run(flags)
    assert str(info.value.code).startswith(f"error: {message}")


def test_mindspeeds_own_scheme_is_left_to_mindspeed(run):
    for scheme, mode in (("w4a4-mxfp4", "floor"), ("w8a16-mxfp8", "ceil")):
        recipes, seen, log = run(f"--qat-scheme {scheme}", mindspeed=True)
        assert recipes == {"fc1": None, "fc2": None} and seen == [scheme]
        assert log == [f"QAT active with scheme {scheme}: MindSpeed's own, scales by {mode}"]


def test_a_flag_that_mindspeed_has_not_puts_ours_in_force(run):
    recipes, seen, log = run("--qat-scheme w4a4-mxfp4 --qat-scale-mode round", mindspeed=True)
    assert all(isinstance(recipe, FakeQuantRecipe) for recipe in recipes.values())
    assert seen == [None]  # so that MindSpeed fake-quantizes nothing itself
    expected = "scales by round (not MindSpeed's own scheme, whose rule is floor)"
    assert log[0] == f"QAT active with scheme w4a4-mxfp4: {expected}"


def test_mindspeeds_own_scheme_with_a_flag_of_ours(monkeypatch):
    monkeypatch.setattr(qat, "MINDSPEED_IS_HOST", True)
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", "--qat-clip-grad"])
    args = Namespace(qat_scheme="w4a8-moe-only", num_experts=2, qat_scale_mode=None, qat_clip_grad=True)
    with pytest.raises(SystemExit) as info:
        QATFeature().pre_validate_args(args)
    assert (
        info.value.code == "error: --qat-scheme w4a8-moe-only is MindSpeed's own: leave --qat-clip-grad out"
    )


def test_arguments_that_know_nothing_of_it():
    QATFeature().pre_validate_args(Namespace())
