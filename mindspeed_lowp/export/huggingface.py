"""Folders as Hugging Face's `save_pretrained` leaves them: config.json, *.safetensors, and the tokenizer."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mindspeed_lowp.export.checkpoint import Checkpoint, ExportError, Parameter

INDEX = "model.safetensors.index.json"
#: What a quantized model's config.json has, by compressed-tensors' `QUANTIZATION_CONFIG_NAME` too.
QUANTIZATION = "quantization_config"
_CONFIG = "config.json"
# Weights in other forms: not those of the export.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "BOOL": torch.bool,
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
}
# Their linears are `Conv1D` modules, whose weights lie as [K, N].
_TRANSPOSED = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")


def open_folder(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`, its shards as they are.

    Raises:
        ExportError: it is quantized already, its weights are in no safetensors file, or files are missing.
    """
    config = json.loads((folder / _CONFIG).read_text())
    if QUANTIZATION in config:
        raise ExportError(f"--load {folder}: is quantized already: config.json has a {QUANTIZATION}")
    if config.get("model_type") in _TRANSPOSED:
        raise ExportError(
            f"--load {folder}: a {config['model_type']} stores its weights as [K, N], for which"
            " compressed-tensors has no layers"
        )
    shards = {name: _parameters(folder / name) for name in _weight_files(folder)}
    used = {*shards, INDEX, _CONFIG}
    others = sorted(
        path for path in folder.iterdir() if path.name not in used and not path.name.startswith(".")
    )
    files = [path for path in others if path.is_file() and not _holds_weights(path)]
    return Checkpoint(
        shards=shards,
        config=config,
        files=files,
        left_out=[path.name for path in others if path not in files],
    )


def _holds_weights(path: Path) -> bool:
    return path.suffix in _WEIGHTS or path.name.endswith(".index.json")


def _weight_files(folder: Path) -> list[str]:
    index = folder / INDEX
    if not index.is_file():
        found = sorted(path.name for path in folder.glob("*.safetensors"))
        if "model.safetensors" in found:
            return ["model.safetensors"]
        if len(found) == 1:
            return found
        what = (
            f"{len(found)} of them and no {INDEX}" if found else "none; save the model with safetensors first"
        )
        raise ExportError(f"--load {folder}: weights are read from *.safetensors; there are {what}")
    files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise ExportError(f"--load {folder}: {INDEX} names files that are missing: {', '.join(missing)}")
    return files


def _parameters(file: Path) -> list[Parameter]:
    from safetensors import SafetensorError, safe_open

    parameters = []
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                tensor = tensors.get_slice(name)
                dtype = _DTYPES[tensor.get_dtype()]
                parameters.append(
                    Parameter(name, tuple(tensor.get_shape()), dtype, partial(_read, file, name))
                )
    except SafetensorError as error:
        raise ExportError(f"--load {file}: not a whole safetensors file: {error}") from error
    return parameters


def _read(file: Path, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor(name)
