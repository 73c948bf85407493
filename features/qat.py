"""Quantization-aware training: `--qat-scheme`, on the layers of the model that Megatron built.

The layers keep their Parameters in high precision, and checkpoints are ordinary ones; what a layer multiplies
is fake-quantized. Together with `--fp8-recipe` that recipe then multiplies the fake-quantized tensors.
"""

from __future__ import annotations

import functools
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from typing import Any

from mindspeed_lowp.features.base import MINDSPEED_IS_HOST, Feature
from mindspeed_lowp.features.command_line import add_option, stop, typed
from mindspeed_lowp.layers import Conversion, is_expert, nothing_converted, unmatched
from mindspeed_lowp.qat import SCHEMES, FakeQuantRecipe, default_scale_mode, get_qat_recipe
from mindspeed_lowp.recipes import Recipe

_TITLE = "quantization-aware training"
_MOE_ONLY = "-moe-only"
_OPTIONS = ("--qat-clip-grad", "--qat-skip-names", "--qat-scale-mode")
_SHARDED = ("--use-torch-fsdp2", "--use-megatron-fsdp", "--use-custom-fsdp")

# MindSpeed's own schemes and how they round scales.
_MINDSPEEDS = {
    "w4a16-mxfp4": "floor",
    "w4a16-mxfp4-moe-only": "floor",
    "w4a4-mxfp4": "floor",
    "w4a8-moe-only": "floor",
    "w8a16-mxfp8": "ceil",
    "w8a16-mxfp8-moe-only": "ceil",
}

_SHOWN = 8  # layers named at start-up


class QATFeature(Feature):
    """Options, checks, and a patch that gives layers their recipe after FP8 training has."""

    def __init__(self) -> None:
        super().__init__("qat-scheme")

    def register_args(self, parser: ArgumentParser) -> None:
        add_option(
            parser,
            _TITLE,
            "--qat-scheme",
            choices=[scheme + suffix for scheme in SCHEMES for suffix in ("", _MOE_ONLY)],
            help="Train the linear layers on fake-quantized weights (w4, w8) and inputs (a4, a8; a16 leaves "
            "them as they are); with -moe-only, those of experts only. The output layer and the router are "
            "never fake-quantized.",
        )
        add_option(
            parser,
            _TITLE,
            "--qat-clip-grad",
            action="store_true",
            help="No gradient for weights and inputs that saturate when they are fake-quantized.",
        )
        add_option(
            parser,
            _TITLE,
            "--qat-skip-names",
            nargs="+",
            action="extend",
            metavar="NAME",
            help="Do not fake-quantize layers whose fully qualified name contains one of these names (case "
            "matters).",
        )
        add_option(
            parser,
            _TITLE,
            "--qat-scale-mode",
            choices=["round", "floor", "ceil"],
            default=None,  # the scheme's own; None tells that the flag was left out
            help="How the scales of weights and of MXFP4 inputs become powers of two: `round` to the nearest "
            "(default; the rule of AMCT), `floor` (OCP's, default of w8a16-mxfp8, which has no `round`) or "
            "`ceil` (nothing saturates).",
        )

    def pre_validate_args(self, args: Namespace) -> None:
        scheme = getattr(args, "qat_scheme", None)
        if not scheme:
            flag = typed(*_OPTIONS)
            if flag:
                stop(
                    f"{flag} has no effect without --qat-scheme: add --qat-scheme w4a16-mxfp4, or leave "
                    f"{flag} out"
                )
            return
        if scheme.endswith(_MOE_ONLY) and not getattr(args, "num_experts", None):
            stop(
                f"--qat-scheme {scheme} has no effect on a model without experts: add --num-experts, or set "
                f"--qat-scheme {scheme.removesuffix(_MOE_ONLY)}"
            )
        if _is_mindspeeds(args):
            args.qat_scale_mode = _MINDSPEEDS[scheme]  # for who exports the checkpoint
            return
        if _name(scheme) not in SCHEMES:
            stop(f"--qat-scheme {scheme} is MindSpeed's own: leave {typed(*_OPTIONS)} out")
        if MINDSPEED_IS_HOST and not getattr(args, "fp8", None):
            own = ", ".join(_MINDSPEEDS)
            stop(
                f"--qat-scheme {scheme}: MindSpeed's layers take it together with FP8 training only: add "
                f"--fp8-format e4m3 --fp8-recipe mxfp8, or take a scheme of MindSpeed's own ({own}) without "
                f"{', '.join(_OPTIONS)}"
            )
        self._check_scales(args, _name(scheme))
        flag = typed(*_SHARDED)
        if flag:
            stop(
                f"{flag} cannot be used with --qat-scheme {scheme}: sharded parameters are not supported; "
                "use --use-distributed-optimizer"
            )

    def _check_scales(self, args: Namespace, scheme: str) -> None:
        mode = args.qat_scale_mode
        if mode:
            try:
                get_qat_recipe(scheme, scale_mode=mode)
            except ValueError as error:
                _, _, accepted = str(error).partition("expected one of ")
                stop(f"--qat-scale-mode {mode}: --qat-scheme {args.qat_scheme} takes {accepted}")
        if args.qat_clip_grad and mode == "ceil" and scheme != "w4a8-mxfp4":
            stop(
                "--qat-clip-grad has no effect with --qat-scale-mode ceil, by which nothing saturates: leave "
                "one of the two out"
            )

    def register_patches(self, patch_manager: Any, args: Namespace) -> None:
        patch_manager.register_patch("megatron.training.training.get_model", fake_quantize_model_wrapper)


def _name(scheme: str) -> str:
    return scheme.removesuffix(_MOE_ONLY)


def _is_mindspeeds(args: Namespace) -> bool:
    """Whether MindSpeed's own fake quantization is wanted: its scheme, and no flag that it has not."""
    return MINDSPEED_IS_HOST and args.qat_scheme in _MINDSPEEDS and not typed(*_OPTIONS)


def fake_quantize_model_wrapper(get_model: Callable[..., list]) -> Callable[..., list]:
    """Fake-quantize the linears of what Megatron's `get_model` builds, on top of the recipes they have."""

    @functools.wraps(get_model)
    def wrapper(*args: Any, **kwargs: Any) -> list:
        from megatron.training import get_args, print_rank_0

        options = get_args()
        scheme = options.qat_scheme
        if not scheme:
            return get_model(*args, **kwargs)  # a patch outlives the run that asked for it
        if _is_mindspeeds(options):
            print_rank_0(f"QAT active with scheme {scheme}: MindSpeed's own, scales by {_MINDSPEEDS[scheme]}")
            return get_model(*args, **kwargs)
        options.qat_scheme = None  # or MindSpeed's experts would be fake-quantized by MindSpeed, too
        try:
            model = get_model(*args, **kwargs)
        finally:
            options.qat_scheme = scheme
        _fake_quantize(model, options, print_rank_0)
        return model

    return wrapper


def _fake_quantize(model: list, args: Namespace, log: Callable[[str], None]) -> None:
    from mindspeed_lowp.megatron.convert import convert_chunks  # when Megatron has been imported

    if not MINDSPEED_IS_HOST:
        from mindspeed_lowp.megatron import own_layers  # noqa: F401

    scheme, skip_names = args.qat_scheme, args.qat_skip_names or []
    moe_only = scheme.endswith(_MOE_ONLY)
    mode = args.qat_scale_mode or default_scale_mode(_name(scheme))

    def choose(name: str, module: Any) -> Recipe | None:
        if any(part in name for part in skip_names) or (moe_only and not is_expert(module)):
            return None
        base = getattr(module, "recipe", None)
        return get_qat_recipe(_name(scheme), base=base, scale_mode=mode, clip_grad=args.qat_clip_grad)

    def check(conversion: Conversion) -> None:
        message = unmatched(skip_names, conversion.names)
        if message:
            stop(f"--qat-skip-names: {message}")
        if args.num_experts and not conversion.experts:
            stop(
                f"--qat-scheme {scheme}: the experts of this model are of a kind that cannot be "
                "fake-quantized here: leave the flag out"
            )
        if not conversion.converted:
            stop(f"{typed('--qat-skip-names') or f'--qat-scheme {scheme}'}: {nothing_converted(conversion)}")

    report = convert_chunks(model, choose, check)
    for line in _start_up_lines(model, report, args, mode):
        log(line)


def _start_up_lines(model: list, report: Conversion, args: Namespace, mode: str) -> Iterator[str]:
    """What the first rank did with its layers; tensor-parallel ranks do the same with their shards."""
    rule = f"scales by {mode}"
    if MINDSPEED_IS_HOST:
        rule += f" (not MindSpeed's own scheme, whose rule is {_MINDSPEEDS.get(args.qat_scheme, 'floor')})"
    clipped = ", no gradient for what saturates" if args.qat_clip_grad else ""
    yield f"QAT active with scheme {args.qat_scheme}: {rule}{clipped}"
    bases = {
        module.recipe.base.name
        for chunk in model
        for module in chunk.modules()
        if isinstance(getattr(module, "recipe", None), FakeQuantRecipe)
    }
    yield (
        f"Fake-quantized layers: {len(report.linears)} linears, {len(report.grouped)} grouped; multiplied in "
        f"{' and '.join(sorted(bases)) or 'high precision'}"
    )
    shown = report.kept[:_SHOWN] + ["..."] * (len(report.kept) > _SHOWN)
    routers = ["every MoE router"] if args.num_experts else []
    yield f"Not fake-quantized: {', '.join(routers + shown) or 'none'}"
