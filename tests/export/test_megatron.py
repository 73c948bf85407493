"""The export of Megatron's checkpoints, made by its trainer: the weights are those the trainer had."""

import json
import shutil
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch

from mindspeed_lowp.export import MXFP4, MXFP8, ExportError, open_checkpoint
from mindspeed_lowp.export.__main__ import main
from mindspeed_lowp.export.megatron import _load
from mindspeed_lowp.ops.reference import mxfp4 as reference
from mindspeed_lowp.qat import mxfp4_quant_dequant

from ..trainer import MOE, succeeded, train
from .models import assert_same_bits, load_export

LLAMA = """
    --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2
""".split()
PARALLEL = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs of two steps, each made when a test first asks for it: the folder and the last parameters."""

    @cache
    def run(*flags, ranks=1):
        folder = tmp_path_factory.mktemp("run")
        save = ["--train-iters", "2", "--save", "checkpoint", "--save-interval", "2"]
        runs = succeeded(train(folder, [*flags, *save], ranks=ranks))
        names = (name.removeprefix("module.module.") for name in runs[0].last)
        return folder / "checkpoint", dict(zip(names, runs[0].last.values(), strict=True))

    return run


def export(checkpoint, output, *flags, packing=MXFP4):
    main(["--format", packing.name, "--load", str(checkpoint), "--output", str(output), *flags])
    return load_export(output)


def fake_quantized(weight):
    return reference.quant_dequant_mxfp4(weight, 6.0, 32)


def sequential(name):
    """Megatron's name of a grouped expert's weight where experts are not grouped."""
    head, grouped, expert = name.rpartition(".weight")
    if grouped and expert:
        return head.replace(".experts.", f".experts.local_experts.{expert}.") + ".weight"
    return name


@pytest.mark.parametrize(
    ("experts", "ckpt_format"), [([], "torch_dist"), (MOE, "torch")], ids=["dense-torch_dist", "moe-torch"]
)
def test_other_models_keep_megatrons_names(trained, tmp_path, experts, ckpt_format, capsys):
    checkpoint, last = trained(*experts, "--ckpt-format", ckpt_format)
    result, decoded = export(checkpoint, tmp_path / "output")
    kinds = Counter(name.split(".")[-2] for name in decoded)
    experts_of_a_kind = 2 * (4 if experts else 1)
    assert kinds == {
        "linear_qkv": 2,
        "linear_proj": 2,
        "linear_fc1": experts_of_a_kind,
        "linear_fc2": experts_of_a_kind,
    }
    # Norms have two names: of the local modules, and of those that torch_dist writes them for.
    norms = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    norms["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    for name, parameter in last.items():
        name = sequential(name)
        if ckpt_format == "torch_dist":
            for local, stored in norms.items():
                name = name.replace(local, stored)
        expected = fake_quantized(parameter) if name in decoded else parameter
        assert_same_bits(result.pop(name), expected, name)
    assert not result
    assert "Names are Megatron's own" in capsys.readouterr().out
    assert set(json.loads((tmp_path / "output" / "config.json").read_text())) == {"quantization_config"}


def as_llama(last, experts):
    """Llama's parameters by the formulas: heads in groups of queries, key and value; gates before ups."""
    expected = {
        "model.embed_tokens.weight": last["embedding.word_embeddings.weight"],
        "model.norm.weight": last["decoder.final_layernorm.weight"],
        "lm_head.weight": last["output_layer.weight"],
    }
    for layer in range(2):
        megatron, prefix = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        qkv = last[megatron + "self_attention.linear_qkv.weight"]  # 2 groups of 2 queries, heads of 16 rows
        q, k, v = [], [], []
        for group in qkv.split(64):
            q.append(group[:32])
            k.append(group[32:48])
            v.append(group[48:])
        for kind, parts in {"q": q, "k": k, "v": v}.items():
            expected[f"{prefix}self_attn.{kind}_proj.weight"] = fake_quantized(torch.cat(parts))
        proj = last[megatron + "self_attention.linear_proj.weight"]
        expected[f"{prefix}self_attn.o_proj.weight"] = fake_quantized(proj)
        for norm, theirs in {"input": "input", "post_attention": "pre_mlp"}.items():
            expected[f"{prefix}{norm}_layernorm.weight"] = last[f"{megatron}{theirs}_layernorm.weight"]
        if experts:
            router = last[megatron + "mlp.router.weight"]
            expected[f"{prefix}block_sparse_moe.gate.weight"] = router
        for expert in range(4) if experts else [""]:
            mlp = megatron + ("mlp.experts." if experts else "mlp.")
            gate, up = last[f"{mlp}linear_fc1.weight{expert}"].chunk(2)
            down = last[f"{mlp}linear_fc2.weight{expert}"]
            names = ("gate_proj", "up_proj", "down_proj")
            where = f"{prefix}mlp."
            if experts:
                names, where = ("w1", "w3", "w2"), f"{prefix}block_sparse_moe.experts.{expert}."
            for name, weight in zip(names, (gate, up, down), strict=True):
                expected[f"{where}{name}.weight"] = fake_quantized(weight)
    return expected


@pytest.mark.parametrize("experts", [[], MOE], ids=["llama", "mixtral"])
def test_llama_and_mixtral_get_their_names(trained, tmp_path, experts):
    checkpoint, last = trained(*LLAMA, *experts)
    result, decoded = export(checkpoint, tmp_path / "output")
    expected = as_llama(last, experts)
    assert set(result) == set(expected)
    assert len(decoded) == 2 * (4 + 3 * 4 if experts else 4 + 3)
    for name, weight in expected.items():
        assert_same_bits(result[name], weight, name)


def test_a_tensor_parallel_run_is_exported_whole(trained, tmp_path):
    """Against the shards of rank 0: of rows, for what is column-parallel, and of columns."""
    checkpoint, last = trained(*LLAMA, *PARALLEL, ranks=2)
    result, _ = export(checkpoint, tmp_path / "output")
    mlp = "decoder.layers.1.mlp."
    gate, up = last[mlp + "linear_fc1.weight"].chunk(2)
    for name, half in {"gate": gate, "up": up}.items():
        weight = result[f"model.layers.1.mlp.{name}_proj.weight"]
        assert weight.shape == (128, 64)
        assert_same_bits(weight[:64], fake_quantized(half))
    down = result["model.layers.1.mlp.down_proj.weight"]
    assert down.shape == (64, 128)
    assert_same_bits(down[:, :64].contiguous(), fake_quantized(last[mlp + "linear_fc2.weight"]))


def test_a_quantization_aware_run_is_followed(trained, tmp_path, capsys):
    qat = ["--qat-scheme", "w4a16-mxfp4-moe-only", "--qat-scale-mode", "floor"]
    qat += ["--qat-skip-names", "layers.1.mlp.experts.linear_fc2"]
    checkpoint, last = trained(*LLAMA, *MOE, *qat)
    result, decoded = export(checkpoint, tmp_path / "output")
    assert decoded == {
        f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}.weight"
        for layer in range(2)
        for expert in range(4)
        for name in (("w1", "w3", "w2") if layer == 0 else ("w1", "w3"))
    }
    for layer in range(2):
        down = last[f"decoder.layers.{layer}.mlp.experts.linear_fc2.weight3"]
        expected = mxfp4_quant_dequant(down, scale_mode="floor") if layer == 0 else down
        assert_same_bits(result[f"model.layers.{layer}.block_sparse_moe.experts.3.w2.weight"], expected)
    assert "trained with --qat-scheme w4a16-mxfp4-moe-only" in capsys.readouterr().out
    export(checkpoint, tmp_path / "other", packing=MXFP8)
    assert "warning: with --format mxfp8-quantized" in capsys.readouterr().out


def test_mindspeeds_own_training_needs_the_rule_of_its_scales(trained, tmp_path):
    original, last = trained(*LLAMA, *MOE)
    checkpoint = Path(shutil.copytree(original, tmp_path / "checkpoint"))
    file = checkpoint / "iter_0000002" / "common.pt"
    content = torch.load(file, weights_only=False)
    content["args"].qat_scheme = "w4a16-mxfp4"
    del content["args"].qat_scale_mode  # a flag of ours only
    torch.save(content, file)
    with pytest.raises(SystemExit, match="--scale-mode is needed: MindSpeed trained this checkpoint"):
        export(checkpoint, tmp_path / "output")
    result, _ = export(checkpoint, tmp_path / "output", "--scale-mode", "floor")
    proj = last["decoder.layers.0.self_attention.linear_proj.weight"]
    expected = mxfp4_quant_dequant(proj, scale_mode="floor")
    assert_same_bits(result["model.layers.0.self_attn.o_proj.weight"], expected)


def test_the_folder_of_an_iteration_can_be_named(trained):
    checkpoint, _ = trained(*LLAMA, *MOE)
    names = [parameter.name for parameter in open_checkpoint(checkpoint).parameters]
    assert names == [parameter.name for parameter in open_checkpoint(checkpoint / "iter_0000002").parameters]


def test_files_are_cut_by_their_size(trained, tmp_path, monkeypatch):
    checkpoint, last = trained(*LLAMA, *MOE)
    monkeypatch.setattr("mindspeed_lowp.export.writer.SHARD_BYTES", 60_000)
    result, _ = export(checkpoint, tmp_path / "output")
    files = sorted((tmp_path / "output").glob("*.safetensors"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert all(file.stat().st_size < 70_000 for file in files)
    for name, weight in as_llama(last, MOE).items():
        assert_same_bits(result[name], weight, name)


def test_unfinished_and_distributed_checkpoints_are_refused(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(ExportError, match="names 7, but there is no iter_0000007"):
        open_checkpoint(tmp_path)
    for rank in ("mp_rank_00", "mp_rank_01"):
        (tmp_path / "iter_0000007" / rank).mkdir(parents=True)
        (tmp_path / "iter_0000007" / rank / "model_optim_rng.pt").write_bytes(b"")
    with pytest.raises(ExportError, match=r"2 ranks' files; .* --ckpt-format torch_dist"):
        open_checkpoint(tmp_path)


class Malicious:
    def __reduce__(self):
        return print, ("run",)


def test_nothing_in_a_checkpoint_is_run(tmp_path, capsys):
    torch.save({"args": Malicious(), "model": {"a.weight": torch.ones(2)}}, tmp_path / "file.pt")
    content = _load(tmp_path / "file.pt")
    assert torch.equal(content["model"]["a.weight"], torch.ones(2))
    assert capsys.readouterr().out == ""
