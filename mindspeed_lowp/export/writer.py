"""Writes an export: one shard at a time, and nothing that looks whole before it is."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mindspeed_lowp.export.checkpoint import Checkpoint, ExportError, Parameter
from mindspeed_lowp.export.huggingface import INDEX, QUANTIZATION
from mindspeed_lowp.export.packing import Packing

#: Where the writer cuts, the bytes of a file at most (one large tensor may exceed them).
SHARD_BYTES = 2 * 1024**3


@dataclass(frozen=True)
class Report:
    """What an export wrote.

    Attributes:
        quantized: names of the weights that were quantized.
        kept: layers whose weights were not, norms left out.
        bytes_read: the size of the parameters read.
        bytes_written: the size of the tensors written.
    """

    quantized: Collection[str]
    kept: list[str]
    bytes_read: int
    bytes_written: int


def export_checkpoint(
    checkpoint: Checkpoint,
    output: Path,
    packing: Packing,
    quantized: Collection[str],
    force: bool = False,
    progress: Callable[[int], Any] = lambda n: None,
) -> Report:
    """Write `checkpoint` to the folder `output`, with the weights `quantized` packed.

    Everything is written to ``output.partial`` beside it, config.json last, and that folder then gets its
    name in one step. So `output` is whole at every moment, or not there; it is replaced in the end only.

    Args:
        checkpoint: what to export.
        output: a folder that does not exist or is empty, without `force`.
        packing: the format.
        quantized: names of parameters (see `selection`).
        force: replace an earlier export, and what an interrupted one left in ``output.partial``.
        progress: called with the number of bytes read, for each parameter.

    Raises:
        ExportError: `output` holds something, or a weight's values do not fit the format.
    """
    parameters = checkpoint.parameters
    kept = [p for p in parameters if p.name not in quantized]
    layers = [p.module for p in kept if p.name.endswith(".weight") and not p.module.endswith("norm")]
    shards = _cut(checkpoint, packing, quantized) if checkpoint.cut else checkpoint.shards
    with _whole_folder(output, force) as partial:
        weight_map, written = {}, 0
        for name, shard in shards.items():
            tensors = {}
            for parameter in shard:
                tensors |= _tensors(parameter, packing, parameter.name in quantized)
                progress(parameter.bytes)
            weight_map |= dict.fromkeys(tensors, name)
            written += sum(tensor.nbytes for tensor in tensors.values())
            _save(partial / name, tensors)
            del tensors
        for file in checkpoint.files:
            shutil.copyfile(file, partial / file.name)
        if len(shards) > 1:
            index = {"metadata": {"total_size": written}, "weight_map": dict(sorted(weight_map.items()))}
            (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        _write_config(partial, checkpoint.config, packing, layers)
    return Report(sorted(quantized), layers, sum(p.bytes for p in parameters), written)


def _tensors(parameter: Parameter, packing: Packing, is_quantized: bool) -> dict[str, Tensor]:
    tensor = parameter.read()
    if not is_quantized:
        return {parameter.name: tensor.contiguous()}
    try:
        packed = packing.pack(tensor)
    except ValueError as error:
        raise ExportError(f"--load: {parameter.name} {error}") from error
    return {f"{parameter.module}.{suffix}": part for suffix, part in packed.items()}


def _cut(checkpoint: Checkpoint, packing: Packing, quantized: Collection[str]) -> dict[str, list[Parameter]]:
    """The parameters in files of at most `SHARD_BYTES`."""
    shards: list[list[Parameter]] = [[]]
    size = 0
    for parameter in checkpoint.parameters:
        is_quantized = parameter.name in quantized
        more = packing.packed_bytes(parameter.shape) if is_quantized else parameter.bytes
        if shards[-1] and size + more > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(parameter)
        size += more
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}


def _save(file: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(file.parent.stat().st_mode & 0o666)  # the library lets its owner alone read it


def _write_config(folder: Path, config: dict[str, Any], packing: Packing, ignore: list[str]) -> None:
    """config.json, with what compressed-tensors writes of the quantization."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, preset_name_to_scheme

    scheme = preset_name_to_scheme(packing.preset, ["Linear"])
    scheme.format = packing.name
    quantization = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=packing.name,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=ignore,
    )
    (folder / "config.json").write_text(json.dumps(config))
    ModelCompressor(quantization_config=quantization).update_config(str(folder))


@contextlib.contextmanager
def _whole_folder(output: Path, force: bool) -> Iterator[Path]:
    """A folder to write to, which becomes `output` if nothing is raised."""
    output = output.resolve()
    partial = output.with_name(output.name + ".partial")
    if output.exists() and (not output.is_dir() or any(output.iterdir())) and not force:
        raise ExportError(f"--output {output}: exists; --force replaces it when the export is complete")
    if output.exists() and not _is_export(output):
        raise ExportError(
            f"--output {output}: is no earlier export, which --force replaces; give another folder"
        )
    if partial.exists():
        if not force:
            raise ExportError(
                f"--output {output}: {partial} was left by an export that was interrupted, or one is running;"
                " --force removes it"
            )
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        _flush(partial)
        _replace(partial, output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _is_export(output: Path) -> bool:
    """Whether a folder is empty or has a config.json such as this module writes."""
    if not output.is_dir():
        return False
    config = output / "config.json"
    if config.is_file():
        return QUANTIZATION in json.loads(config.read_text())
    return not any(output.iterdir())


def _replace(partial: Path, output: Path) -> None:
    """Give `partial` the name `output`; what had that name is removed once it is replaced."""
    replaced = output.with_name(output.name + ".replaced")
    if output.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        output.rename(replaced)
    try:
        partial.rename(output)
    except BaseException:
        if replaced.exists():
            replaced.rename(output)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Have the files on the disk before the folder gets its name."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
