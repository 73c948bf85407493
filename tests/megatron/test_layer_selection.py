"""Which layers of Megatron's model get which recipe, as the run itself reports it."""

import torch

from mindspeed_lowp import get_recipe
from mindspeed_lowp.layers.convert import is_expert

from ..trainer import MOE, MXFP8, succeeded, train

ONE_STEP = ["--train-iters", "1"]


def test_first_and_last_blocks_are_counted_over_all_pipeline_stages(tmp_path):
    flags = "--pipeline-model-parallel-size 2 --num-layers 4 --global-batch-size 4".split()
    blocks = "--first-last-layers-bf16 --num-layers-at-start-in-bf16 1 --num-layers-at-end-in-bf16 2".split()
    first, last = train(tmp_path, [*MXFP8, *flags, *blocks, *ONE_STEP], ranks=2)
    succeeded([first, last])
    assert "Swapped to MXLinear_NPU layers: 4\n" in first.output  # those of block 1
    assert (
        "Kept in high precision: "
        + ", ".join(
            f"decoder.layers.0.{name}"
            for name in (
                "self_attention.linear_proj",
                "self_attention.linear_qkv",
                "mlp.linear_fc1",
                "mlp.linear_fc2",
            )
        )
        + "\n"
        in first.output
    )


def test_experts_in_high_precision(tmp_path):
    [run] = succeeded(train(tmp_path, [*MXFP8, *MOE, "--no-use-gmm-fp8", *ONE_STEP]))
    assert "Swapped to MXLinear_NPU layers: 4\n" in run.output
    assert "MoE training enabled" not in run.output and "GMM] Replaced" not in run.output
    assert "decoder.layers.1.mlp.experts.linear_fc1" in run.output


def test_a_torchtitan_file_is_followed_and_its_strange_names_only_warned_of(tmp_path):
    (tmp_path / "train.toml").write_text(
        """
        [model]
        converters = ["npu_gmm", "quantize.linear.mx", "quantize.grouped_mm.mx"]
        [quantize.linear.mx]
        filter_fqns = ["output", "router.gate"]
        [quantize.grouped_mm.mx]
        fqns = ["layers.1.mlp.experts"]
        """
    )
    flags = ["--lowp-config", "train.toml", *MOE, "--lowp-filter-fqns", "linear_proj"]
    [run] = succeeded(train(tmp_path, [*flags, *ONE_STEP]))
    for line in (
        "--lowp-filter-fqns wins over filter_fqns in [quantize.linear.mx] of train.toml\n",
        "MX training active with recipe mxfp8\n",
        "Swapped to MXLinear_NPU layers: 2\n",
        "mxfp8 MoE training enabled\n",
        "[MXFP8/HiF8 GMM] Replaced 2 NPU GMM methods/functions\n",
    ):
        assert run.output.count(line) == 1, line
    [run] = succeeded(train(tmp_path, [*flags[:-2], *ONE_STEP]))
    assert "warning: train.toml: [quantize.linear.mx] filter_fqns: 'router.gate' is in no lay" in run.output
    assert "Swapped to MXLinear_NPU layers: 4\n" in run.output


def give_recipes_by_hand(model):
    for module in model.modules():
        if getattr(module, "recipe", None) is not None:
            module.recipe = get_recipe("blockwise" if is_expert(module) else "hif8")


def test_linears_and_experts_train_each_by_the_recipe_of_their_section(tmp_path):
    (tmp_path / "train.toml").write_text(
        """
        [model]
        converters = ["npu_gmm", "quantize.linear.mx", "quantize.grouped_mm.mx"]
        [quantize.linear.mx]
        recipe_name = "hif8"
        [quantize.grouped_mm.mx]
        recipe_name = "blockwise"
        """
    )
    runs = {}
    for name, flags, prepare in (
        ("file", ["--lowp-config", "train.toml"], None),
        ("by hand", MXFP8, give_recipes_by_hand),
        ("hif8", ["--fp8-recipe", "hif8"], None),
        ("blockwise", ["--fp8-format", "e4m3", "--fp8-recipe", "blockwise"], None),
    ):
        [runs[name]] = succeeded(train(tmp_path, [*flags, *MOE, "--train-iters", "3"], prepare=prepare))
    file, expected = runs.pop("file"), runs.pop("by hand")
    assert file.losses == expected.losses
    assert all(torch.equal(file.last[name], parameter) for name, parameter in expected.last.items())
    assert all(file.losses[0] != other.losses[0] for other in runs.values())
    for line in (
        "hif8 and blockwise are emulated on this device (cpu)",
        "MX training active with recipe hif8\n",
        "Swapped to MXLinear_NPU layers: 4\n",
        "blockwise MoE training enabled\n",
        "[MXFP8/HiF8 GMM] Replaced 4 NPU GMM methods/functions\n",
    ):
        assert file.output.count(line) == 1, line
