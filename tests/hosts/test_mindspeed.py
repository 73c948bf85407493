"""Joining MindSpeed's features list, against a package with the same contract as MindSpeed's.

The stand-in keeps MindSpeed's order of events: importing `mindspeed.features_manager` fills the list;
importing `mindspeed.megatron_adaptor` parses the command line with a parser that knows none of Megatron's
options, leaves the unknown ones untyped, and registers the patches of the features that apply.
"""

import os
import subprocess
import sys

import pytest

STAND_IN = {
    "__init__": "",
    "features_manager/__init__": """
from mindspeed.features_manager.feature import MindSpeedFeature
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager

class HostFeature(MindSpeedFeature):
    def register_args(self, parser):
        parser.add_argument("--host-option", choices=["a"])

MindSpeedFeaturesManager.FEATURES_LIST[:] = [HostFeature("host-option")]
""",
    "features_manager/feature": """
class MindSpeedFeature:
    def __init__(self, feature_name, optimization_level=2):
        self.feature_name = feature_name.lower().strip().replace("-", "_")
        self.optimization_level = optimization_level
        self.default_patches = optimization_level == 0

    def is_need_apply(self, args):
        wanted = self.optimization_level <= args.optimization_level and getattr(args, self.feature_name, None)
        return wanted or self.default_patches

    def register_args(self, parser): ...
    def pre_validate_args(self, args): ...
    def validate_args(self, args): ...
    def post_validate_args(self, args): ...
    def pre_register_patches(self, patch_manager, args): ...
    def register_patches(self, patch_manager, args): ...
""",
    "features_manager/features_manager": """
class MindSpeedFeaturesManager:
    FEATURES_LIST = []
""",
    "megatron_adaptor": """
import argparse, sys
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager

class PatchManager:
    patches = {}

    @classmethod
    def register_patch(cls, orig_func_name, new_func=None, force_patch=False, create_dummy=False):
        if orig_func_name in cls.patches:
            raise RuntimeError("the patch of {} exist !".format(orig_func_name))
        cls.patches[orig_func_name] = new_func

parser = argparse.ArgumentParser(allow_abbrev=False)
for feature in MindSpeedFeaturesManager.FEATURES_LIST:
    feature.register_args(parser)
args, unknown = parser.parse_known_args()
values = {"optimization_level": 2, **vars(args)}
for flag, value in zip(unknown[::2], unknown[1::2], strict=True):
    values[flag[2:].replace("-", "_")] = value
args = argparse.Namespace(**values)
for feature in MindSpeedFeaturesManager.FEATURES_LIST:
    if feature.is_need_apply(args):
        feature.pre_register_patches(PatchManager, args)
        feature.register_patches(PatchManager, args)
""",
}

CHECKPOINTS = [
    "megatron.training.checkpointing._load_base_checkpoint",
    "megatron.training.checkpointing.read_metadata",
]


@pytest.fixture
def run(tmp_path):
    """run(code, *flags): the output of a new process in which `mindspeed` is the stand-in."""
    for name, source in STAND_IN.items():
        path = tmp_path / "mindspeed" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)

    def run(code: str, *flags: str) -> subprocess.CompletedProcess:
        search_path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
        return subprocess.run(
            [sys.executable, "-c", code, *flags],
            env={**os.environ, "PYTHONPATH": search_path},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def test_features_join_the_list_before_the_adaptor_reads_it(run):
    code = """
from mindspeed_lowp import hosts
hosts.register()
hosts.register()
import mindspeed.megatron_adaptor as adaptor
from mindspeed.features_manager import MindSpeedFeature, MindSpeedFeaturesManager
features = MindSpeedFeaturesManager.FEATURES_LIST
assert all(isinstance(feature, MindSpeedFeature) for feature in features)
print([type(feature).__name__ for feature in features])
print(sorted(adaptor.PatchManager.patches))
print(adaptor.args.mxfp8_defer_backward_quant, adaptor.args.fp8_format, adaptor.args.num_layers)

import argparse
megatron = argparse.ArgumentParser()
megatron.add_argument("--fp8-format", dest="fp8", choices=["e4m3", "hybrid"])
megatron.add_argument("--fp8-recipe", choices=["tensorwise", "delayed", "mxfp8"], default="delayed")
for feature in features:
    feature.register_args(megatron)
args = megatron.parse_args(["--fp8-format", "e4m3", "--fp8-recipe", "mxfp8", "--fp8-quant-fb-split"])
for feature in features:
    feature.pre_validate_args(args)
print(args.fp8, args.fp8_recipe, args.fp8_quant_fb_split)
"""
    result = run(code, "--fp8-format", "e4m3", "--num-layers", "2", "--mxfp8-defer-backward-quant")
    assert result.returncode == 0, result.stderr
    features, patches, first_parse, second_parse = result.stdout.splitlines()
    expected = [
        "HostFeature",
        "LayerSelectionFeature",
        "MXFP8DeferBackwardQuantFeature",
        "ReuseQuantizedWeightFeature",
        "QuantizedAllGatherFeature",
        "FP8TrainingFeature",
        "DelayedScalingFeature",
        "QATFeature",
        "DataPathFeature",
        "CheckpointPrecisionFeature",
        "CheckpointTrackerFeature",
    ]
    assert features == str(expected)
    assert patches == str([*CHECKPOINTS, "megatron.training.training.get_model"])
    assert first_parse == "True e4m3 2"
    assert second_parse == "e4m3 mxfp8 True"


def test_high_precision_run_gets_patches_of_checkpoints_only(run):
    code = """
from mindspeed_lowp import hosts
hosts.register()
import mindspeed.megatron_adaptor as adaptor
print(sorted(adaptor.PatchManager.patches))
"""
    result = run(code, "--num-layers", "2")
    assert result.stdout == f"{CHECKPOINTS}\n", result.stderr


def test_adaptor_of_mindspeed_imported_first(run):
    result = run("import mindspeed.megatron_adaptor; from mindspeed_lowp import hosts; hosts.register()")
    assert result.returncode == 1
    assert result.stderr.startswith("error: `import mindspeed.megatron_adaptor` came before")
    assert "swap the two lines" in result.stderr and "Traceback" not in result.stderr
