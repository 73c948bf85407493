"""Features hooked into Megatron's own parser and validation."""

import sys
from argparse import Namespace

import pytest

from mindspeed_lowp.features import Feature
from mindspeed_lowp.hosts import bare_megatron
from mindspeed_lowp.hosts.features_manager import FeaturesManager
from mindspeed_lowp.hosts.patch_manager import PatchManager


class RecordingFeature(Feature):
    """Writes down the order of its hooks."""

    def __init__(self, calls):
        super().__init__("record")
        self.calls = calls

    def register_args(self, parser):
        parser.add_argument("--record", action="store_true")

    def pre_validate_args(self, args):
        self.calls.append("pre")

    def post_validate_args(self, args):
        self.calls.append("post")

    def validate_args(self, args):
        self.calls.append("validate")

    def pre_register_patches(self, patch_manager, args):
        self.calls.append("pre_patches")

    def register_patches(self, patch_manager, args):
        self.calls.append("patches")
        patch_manager.register_patch("megatron.training.utils.print_rank_0", print)


@pytest.fixture
def calls(monkeypatch):
    calls = []
    manager = FeaturesManager([RecordingFeature(calls)], PatchManager())
    monkeypatch.setattr(bare_megatron, "features_manager", manager)
    yield calls
    bare_megatron.unregister()


@pytest.fixture
def command_line(monkeypatch):
    return lambda *flags: monkeypatch.setattr("sys.argv", ["script.py", *flags])


def test_hooks_reach_modules_that_imported_the_functions_before(calls):
    from megatron.training import arguments, initialize

    before = arguments.parse_args, arguments.validate_args
    bare_megatron.register()
    bare_megatron.register()
    assert arguments.parse_args is initialize.parse_args is not before[0]
    assert arguments.validate_args is initialize.validate_args is not before[1]
    assert arguments.parse_args.__wrapped__ is before[0]  # wrapped once
    bare_megatron.unregister()
    assert (initialize.parse_args, initialize.validate_args) == before


def test_options_of_script_and_features(calls, command_line):
    from megatron.training import arguments

    def script_options(parser):
        parser.add_argument("--of-the-script", type=int)
        return parser

    bare_megatron.register()
    command_line("--record", "--of-the-script", "3")
    args = arguments.parse_args(script_options)
    assert args.record is True and args.of_the_script == 3
    command_line("--record", "--unheard-of")
    assert arguments.parse_args(ignore_unknown_args=True).record is True


def test_order_of_hooks_around_megatrons_validation(calls):
    def megatron(args, defaults):
        calls.append(("megatron", defaults))
        return args

    args = Namespace(record=True)
    assert bare_megatron.validate_args_wrapper(megatron)(args, {"a": 1}) is args
    assert calls == ["pre", "pre_patches", "patches", ("megatron", {"a": 1}), "post", "validate"]
    assert sys.modules["megatron.training.utils"].print_rank_0 is print


def test_patches_of_a_feature_that_is_off_are_not_registered(calls):
    bare_megatron.validate_args_wrapper(lambda args, defaults: args)(Namespace(record=False))
    assert calls == ["pre", "post", "validate"]


def test_yaml_configuration_is_refused_since_megatron_drops_the_flags(calls, command_line, tmp_path):
    from megatron.training import arguments

    bare_megatron.register()
    config = tmp_path / "config.yaml"
    config.write_text("enable_msc: true\n")
    command_line("--yaml-cfg", str(config), "--record")
    with pytest.raises(SystemExit, match=r"^error: --yaml-cfg .*: Megatron then ignores every flag"):
        arguments.parse_args()


def test_megatron_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.training.arguments", None)
    with pytest.raises(SystemExit, match=r"^error: Megatron's trainer, the module megatron.training, cannot"):
        bare_megatron.register()
