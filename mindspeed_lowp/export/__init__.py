"""Deployment: a trained checkpoint as packed weights and scales that inference engines read.

    python -m mindspeed_lowp.export --format mxfp4-pack-quantized --load CHECKPOINT --output FOLDER

A *source* (`huggingface`, `megatron`) lists a checkpoint's parameters without reading them; `selection` says
which of them are quantized, `packing` how, and `writer` writes them one shard at a time. `llama` gives
Megatron's parameters the names of Hugging Face's models, where the two compute the same. See docs/export.md.
"""

from mindspeed_lowp.export.checkpoint import Checkpoint, ExportError, Parameter
from mindspeed_lowp.export.packing import MXFP4, MXFP8, Packing
from mindspeed_lowp.export.sources import open_checkpoint
from mindspeed_lowp.export.writer import Report, export_checkpoint

__all__ = [
    "MXFP4",
    "MXFP8",
    "Checkpoint",
    "ExportError",
    "Packing",
    "Parameter",
    "Report",
    "export_checkpoint",
    "open_checkpoint",
]
