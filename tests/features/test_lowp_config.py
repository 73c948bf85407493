"""torchtitan's TOML file: what is understood, and each mistake told by section and key."""

import pytest

from mindspeed_lowp.features.lowp_config import LowpConfig, Section, read_config

BOTH = 'converters = ["npu_gmm", "quantize.linear.mx", "quantize.grouped_mm.mx"]'

# As torchtitan's guide shows it.
EXAMPLE = f"""
[job]
custom_config_module = "torchtitan_npu.config.custom_config"

[model]
name = "deepseek_v3"
{BOTH}

[quantize.linear.mx]
recipe_name = "mxfp8"
filter_fqns = ["output", "router.gate"]

[quantize.grouped_mm.mx]
recipe_name = "mxfp8"
fqns = ["experts"]
"""


@pytest.fixture
def read(tmp_path):
    def read(text):
        path = tmp_path / "train.toml"
        path.write_text(text)
        return read_config(str(path))

    return read


@pytest.fixture
def stops(read, tmp_path):
    """stops(text) -> the message, without the flag and the file's name."""

    def stops(text):
        with pytest.raises(SystemExit) as info:
            read(text)
        start = f"error: --lowp-config {tmp_path}/train.toml: "
        message = str(info.value.code)
        assert message.startswith(start)
        return message.removeprefix(start)

    return stops


def test_the_guides_example(read):
    linear = Section("mxfp8", ("output", "router.gate"))
    assert read(EXAMPLE) == LowpConfig(linear, Section("mxfp8", ("experts",)), ())


def test_sections_left_out_have_the_guides_defaults(read):
    assert read(f"[model]\n{BOTH}") == LowpConfig(Section("mxfp8", ()), Section("mxfp8", ()), ())


def test_one_kind_alone(read):
    assert read('[model]\nconverters = ["quantize.linear.mx"]').grouped is None
    assert read('[model]\nconverters = ["npu_gmm", "quantize.grouped_mm.mx"]\nname = "x"').linear is None


def test_what_changes_nothing_is_noted(read, tmp_path):
    config = read('[model]\nconverters = ["npu_rms_norm", "quantize.linear.mx"]\n[quantize.grouped_mm.mx]')
    where = f"{tmp_path}/train.toml"
    assert config.notes == (
        f"{where}: [model] converters: 'npu_rms_norm' changes nothing here",
        f"{where}: [quantize.grouped_mm.mx] has no effect: converters does not list 'quantize.grouped_mm.mx'",
    )


@pytest.mark.parametrize(
    "order",
    [
        '["quantize.linear.mx", "quantize.grouped_mm.mx", "npu_gmm"]',
        '["quantize.linear.mx", "quantize.grouped_mm.mx"]',
    ],
)
def test_order_of_converters(stops, order):
    assert stops(f"[model]\nconverters = {order}") == (
        '[model] converters: "npu_gmm" must come before "quantize.grouped_mm.mx": write converters = '
        '["npu_gmm", "quantize.linear.mx", "quantize.grouped_mm.mx"]'
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model = 1", "model = 1: expected a section [model]"),
        ("", "[model] converters is missing: write e.g. converters ="),
        (
            "[model]\nconverter = []",
            "[model] converters is missing (did you mean it by converter?): write e.g.",
        ),
        ("[model]\nconverters = []", "[model] converters lists neither 'quantize.linear.mx' nor "),
        ("[model]\nconverters = 'x'", "[model] converters = 'x': expected a list of strings"),
        (
            '[model]\nconverters = ["quantize.linear.float8"]',
            "[model] converters: no converter 'quantize.linear.float8' here; accepted: quantize.linear.mx, ",
        ),
        ("[model", "not a TOML file: "),
        (
            f"[model]\n{BOTH}\n[quantize.linear.mx]\nfilter_fqn = []",
            "[quantize.linear.mx] filter_fqn: no such key; did you mean filter_fqns? "
            "accepted: recipe_name, filter_fqns",
        ),
        (
            f"[model]\n{BOTH}\n[quantize.grouped_mm.mx]\nfilter_fqns = []",
            "[quantize.grouped_mm.mx] filter_fqns: no such key; did you mean fqns? accepted: ",
        ),
        (
            f"[model]\n{BOTH}\n[quantize.grouped_mm.mx]\nfqns = [1]",
            "[quantize.grouped_mm.mx] fqns = [1]: expected a list of strings",
        ),
        (
            f"[model]\n{BOTH}\n[quantize.linear.mx]\nrecipe_name = 8",
            "[quantize.linear.mx] recipe_name = 8: expected a string",
        ),
        (
            f"[model]\n{BOTH}\n[quantize.linear.mx]\nrecipe_name = 'mxpf8'",
            "[quantize.linear.mx] recipe_name: unknown recipe 'mxpf8' (did you mean 'mxfp8'?); available: ",
        ),
        (
            f"[model]\n{BOTH}\n[quantize.linaer.mx]",
            "no section [quantize.linaer.mx] is known; did you mean [quantize.linear.mx]?",
        ),
        (
            f"[model]\n{BOTH}\n[quantize]\nlinear = 1",
            "quantize.linear = 1: expected a section [quantize.linear]",
        ),
    ],
)
def test_mistakes_are_told(stops, text, message):
    assert stops(text).startswith(message)


def test_no_such_file():
    with pytest.raises(SystemExit, match=r"^error: --lowp-config gone\.toml: No such file or directory$"):
        read_config("gone.toml")
