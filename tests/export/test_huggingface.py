"""The export of a Hugging Face folder: names, values, files, and every refusal."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from mindspeed_lowp import ops
from mindspeed_lowp.export import MXFP4, MXFP8
from mindspeed_lowp.export.__main__ import main
from mindspeed_lowp.ops.reference import mxfp4 as reference

from .models import CONFIG, assert_same_bits, llama_weights, load_export, save_folder

KEPT = {"model.embed_tokens.weight", "lm_head.weight"}


def export(folder, *flags, packing=MXFP4):
    output = folder.parent / "output"
    main(["--format", packing.name, "--load", str(folder), "--output", str(output), *flags])
    return output


def refused(*arguments, **options):
    with pytest.raises(SystemExit) as stop:
        export(*arguments, **options)
    return str(stop.value.code)


def is_quantized(name):
    return name.endswith("_proj.weight")


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("packing", [MXFP4, MXFP8])
def test_decoded_by_compressed_tensors_it_is_what_the_model_computed_with(tmp_path, packing, shards, capsys):
    weights = llama_weights()
    folder = save_folder(tmp_path / "model", weights, shards)
    result, decoded = load_export(export(folder, packing=packing))

    assert set(result) == set(weights)
    assert decoded == {name for name in weights if is_quantized(name)}
    for name, weight in weights.items():
        expected = weight
        if name in decoded and packing is MXFP4:
            expected = reference.quant_dequant_mxfp4(weight, 6.0, 32)
        elif name in decoded:
            expected = ops.anti_mx_quant(*ops.dynamic_mx_quant(weight, dst_type=torch.float8_e4m3fn))
        assert_same_bits(result[name], expected, name)

    printed = capsys.readouterr().out
    assert f"14 weights in {packing.name}" in printed
    assert "Kept in high precision, besides norms: lm_head, model.embed_tokens" in printed


def test_the_rest_of_the_folder_comes_along(tmp_path, capsys):
    folder = save_folder(tmp_path / "model", llama_weights(), shards=2)
    (folder / "pytorch_model.bin").write_bytes(b"the same weights again")
    (folder / "original").mkdir()
    (folder / "generation_config.json").write_text("{}")
    output = export(folder)
    assert sorted(path.name for path in output.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert (output / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert "Not copied: original, pytorch_model.bin" in capsys.readouterr().out
    config = json.loads((output / "config.json").read_text())
    assert {key: config[key] for key in CONFIG} == CONFIG
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert config["quantization_config"]["quantization_status"] == "compressed"
    assert set(config["quantization_config"]["ignore"]) == {name.removesuffix(".weight") for name in KEPT}
    index = json.loads((output / "model.safetensors.index.json").read_text())
    sizes = [path.stat().st_size for path in output.glob("*.safetensors")]
    assert 0 < sum(sizes) - index["metadata"]["total_size"] < 16384  # the headers


def test_layers_are_kept_by_parts_of_their_names(tmp_path):
    weights = llama_weights()
    weights["model.layers.1.mlp.gate.weight"] = torch.ones(4, 64).bfloat16()  # a router
    weights["vision.patch.weight"] = torch.ones(4, 3, 2, 2).bfloat16()  # a convolution
    folder = save_folder(tmp_path / "model", weights)
    output = export(folder, "--skip-names", "layers.0.", "down_proj")
    result, decoded = load_export(output)
    assert decoded == {n for n in weights if is_quantized(n) and "layers.1." in n and "down_proj" not in n}
    for name in set(weights) - decoded:
        assert_same_bits(result[name], weights[name], name)
    ignored = json.loads((output / "config.json").read_text())["quantization_config"]["ignore"]
    assert set(ignored) == {
        name.removesuffix(".weight") for name in weights if name not in decoded and "norm" not in name
    }


def test_numbers_of_the_training_run_are_followed(tmp_path):
    weights = llama_weights()
    flags = ["--scale-factor", "7.5", "--block-size", "64"]
    result, decoded = load_export(export(save_folder(tmp_path / "model", weights), *flags))
    for name in decoded:
        assert_same_bits(result[name], reference.quant_dequant_mxfp4(weights[name], 7.5, 64), name)


def test_transformers_loads_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    weights = llama_weights()
    output = export(save_folder(tmp_path / "model", weights))
    (output / "tokenizer.json").unlink()
    model = transformers.AutoModelForCausalLM.from_pretrained(output, dtype=torch.bfloat16)
    tokens = torch.arange(12)[None]
    logits = model(tokens).logits

    expected = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).bfloat16().eval()
    values = {
        n: reference.quant_dequant_mxfp4(w, 6.0, 32) if is_quantized(n) else w for n, w in weights.items()
    }
    expected.load_state_dict(values)
    assert torch.equal(logits, expected(tokens).logits)


def test_existing_output_is_replaced_with_force_only(tmp_path):
    folder = save_folder(tmp_path / "model", llama_weights())
    output = export(folder)
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    (output / "mine.txt").write_text("mine")
    message = refused(folder, packing=MXFP8)
    assert "--output" in message and "exists; --force replaces it" in message
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before | {"mine.txt": b"mine"}
    export(folder, "--force", packing=MXFP8)
    assert not (output / "mine.txt").exists()
    assert b"mxfp8-quantized" in (output / "config.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "output"]


def test_an_empty_output_folder_is_taken(tmp_path):
    (tmp_path / "output").mkdir()
    output = export(save_folder(tmp_path / "model", llama_weights()))
    assert (output / "config.json").exists()


NARROW = {"model.layers.0.mlp.down_proj.weight": torch.ones(4, 48).bfloat16()}
STACKED = {"model.layers.0.mlp.experts.gate_up_proj": torch.ones(2, 32, 64).bfloat16()}
NAN = {"model.layers.0.mlp.down_proj.weight": torch.full((4, 64), torch.nan).bfloat16()}
FP8 = {"model.layers.0.mlp.down_proj.weight": torch.ones(4, 64).to(torch.float8_e4m3fn)}


@pytest.mark.parametrize(
    ("changed", "config", "flags", "packing", "message"),
    [
        (NARROW, {}, [], MXFP4, "down_proj.weight has rows of 48 elements.*--skip-names"),
        (STACKED, {}, [], MXFP8, "gate_up_proj has 3 dimensions.*--skip-names"),
        (NAN, {}, [], MXFP4, "layers.0.mlp.down_proj.weight has NaN or Inf"),
        (FP8, {}, [], MXFP4, "down_proj.weight is torch.float8_e4m3fn"),
        ({}, {"model_type": "gpt2"}, [], MXFP4, r"a gpt2 stores its weights as \[K, N\]"),
        ({}, {"quantization_config": {}}, [], MXFP4, "is quantized already"),
        ({}, {}, ["--skip-names", "dwn_proj"], MXFP4, "'dwn_proj' is in no layer's name; the nearest: down"),
        ({}, {}, ["--skip-names", "layers"], MXFP4, "no weight .* would be quantized"),
        ({}, {}, ["--block-size", "16"], MXFP4, "--block-size 16"),
        ({}, {}, ["--block-size", "32"], MXFP8, "--block-size is for mxfp4-pack-quantized"),
        ({}, {}, ["--scale-mode", "round"], MXFP8, "--scale-mode round"),
    ],
)
def test_refusals(tmp_path, changed, config, flags, packing, message):
    folder = save_folder(tmp_path / "model", llama_weights() | changed, config=CONFIG | config)
    stopped = refused(folder, *flags, packing=packing)
    assert stopped.startswith("error: ") and re.search(message, stopped), stopped
    assert [path.name for path in tmp_path.iterdir()] == ["model"]  # nothing is left behind


def test_a_stack_of_experts_is_kept_by_its_name(tmp_path):
    folder = save_folder(tmp_path / "model", llama_weights() | STACKED)
    result, decoded = load_export(export(folder, "--skip-names", "gate_up_proj"))
    assert len(decoded) == 14
    assert_same_bits(result[next(iter(STACKED))], next(iter(STACKED.values())))


def test_folders_that_hold_no_checkpoint(tmp_path):
    assert "no such folder" in refused(tmp_path / "nothing")
    folder = tmp_path / "model"
    folder.mkdir()
    assert "neither a Hugging Face folder" in refused(folder)
    (folder / "config.json").write_text("{}")
    assert "there are none" in refused(folder)
    for name in ("a", "b"):
        save_file({}, folder / f"{name}.safetensors")
    assert "2 of them and no model.safetensors.index.json" in refused(folder)
    index = {"weight_map": {"x.weight": "a.safetensors", "y.weight": "c.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "files that are missing: c.safetensors" in refused(folder)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "b.safetensors").unlink()
    (folder / "a.safetensors").write_bytes(b"half")
    assert "not a whole safetensors file" in refused(folder)


def test_the_checkpoint_is_not_written_over(tmp_path):
    folder = save_folder(tmp_path / "model", llama_weights())
    for output in (folder, tmp_path):
        with pytest.raises(SystemExit, match="holds the checkpoint itself"):
            main(["--format", MXFP4.name, "--load", str(folder), "--output", str(output), "--force"])
    assert (folder / "model.safetensors").exists()
