"""Megatron's checkpoints of GPT models, in its formats `torch_dist` and `torch`, read without Megatron.

`torch_dist` stores a model whole, however it was parallelized; the layers of a stack are one tensor with a
leading axis for the layer, and experts one with an axis for the expert (``sharded_state_dict`` of Megatron
core 0.17). `torch` stores what each rank had; one rank's file can be exported.
"""

from __future__ import annotations

import argparse
import collections
import functools
import pickle
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from mindspeed_lowp.export import llama
from mindspeed_lowp.export.checkpoint import Checkpoint, ExportError, Parameter, Training

_TRACKER = "latest_checkpointed_iteration.txt"
_DCP_METADATA = ".metadata"
_RANK_FILE = "model_optim_rng.pt"

_STACKED = re.compile(r"(^|\.)layers\.(?!\d)")  # the layers of a stack in one tensor
_EXPERT_KEY = "mlp.experts.experts."
# `weight3` of a grouped linear, which holds a tensor for each expert.
_GROUPED = re.compile(
    r"(?P<experts>.*\.experts)\.(?P<linear>linear_fc[12])\.(?P<kind>weight|bias)(?P<expert>\d+)"
)


def find_iteration(folder: Path) -> Path | None:
    """The folder of the latest iteration in a checkpoint folder, or `folder` if it is one; None if neither.

    Raises:
        ExportError: the iteration that is named does not exist.
    """
    tracker = folder / _TRACKER
    if not tracker.is_file():
        return folder if (folder / _DCP_METADATA).is_file() or _rank_files(folder) else None
    latest = tracker.read_text().strip()
    iteration = folder / (latest if latest == "release" else f"iter_{int(latest):07d}")
    if not iteration.is_dir():
        raise ExportError(f"--load {folder}: {_TRACKER} names {latest}, but there is no {iteration.name}")
    return iteration


def open_iteration(folder: Path) -> Checkpoint:
    """The checkpoint of one iteration, under the names of Hugging Face's Llama or Mixtral where it is one.

    Raises:
        ExportError: its format or the layout of a tensor is not one of those described above.
    """
    if (folder / _DCP_METADATA).is_file():
        args = _load(folder / "common.pt").get("args")
        parameters = _torch_dist(folder)
    else:
        files = _rank_files(folder)
        if len(files) != 1:
            what = f"{len(files)} ranks' files" if files else "neither .metadata nor mp_rank_00"
            raise ExportError(
                f"--load {folder}: {what}; of the format torch, a checkpoint of one rank can be exported."
                " Load it in Megatron as it was trained, and save it with --ckpt-format torch_dist"
            )
        content = _load(files[0])
        args = content.get("args")
        parameters = _torch(content["model"])
    options = vars(args) if args is not None else {}
    for parameter in parameters:
        _check_layout(parameter)
    return llama.rename(parameters, options, _training(options))


def _training(options: dict[str, Any]) -> Training:
    return Training(
        scheme=options.get("qat_scheme") or "",
        skip_names=tuple(options.get("qat_skip_names") or ()),
        scale_mode=options.get("qat_scale_mode"),
        by_mindspeed=bool(options.get("qat_scheme")) and "qat_scale_mode" not in options,
    )


def _check_layout(parameter: Parameter) -> None:
    """Refuse what would otherwise be taken for something that is no linear's weight."""
    last = parameter.name.rpartition(".")[2]
    if len(parameter.shape) > 1 and "experts" in parameter.name and last != "weight":
        raise ExportError(
            f"--load: {parameter.name} {list(parameter.shape)} is a layout of experts that is not known here;"
            " save the checkpoint with Megatron core 0.17, --ckpt-format torch_dist"
        )


# ---- torch_dist ----


def _torch_dist(folder: Path) -> list[Parameter]:
    reader = _Reader(folder)
    parameters = []
    for key, stored in reader.tensors.items():
        index: list[tuple[int, ...]] = [()]
        template = key
        if _STACKED.search(key):
            index = [(layer,) for layer in range(stored.size[0])]
            template = _STACKED.sub(r"\g<0>{}.", key, count=1)
        if _EXPERT_KEY in key and not key.partition(_EXPERT_KEY)[2][0].isdigit():
            index = [(*i, expert) for i in index for expert in range(stored.size[len(i)])]
            template = template.replace(_EXPERT_KEY, "mlp.experts.local_experts.{}.")
        template = template.replace(_EXPERT_KEY, "mlp.experts.local_experts.")
        for i in index:
            shape, read = stored.size[len(i) :], partial(reader.read, key, i)
            parameters.append(_parameter(template.format(*i), shape, stored.properties.dtype, read))
    # Layer by layer, as they will be written; the order of the keys is that of saving.
    return sorted(parameters, key=lambda parameter: _natural(parameter.name))


def _parameter(name: str, shape: Sequence[int], dtype: torch.dtype, read: Callable[[], Tensor]) -> Parameter:
    """Experts are named as Megatron names them where they are not grouped, and known by both names."""
    layer = re.sub(r"\.local_experts\.\d+\.", ".", name).rpartition(".")[0]
    return Parameter(name, tuple(shape), dtype, read, layer)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


class _Reader:
    """Reads parts of the tensors of a torch_dist checkpoint, from the chunks that hold them.

    It is the planner, too, that torch's reader hands the data to.
    """

    def __init__(self, folder: Path) -> None:
        self._reader = FileSystemReader(folder)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._target = torch.empty(0)
        self.tensors: dict[str, TensorStorageMetadata] = {
            key: stored
            for key, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata) and not key.startswith("optimizer.")
        }

    @functools.lru_cache(maxsize=1)  # noqa: B019  parts of one tensor are asked for one after the other
    def read(self, key: str, index: tuple[int, ...]) -> Tensor:
        """The tensor `key`, at `index` of its leading axes."""
        stored = self.tensors[key]
        rest = stored.size[len(index) :]
        wanted = ChunkStorageMetadata(
            offsets=torch.Size((*index, *[0] * len(rest))), sizes=torch.Size((*[1] * len(index), *rest))
        )
        self._target = torch.empty(wanted.sizes, dtype=stored.properties.dtype)
        items = create_read_items_for_chunk_list(key, stored, [wanted])
        self._reader.read_data(LoadPlan(items), self).wait()  # type: ignore[arg-type]
        target, self._target = self._target, torch.empty(0)
        return target.view(rest)

    def resolve_tensor(self, item: ReadItem) -> Tensor:
        return self._target[
            tuple(slice(o, o + n) for o, n in zip(item.dest_offsets, item.lengths, strict=True))
        ]

    def commit_tensor(self, item: ReadItem, tensor: Tensor) -> None:
        pass


# ---- torch ----


def _rank_files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"mp_rank_*/{_RANK_FILE}"))


def _torch(model: dict[str, Any]) -> list[Parameter]:
    parameters = []
    for key, tensor in model.items():
        if isinstance(tensor, Tensor):  # and not extra state
            name = _GROUPED.sub(r"\g<experts>.local_experts.\g<expert>.\g<linear>.\g<kind>", key)
            parameters.append(_parameter(name, tensor.shape, tensor.dtype, tensor.detach))
    return sorted(parameters, key=lambda parameter: _natural(parameter.name))


class _Unknown:
    """Stands for an object of a class that is not needed: of Megatron, of numpy."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    """Reads tensors, plain values and argparse's namespaces; nothing else is imported, or run."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("argparse", "Namespace"):
            return argparse.Namespace
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_parameter"):
            return getattr(torch._utils, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return _Unknown


class _PickleModule:
    """What `torch.load` asks of a pickle module."""

    Unpickler = _Unpickler
    load = staticmethod(pickle.load)


def _load(file: Path) -> dict[str, Any]:
    """A file of `torch.save`, its tensors left on disk until they are used."""
    if not file.is_file():
        raise ExportError(f"--load: {file} is missing")
    return torch.load(file, map_location="cpu", mmap=True, weights_only=False, pickle_module=_PickleModule)
