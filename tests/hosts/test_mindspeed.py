"""The features under MindSpeed's managers: a stand-in with their contract (see stand_in/mindspeed).

Each test is a process of its own, in which the stand-in is MindSpeed and the emulator is torch_npu. The real
MindSpeed is in tests/mindspeed.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest

CHECKPOINTS = ["_load_base_checkpoint", "read_metadata"]  # what any run patches
STAND_IN = Path(__file__).parent / "stand_in"
_server: ProcessPoolExecutor
FLAGS = "--fp8-format e4m3 --fp8-recipe mxfp8 --num-layers 2 --mxfp8-defer-backward-quant".split()


@pytest.fixture(scope="session", autouse=True)
def processes() -> Iterator[None]:
    """A process that has imported torch, from which each test forks its own."""
    global _server
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_import_torch) as _server:
        yield


def _import_torch() -> None:
    import torch
    import torch._dynamo

    torch.set_num_threads(1)


def run(code: str, *flags: str, emulated: str = "1", folder: Path = STAND_IN) -> SimpleNamespace:
    """What a new process that executes `code` with these flags prints, and its return code."""
    return _server.submit(_fork, code, flags, emulated, str(folder)).result(timeout=120)


def _fork(code: str, flags: tuple[str, ...], emulated: str, folder: str) -> SimpleNamespace:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
            sys.argv[:] = ["train.py", *flags]
            sys.path.insert(0, folder)
            os.environ["LOWP_EMULATE_NPU"] = emulated
            status = 1
            try:
                exec(compile(code, "train.py", "exec"), {"__name__": "__main__"})
                status = 0
            except SystemExit as stop:
                print(stop.code, file=sys.stderr)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(status)
        _, status = os.waitpid(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return SimpleNamespace(returncode=os.waitstatus_to_exitcode(status), stdout=texts[0], stderr=texts[1])


def succeeds(code: str, *flags: str) -> str:
    result = run(code, *flags)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


IN_LIST = """
from mindspeed.features_manager import MindSpeedFeature, MindSpeedFeaturesManager as manager
names = [type(feature).__name__ for feature in manager.FEATURES_LIST]
assert all(isinstance(feature, MindSpeedFeature) for feature in manager.FEATURES_LIST)
assert names == ["HostFeature", "LayerSelectionFeature", "MXFP8DeferBackwardQuantFeature",
                 "ReuseQuantizedWeightFeature", "QuantizedAllGatherFeature", "FP8TrainingFeature",
                 "DelayedScalingFeature", "QATFeature", "DataPathFeature", "LateFailuresFeature",
                 "CheckpointPrecisionFeature", "CheckpointTrackerFeature", "MindSpeedLayersFeature"], names
"""


def test_features_join_the_list_and_both_parsers():
    code = """
import mindspeed_lowp.adaptor
from mindspeed_lowp import hosts
hosts.register()  # once more: nothing happens
import sys
from mindspeed.args_utils import get_mindspeed_args
early = get_mindspeed_args()
assert early.mxfp8_defer_backward_quant is True and early.fp8_format == "e4m3" and early.num_layers == "2"

import argparse
megatron = argparse.ArgumentParser()
megatron.add_argument("--fp8-format", dest="fp8", choices=["e4m3", "hybrid"])
megatron.add_argument("--fp8-recipe", choices=["tensorwise", "delayed", "mxfp8"], default="delayed")
megatron.add_argument("--num-experts", type=int)
megatron.add_argument("--num-layers", type=int)
manager.register_features_args(megatron)
for flags, fp8, told, ours in (
    (sys.argv[1:], "e4m3", "mxfp8", None),
    (["--fp8-recipe", "hif8"], "hif8", "tensorwise", "hif8"),
    (["--fp8-format", "hif8", "--fp8-recipe", "tensorwise"], "hif8", "tensorwise", None),
    (["--fp8-format", "e4m3", "--fp8-recipe", "blockwise"], "e4m3", "blockwise", None),
):
    sys.argv[1:] = flags
    args = megatron.parse_args(flags)
    for feature in manager.FEATURES_LIST:
        feature.pre_validate_args(args)
        feature.pre_validate_args(object())  # a TransformerConfig, say
    assert (args.fp8, args.fp8_recipe, getattr(args, "lowp_recipe", None)) == (fp8, told, ours), args
"""
    head, _, rest = code.partition("import argparse")
    succeeds(f"{head}{IN_LIST}import argparse{rest}", *FLAGS)


APPLIED_REMOVED_APPLIED = """
import mindspeed_lowp.adaptor
from mindspeed.patch_utils import MindSpeedPatchesManager
from mindspeed.args_utils import get_mindspeed_args

patches = MindSpeedPatchesManager.patches_info
args = get_mindspeed_args()
ours = {name for name, patch in patches.items() if "host_wrapper" not in map(name_of, patch.wrappers)}
assert ours == expected, ours ^ expected

def installed():
    return {name: getattr(patch.module, patch.attribute) for name, patch in patches.items()}

originals = {name: patch.original for name, patch in patches.items()}
assert all(value is not originals[name] for name, value in installed().items())
wrappers = {name: list(patch.wrappers) for name, patch in patches.items()}
for _ in range(2):
    manager.remove_patches()
    for name, value in installed().items():
        assert name.startswith("mindspeed.") or value is originals[name], name
    manager.apply_features_pre_patches(args)
    manager.apply_features_patches(args)
    assert {name: list(patch.wrappers) for name, patch in patches.items()} == wrappers
    for name, value in installed().items():  # wrapped once, not twice
        if name.startswith("mindspeed.te"):
            assert value.original is originals[name]
"""


def test_every_feature_is_applied_removed_and_applied_again():
    optimizer, gathers = (
        "megatron.core.optimizer.optimizer",
        "megatron.core.distributed.param_and_grad_buffer",
    )
    functions = "mindspeed.te.pytorch.module.linear"
    expected = {
        "megatron.training.training.get_model",
        *(f"megatron.training.checkpointing.{name}" for name in ("load_checkpoint", *CHECKPOINTS)),
        *(f"{optimizer}.{name}Optimizer.step" for name in ("FP32", "MixedPrecision", "Chained")),
        *(f"{gathers}._ParamAndGradBucketGroup.{name}_param_sync" for name in ("start", "finish")),
        *(f"{functions}.{kind}Parallel{mode}" for kind in ("Column", "Row") for mode in ("Seq", "NoSeq")),
        "mindspeed.core.transformer.moe.grouped_matmul_util.get_gmm_quant_func",
    }
    setup = f"expected = {expected!r}\ndef name_of(x): return x.__name__\n"
    code = setup + "import mindspeed_lowp.adaptor\n" + IN_LIST + APPLIED_REMOVED_APPLIED
    succeeds(code, *FLAGS, "--fp8-reuse-quantized-weight", "--num-experts", "4")


def test_adaptor_of_mindspeed_imported_first():
    code = f"""
import mindspeed_lowp  # the emulator
import mindspeed.megatron_adaptor
import mindspeed_lowp.adaptor
{IN_LIST}
from mindspeed.patch_utils import MindSpeedPatchesManager
from mindspeed.te.pytorch.module import linear
assert "megatron.training.training.get_model" in MindSpeedPatchesManager.patches_info
assert linear.ColumnParallelNoSeq.original.__name__ == "ColumnParallelNoSeq"
"""
    succeeds(code, *FLAGS)


def test_too_late():
    code = """
import sys, types
import mindspeed_lowp
import mindspeed.megatron_adaptor
sys.modules["megatron.training.global_vars"] = types.SimpleNamespace(_GLOBAL_ARGS=object())
import mindspeed_lowp.adaptor
"""
    result = run(code, *FLAGS)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(
        "error: `import mindspeed_lowp.adaptor` came after Megatron parsed"
    )
    file = run(code.replace("sys.modules", "dict()"), "--lowp-config", "x.toml")
    assert "swap the two imports, or add --fp8-format as well" in file.stderr


def test_another_list_of_features_keeps_ours():
    code = """
import mindspeed_lowp.adaptor
from mindspeed.features_manager import HostFeature, MindSpeedFeaturesManager
MindSpeedFeaturesManager.set_features_list([HostFeature()])  # as MindSpeed-LLM does
"""
    succeeds(code + IN_LIST, *FLAGS)


def test_high_precision_run_gets_patches_of_checkpoints_only():
    code = """
import mindspeed_lowp.adaptor
from mindspeed.patch_utils import MindSpeedPatchesManager
print(*sorted(MindSpeedPatchesManager.patches_info))
"""
    patches = [f"megatron.training.checkpointing.{name}" for name in CHECKPOINTS]
    assert succeeds(code, "--num-layers", "2").split() == [*patches, "megatron.training.training.train_step"]


def test_without_torch_npu():
    result = run("import mindspeed_lowp.adaptor", *FLAGS, emulated="")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "needs torch_npu, which cannot be imported" in result.stderr
    assert "python -m mindspeed_lowp.run --emulate-npu SCRIPT" in result.stderr


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        (
            "te/pytorch/module/linear.py",
            "class RowParallelSeq",
            "class RowParallelSequence",
            "mindspeed.te.pytorch.module.linear has no RowParallelSeq.forward",
        ),
        (
            "te/pytorch/module/linear.py",
            "def forward(ctx, input_, weight, bias, fp8_meta):\n        return",
            "def forward(ctx, input_, weight, fp8_meta, bias):\n        return",
            "ColumnParallelNoSeq.forward takes (input_, weight, fp8_meta, bias), not (input_, weight, bias, "
            "fp8_meta)",
        ),
        (
            "te/pytorch/module/performance_grouped_linear.py",
            None,
            None,
            "there is no module mindspeed.te.pytorch.module.performance_grouped_linear",
        ),
    ],
)
def test_mindspeed_of_another_shape_stops_the_run(tmp_path, file, old, new, problem):
    for path in STAND_IN.rglob("*.py"):
        copy = tmp_path / path.relative_to(STAND_IN)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    changed = tmp_path / "mindspeed" / file
    if old is None:
        changed.unlink()
    else:
        assert old in changed.read_text()
        changed.write_text(changed.read_text().replace(old, new))
    result = run("import mindspeed_lowp.adaptor", *FLAGS, "--num-experts", "4", folder=tmp_path)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    message = result.stderr.splitlines()[-1]
    assert message.startswith(
        "error: this MindSpeed is not the one that mindspeed_lowp knows (MindSpeed master of"
    )
    assert problem in message


LAYERS = """
import mindspeed_lowp.adaptor
import torch
from types import SimpleNamespace
from mindspeed.te.pytorch.fp8.state_manager import FP8GlobalStateManager
from mindspeed.te.pytorch.module import layernorm_column_parallel_linear as norm_linear
from mindspeed.te.pytorch.module.linear import TEColumnParallelLinear, TERowParallelLinear
from mindspeed_lowp import convert_model, get_recipe, lowp_linear
from mindspeed_lowp.layers import reuse_quantized_weights
from mindspeed_lowp.mindspeed.claim import claim

config = SimpleNamespace(gradient_accumulation_fusion=False)
norm = norm_linear.MindSpeedTELayerNormColumnParallelLinear
classes = (TEColumnParallelLinear, TERowParallelLinear, norm)
model = torch.nn.ModuleDict({cls.__name__: cls(64, 96, config) for cls in classes})
weights = list(model.parameters())
x = torch.randn(3, 5, 64).bfloat16()

FP8GlobalStateManager.FP8_ENABLED = True
assert all(layer(x)[0].eq(7).all() for layer in model.values())  # the host's own FP8
assert claim([model], has_experts=False) == []
for layer in model.values():  # taken over, without a recipe: high precision, whatever the block says
    assert torch.equal(layer(x)[0], x @ layer.weight.t())
recipe = get_recipe("mxfp8", defer_backward_quant=True)
report = convert_model(model, recipe, filter_fqns=["RowParallel"])
assert sorted(report.linears) == sorted({c.__name__ for c in classes} - {"TERowParallelLinear"})
assert reuse_quantized_weights(model) == 2
for name, layer in model.items():
    expected = lowp_linear(x, layer.weight, None, recipe) if "Row" not in name else x @ layer.weight.t()
    y = layer(x)[0]
    assert torch.equal(y, expected)
    y.sum().backward()
    assert layer.weight.grad is not None
FP8GlobalStateManager.FP8_ENABLED = False  # a block that --first-last-layers-bf16 keeps
assert all(torch.equal(layer(x)[0], x @ layer.weight.t()) for layer in model.values())
assert all(a is b for a, b in zip(weights, model.parameters(), strict=True))

class Other(TERowParallelLinear):
    pass

model["other"] = Other(64, 96, config)
assert claim([model], has_experts=False) == ["other"]
"""


def test_layers_carry_recipes():
    succeeds(LAYERS, *FLAGS)
