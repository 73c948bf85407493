"""Quantization-aware training by the name of its scheme: bits and format of weights and of activations."""

from __future__ import annotations

from mindspeed_lowp.qat.grids import MXFP4Grid, MXFP8Grid, ScaleMode, check_choice
from mindspeed_lowp.qat.high_precision import HighPrecisionRecipe
from mindspeed_lowp.qat.recipe import FakeQuantRecipe
from mindspeed_lowp.recipes import Recipe

#: The grids of weights and of inputs.
_GRIDS: dict[str, tuple[type, type | None]] = {
    "w4a16-mxfp4": (MXFP4Grid, None),
    "w4a4-mxfp4": (MXFP4Grid, MXFP4Grid),
    "w4a8-mxfp4": (MXFP4Grid, MXFP8Grid),
    "w8a16-mxfp8": (MXFP8Grid, None),
}
SCHEMES = tuple(_GRIDS)


def default_scale_mode(scheme: str) -> ScaleMode:
    """How scales of the scheme's weights are rounded: the FakeQuant toolkit's rule, for MXFP8 that of OCP."""
    return "floor" if _GRIDS[scheme][0] is MXFP8Grid else "round"


def get_qat_recipe(
    scheme: str,
    *,
    base: Recipe | None = None,
    scale_mode: ScaleMode | None = None,
    clip_grad: bool = False,
    block_size: int = 32,
    scale_factor: float = 6.0,
    backend: str = "auto",
) -> FakeQuantRecipe:
    """The recipe of a scheme, for `convert_model`, `lowp_linear` and `lowp_grouped_linear`.

    scheme: "w4a16-mxfp4", "w4a4-mxfp4", "w4a8-mxfp4" (inputs in MXFP8, OCP scales) or "w8a16-mxfp8".
    base: the recipe that multiplies what has been fake-quantized; None multiplies in high precision. One that
        is quantization-aware already lends its own base.
    scale_mode: of the weights and of MXFP4 inputs; None for `default_scale_mode`.
    clip_grad: no gradient for elements that saturate.
    block_size, scale_factor, backend: of the MXFP4 grid.

    Raises ValueError for a value that is not supported.

    >>> get_qat_recipe("w4a16-mxfp4").defers("weight")
    True
    """
    check_choice("scheme", scheme, SCHEMES)
    mode = scale_mode or default_scale_mode(scheme)
    mxfp4 = {"block_size": block_size, "scale_factor": scale_factor, "scale_mode": mode, "backend": backend}
    weight_grid, input_grid = _GRIDS[scheme]
    weight = MXFP4Grid(**mxfp4) if weight_grid is MXFP4Grid else MXFP8Grid(mode)
    inputs = {None: lambda: None, MXFP4Grid: lambda: weight, MXFP8Grid: MXFP8Grid}[input_grid]()
    if isinstance(base, FakeQuantRecipe):
        base = base.base
    return FakeQuantRecipe(base or HighPrecisionRecipe(), weight, inputs, clip_grad)
