"""Which kind of checkpoint a folder holds."""

from __future__ import annotations

from pathlib import Path

from mindspeed_lowp.export import huggingface, megatron
from mindspeed_lowp.export.checkpoint import Checkpoint, ExportError


def open_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in a folder; of its tensors, only names and shapes are read.

    Raises:
        ExportError: it holds none that can be exported.
    """
    if not folder.is_dir():
        raise ExportError(f"--load {folder}: no such folder")
    iteration = megatron.find_iteration(folder)
    if iteration is not None:
        return megatron.open_iteration(iteration)
    if (folder / "config.json").is_file():
        return huggingface.open_folder(folder)
    raise ExportError(
        f"--load {folder}: neither a Hugging Face folder (config.json and *.safetensors) nor a Megatron"
        " checkpoint (latest_checkpointed_iteration.txt, or the files of one iteration)"
    )
