"""Fake-quantize the layers of a model of plain PyTorch, in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import nn

from mindspeed_lowp.layers.fast_path import call_linears
from mindspeed_lowp.qat.config import MXFP4QATConfig
from mindspeed_lowp.qat.embedding import MXFP4QATEmbedding
from mindspeed_lowp.qat.linear import MXFP4QATLinear

_NEVER_CALLED = nn.modules.linear.NonDynamicallyQuantizableLinear  # nn.MultiheadAttention takes its weight

Model = TypeVar("Model", bound=nn.Module)


def convert_to_mxfp4_qat(
    module: Model,
    config: MXFP4QATConfig | None = None,
    skip_names: Sequence[str] = (),
    *,
    embeddings: bool = False,
) -> Model:
    """Replace each nn.Linear below `module` by an `MXFP4QATLinear` with its Parameters; returns `module`.

    Subclasses of nn.Linear are replaced too, whatever their own forward does (but not the `out_proj` of
    nn.MultiheadAttention, which is never called). PyTorch's transformer encoders no longer fuse their linears
    in evaluation, past the fake quantization. What has been replaced already
    stays, so that converting twice is converting once. Optimizers may be made before or after, unless scale
    factors are to be learned.

    skip_names: leave alone each layer whose dotted path contains one of these, with everything below it.
    embeddings: replace every nn.Embedding as well, by an `MXFP4QATEmbedding`.

    Raises TypeError when `module` itself is such a layer (there is nothing to put the new one into), or
    skip_names is a string.
    """
    if isinstance(skip_names, str):
        raise TypeError(f"convert_to_mxfp4_qat: skip_names={skip_names!r} is a string; give [{skip_names!r}]")
    if _replacement(module, config, embeddings) is not None:
        raise TypeError(
            f"convert_to_mxfp4_qat: the model is a {type(module).__name__} itself; use from_linear or "
            "from_embedding of the layer that is to take its place"
        )
    _convert(module, config, tuple(skip_names), embeddings, "", {})
    call_linears(module, lambda layer: isinstance(layer, MXFP4QATLinear))
    return module


def _convert(
    parent: nn.Module,
    config: MXFP4QATConfig | None,
    skip_names: tuple[str, ...],
    embeddings: bool,
    path: str,
    done: dict[nn.Module, nn.Module],
) -> None:
    # Not named_children(), which gives a layer that stands in two places once.
    for name, child in parent._modules.items():
        child_path = f"{path}.{name}" if path else name
        if child is None or any(part in child_path for part in skip_names):
            continue
        if child not in done:
            done[child] = _replacement(child, config, embeddings) or child
        setattr(parent, name, done[child])
        if done[child] is child:
            _convert(child, config, skip_names, embeddings, child_path, done)


def _replacement(module: nn.Module, config: MXFP4QATConfig | None, embeddings: bool) -> nn.Module | None:
    """The layer to take this one's place; None where it is to stay."""
    if isinstance(module, nn.Linear) and not isinstance(module, MXFP4QATLinear | _NEVER_CALLED):
        return MXFP4QATLinear.from_linear(module, config)
    if embeddings and isinstance(module, nn.Embedding) and not isinstance(module, MXFP4QATEmbedding):
        return MXFP4QATEmbedding.from_embedding(module, config)
    return None
