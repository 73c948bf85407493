"""Small checkpoints in Hugging Face's form, and what compressed-tensors reads of an export."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
from torch import Tensor

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def llama_weights(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The parameters of the Llama of `CONFIG`."""
    random = torch.Generator().manual_seed(5)

    def matrix(*shape: int) -> Tensor:
        # Magnitudes of blocks over many powers of two.
        values = torch.randn(shape, generator=random)
        return (values * torch.exp2(torch.randn(shape[0], 1, generator=random) * 4)).to(dtype)

    weights = {"model.embed_tokens.weight": matrix(48, 64), "lm_head.weight": matrix(48, 64)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for name, shape in {
            "self_attn.q_proj": (64, 64),
            "self_attn.k_proj": (32, 64),
            "self_attn.v_proj": (32, 64),
            "self_attn.o_proj": (64, 64),
            "mlp.gate_proj": (96, 64),
            "mlp.up_proj": (96, 64),
            "mlp.down_proj": (64, 96),
        }.items():
            weights[f"{prefix}{name}.weight"] = matrix(*shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{norm}.weight"] = torch.rand(64, generator=random).to(dtype)
    weights["model.norm.weight"] = torch.rand(64, generator=random).to(dtype)
    return weights


def save_folder(
    folder: Path, weights: dict[str, Tensor], shards: int = 1, config: dict | None = None
) -> Path:
    """Write a folder as `save_pretrained` does, with a tokenizer that is only bytes."""
    folder.mkdir()
    names = sorted(weights)
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
        weight_map = {name: files[i % shards] for i, name in enumerate(names)}
        for file in files:
            part = {name: weights[name] for name in names if weight_map[name] == file}
            save_file(part, folder / file, metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config or CONFIG))
    (folder / "tokenizer.json").write_bytes(b"not really")
    return folder


def load_export(folder: Path) -> tuple[dict[str, Tensor], set[str]]:
    """The weights of an export as compressed-tensors decodes them, and the names of those it decoded.

    It goes by what the export says of itself: the index, the format, and the ignored layers.
    """
    config = QuantizationConfig.model_validate(
        json.loads((folder / "config.json").read_text())["quantization_config"]
    )
    [scheme] = config.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(config.format)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        tensors = {}
        for file in sorted(set(weight_map.values())):
            part = load_file(folder / file)
            assert set(part) == {name for name, where in weight_map.items() if where == file}
            tensors |= part
    else:
        tensors = load_file(folder / "model.safetensors")

    decoded = set()
    for scale in [name for name in tensors if name.endswith(".weight_scale")]:
        module = scale.removesuffix(".weight_scale")
        assert module not in config.ignore
        parts = ("weight", "weight_packed", "weight_scale")
        state = {part: tensors.pop(f"{module}.{part}") for part in parts if f"{module}.{part}" in tensors}
        tensors[f"{module}.weight"] = compressor.decompress(state, scheme)["weight"]
        decoded.add(f"{module}.weight")
    return tensors, decoded


def assert_same_bits(result: Tensor, expected: Tensor, name: str = "") -> None:
    """Equal in dtype, shape and every bit, the signs of zeros included."""
    assert result.dtype == expected.dtype and result.shape == expected.shape, name
    assert torch.equal(result.view(torch.uint8), expected.view(torch.uint8)), name
