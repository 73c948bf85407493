"""What a checkpoint is to the export: names, shapes, and a way to read each parameter when its turn comes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class ExportError(Exception):
    """The user's mistake, or a checkpoint that cannot be exported: the message is all they need to see."""


@dataclass(frozen=True)
class Parameter:
    """A parameter that has not been read yet.

    Attributes:
        name: dotted, as in the exported files: ``model.layers.0.mlp.up_proj.weight``.
        shape: that of the tensor that `read` returns, ``[N, K]`` for the weight of a linear.
        dtype: of that tensor.
        read: reads it, on the CPU.
        layer: the name that the training run knew its layer by, which `--skip-names` may also mean.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    layer: str = ""

    @property
    def module(self) -> str:
        """Dotted name of the layer that holds it."""
        return self.name.rpartition(".")[0]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Training:
    """What a checkpoint tells of the quantization-aware training that made it.

    Attributes:
        scheme: of `--qat-scheme`: ``w4a16-mxfp4-moe-only``; empty without such training.
        skip_names: of `--qat-skip-names`.
        scale_mode: of `--qat-scale-mode`; None for the scheme's own.
        by_mindspeed: the run did not know that flag, so it was MindSpeed's own training.
    """

    scheme: str = ""
    skip_names: tuple[str, ...] = ()
    scale_mode: str | None = None
    by_mindspeed: bool = False

    @property
    def experts_only(self) -> bool:
        return self.scheme.endswith("-moe-only")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint to export.

    Attributes:
        shards: the parameters, in the files that they will be written to. With `cut`, all in one list, for
            the writer to cut.
        config: of `config.json`, without the quantization.
        cut: whether the writer is to cut the parameters into files.
        files: other files to copy (tokenizer, generation options).
        left_out: names of those that are not copied.
        training: what is known of the training.
        notes: what the user should know about the names that were chosen.
    """

    shards: dict[str, list[Parameter]]
    config: dict[str, Any]
    cut: bool = False
    files: list[Path] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    training: Training = Training()
    notes: list[str] = field(default_factory=list)

    @property
    def parameters(self) -> list[Parameter]:
        return [parameter for shard in self.shards.values() for parameter in shard]
