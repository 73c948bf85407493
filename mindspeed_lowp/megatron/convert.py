"""Convert a model that Megatron built: layer names over pipeline stages, agreement over ranks."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence

import torch.distributed as dist
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from torch import nn

from mindspeed_lowp.layers.convert import Conversion, convert_layers, named_layers
from mindspeed_lowp.recipes import Recipe

# Sensitive to precision, and small beside the rest: kept unless somebody builds them otherwise.
HIGH_PRECISION = ("output_layer", "router")


def convert_chunks(
    chunks: Sequence[nn.Module],
    choose: Callable[[str, nn.Module], Recipe | None],
    check: Callable[[Conversion], None],
    high_precision_blocks: Container[int] = (),
) -> Conversion:
    """Convert each linear of this rank's model chunks to the recipe that `choose(name, module)` has for it.

    Layers keep their Parameters, so optimizers, data-parallel wrappers and checkpoints are unaffected, and
    converting twice is converting once. The layers of `HIGH_PRECISION` stay as they are, and so do those in a
    transformer block of `high_precision_blocks`, counted from 0 over all pipeline stages.

    check: gets what is going to happen on all ranks together, and raises where it must not: on every rank.

    All ranks of the default process group must call it together. Returns the report of this rank.
    """
    blocks: dict[str, int | None] = {}
    layers = []
    for name, module, block in (layer for chunk in chunks for layer in _layers(chunk)):
        layers.append((name, module))
        blocks[name] = block

    def choose_elsewhere(name: str, module: nn.Module) -> Recipe | None:
        if any(part in name for part in HIGH_PRECISION) or blocks[name] in high_precision_blocks:
            return None
        return choose(name, module)

    return convert_layers(layers, choose_elsewhere, lambda here: check(Conversion.union(_of_all_ranks(here))))


def _layers(chunk: nn.Module) -> Iterator[tuple[str, nn.Module, int | None]]:
    """The layers by their name in the whole model, and the number of the transformer block around each.

    That name is without the wrappers' `module.`, and with the blocks of every pipeline stage numbered
    through: modules are numbered within their stage, `layer_number` counts from 1 over all.
    """
    blocks = {}
    for name, module in chunk.named_modules():
        stack, _, index = name.rpartition(".")
        if isinstance(module, BaseTransformerLayer) and index.isdigit():
            blocks[name] = (f"{stack}.{module.layer_number - 1}", module.layer_number - 1)
    for name, module in named_layers(chunk):
        number = None
        for local, (whole, block) in blocks.items():
            if name.startswith(local + "."):
                name, number = whole + name.removeprefix(local), block
                break
        while name.startswith("module."):
            name = name.removeprefix("module.")
        yield name, module, number


def _of_all_ranks(conversion: Conversion) -> list[Conversion]:
    if not dist.is_initialized():
        return [conversion]
    conversions = [conversion] * dist.get_world_size()
    dist.all_gather_object(conversions, conversion)
    return conversions
