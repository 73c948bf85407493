"""Which layers get which recipe: by flags, by a file, and by both."""

import pytest

from mindspeed_lowp.features.layer_selection import Names, select
from mindspeed_lowp.features.recipe_options import recipe_from_args

pytestmark = pytest.mark.usefixtures("other_recipes")

MXFP8 = "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8"
MOE = "--num-experts 4 --moe-grouped-gemm --disable-bias-linear"

FILE = """
[model]
converters = ["npu_gmm", "quantize.linear.mx", "quantize.grouped_mm.mx"]
[quantize.linear.mx]
recipe_name = "mxfp8"
filter_fqns = ["output", "router.gate"]
[quantize.grouped_mm.mx]
recipe_name = "one-format"
fqns = ["experts"]
"""


@pytest.fixture
def file(tmp_path):
    """file(text) -> the flag that names a file with that text."""

    def write(text=FILE):
        path = tmp_path / "train.toml"
        path.write_text(text)
        return f"--lowp-config {path}"

    return write


def names(*values, origin):
    return Names(values, origin)


def test_flags_choose_for_linears_and_experts(parse):
    args = parse(f"{MXFP8} {MOE} --lowp-filter-fqns a b --lowp-filter-fqns c --lowp-moe-fqns layers.1. x")
    linears, experts, notes = select(args)
    assert linears.recipe == experts.recipe == "mxfp8" and notes == ()
    assert linears.filter_fqns == experts.filter_fqns == names("a", "b", "c", origin="--lowp-filter-fqns")
    assert experts.fqns == names("layers.1.", "x", origin="--lowp-moe-fqns")


def test_experts_may_stay_in_high_precision(parse):
    linears, experts, _ = select(parse(f"{MXFP8} {MOE} --no-use-gmm-fp8"))
    assert (linears.recipe, experts.recipe) == ("mxfp8", None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--no-use-gmm-fp8", "--no-use-gmm-fp8 has no effect on a model without experts: add --num-experts"),
        ("--lowp-moe-fqns x", "--lowp-moe-fqns has no effect on a model without experts"),
        (f"{MOE} --lowp-moe-fqns x --no-use-gmm-fp8", "--lowp-moe-fqns names experts to quantize, --no-use-"),
    ],
)
def test_flags_that_would_have_no_effect(stops, flags, message):
    assert stops(f"{MXFP8} {flags}").startswith(f"error: {message}")


@pytest.mark.parametrize("flag", ["--lowp-moe-fqns x", "--no-use-gmm-fp8"])
def test_flags_that_need_fp8(stops, flag):
    message = stops(f"--bf16 {MOE} {flag}")
    assert message.startswith(
        f"error: {flag.split()[0]} has no effect without FP8 training: add --fp8-format"
    )


def test_a_file_turns_fp8_on_with_different_recipes_for_linears_and_experts(parse, file):
    flag = file()
    args = parse(f"--bf16 {MOE} {flag}")
    assert (args.fp8, args.fp8_recipe) == ("e4m3", "mxfp8")
    linears, experts, notes = select(args)
    assert (linears.recipe, experts.recipe, notes) == ("mxfp8", "one-format", ())
    path = flag.split()[1]
    assert linears.filter_fqns == Names(
        ("output", "router.gate"), f"{path}: [quantize.linear.mx] filter_fqns", may_miss=True
    )
    assert experts.fqns == Names(("experts",), f"{path}: [quantize.grouped_mm.mx] fqns", may_miss=True)
    assert experts.filter_fqns == Names()  # the file's filter is for linears
    formats = [recipe_from_args(kind.recipe, args).fp8_format for kind in (linears, experts)]
    assert formats == ["e4m3", "special"]


@pytest.mark.parametrize(
    ("converters", "recipes"),
    [
        ('["quantize.linear.mx"]', ("mxfp8", None)),
        ('["npu_gmm", "quantize.grouped_mm.mx"]', (None, "one-format")),
    ],
)
def test_only_listed_converters_take_effect(parse, file, converters, recipes):
    text = FILE.replace('["npu_gmm", "quantize.linear.mx", "quantize.grouped_mm.mx"]', converters)
    linears, experts, notes = select(parse(f"--bf16 {MOE} {file(text)}"))
    assert (linears.recipe, experts.recipe) == recipes
    assert len(notes) == 1 and "has no effect: converters does not list" in notes[0]


def test_flags_win_over_the_file_and_the_log_says_so(parse, file):
    flag = file()
    path = flag.split()[1]
    typed = "--fp8-format hybrid --fp8-recipe history --lowp-filter-fqns mlp --lowp-moe-fqns fc1"
    args = parse(f"--bf16 {MOE} {flag} {typed}")
    linears, experts, notes = select(args)
    assert (args.fp8, linears.recipe, experts.recipe) == ("hybrid", "history", "history")
    assert linears.filter_fqns == experts.filter_fqns == names("mlp", origin="--lowp-filter-fqns")
    assert experts.fqns == names("fc1", origin="--lowp-moe-fqns")
    linear, grouped = "[quantize.linear.mx]", "[quantize.grouped_mm.mx]"
    assert notes == (
        f'--fp8-recipe history wins over recipe_name = "mxfp8" in {linear} of {path}',
        f"--lowp-filter-fqns wins over filter_fqns in {linear} of {path}",
        f'--fp8-recipe history wins over recipe_name = "one-format" in {grouped} of {path}',
        f"--lowp-moe-fqns wins over fqns in {grouped} of {path}",
    )


def test_experts_by_flags_against_the_file(parse, file):
    flag = file()
    _, experts, notes = select(parse(f"--bf16 {MOE} {flag} --no-use-gmm-fp8"))
    assert experts.recipe is None
    assert notes == (f"--no-use-gmm-fp8 wins over [quantize.grouped_mm.mx] of {flag.split()[1]}",)
    without = file(FILE.replace(', "quantize.grouped_mm.mx"]', "]"))
    _, experts, notes = select(parse(f"--bf16 {MOE} {without} --lowp-moe-fqns experts"))
    assert experts.recipe == "mxfp8" and notes[-1].startswith("--lowp-moe-fqns wins over converters")


def test_each_recipe_of_a_file_has_the_first_of_its_own_formats(parse, file):
    text = FILE.replace('"mxfp8"', '"hif8"').replace('"one-format"', '"tensorwise"')
    args = parse(f"--bf16 {MOE} {file(text)}")
    assert [recipe_from_args(name, args).fp8_format for name in select(args).recipes] == ["hif8", "e4m3"]


def test_a_typed_format_fits_one_of_the_files_recipes(parse, stops, file):
    flag = file()
    args = parse(f"--bf16 {MOE} {flag} --fp8-format hybrid")
    assert [recipe_from_args(name, args).fp8_format for name in select(args).recipes] == ["hybrid", "special"]
    message = stops(f"--bf16 {MOE} {flag} --fp8-format special")
    assert message.startswith("error: --fp8-format special: the recipe mxfp8 takes e4m3 or hybrid")


def test_a_file_with_deferral(parse, file):
    assert parse(f"--bf16 {MOE} {file()} --mxfp8-defer-backward-quant").mxfp8_defer_backward_quant


def test_a_mistake_in_the_file_stops_the_run(stops, file):
    assert "filter_fqn: no such key" in stops(f"--bf16 {file(FILE.replace('filter_fqns', 'filter_fqn'))}")


def test_a_section_for_experts_on_a_model_without_any_is_noted(parse, file):
    flag = file()
    notes = select(parse(f"--bf16 {flag}")).notes
    assert notes == (f"{flag.split()[1]}: [quantize.grouped_mm.mx] has no effect: the model has no experts",)


def test_a_recipe_of_the_file_is_told_by_the_file(stops, file):
    flag = file(FILE.replace('"mxfp8"', '"delayed"'))
    message = stops(f"--bf16 {MOE} {flag} --first-last-layers-bf16")
    assert message.startswith(
        f"error: --first-last-layers-bf16 cannot be used with the recipe delayed ({flag}); accepted: mxfp8, "
    )
