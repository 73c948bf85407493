"""Megatron without MindSpeed: features hooked into `megatron.training`'s parsing and validation of arguments.

Every entry point goes through the two functions hooked, `pretrain()` as well as scripts that parse by
themselves. They are replaced wherever they have been imported, so a script may import Megatron first.
"""

from __future__ import annotations

import functools
import importlib
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

from mindspeed_lowp.features import create_bare_megatron_features
from mindspeed_lowp.features.command_line import stop, tell_nearest_flags
from mindspeed_lowp.hosts.features_manager import FeaturesManager
from mindspeed_lowp.hosts.patch_manager import PatchManager

_ARGUMENTS = "megatron.training.arguments"

features_manager = FeaturesManager(create_bare_megatron_features(), PatchManager())
_hooks = PatchManager()


def register() -> None:
    """Hook the features into Megatron; calling it again changes nothing."""
    try:
        importlib.import_module(_ARGUMENTS)
    except ModuleNotFoundError as error:
        if not _ARGUMENTS.startswith(error.name):  # a package that Megatron needs
            raise
        stop(
            "Megatron's trainer, the module megatron.training, cannot be imported: install megatron-core "
            "0.17.1 or put a Megatron-LM checkout on PYTHONPATH"
        )
    _hooks.register_patch(f"{_ARGUMENTS}.parse_args", parse_args_wrapper)
    _hooks.register_patch(f"{_ARGUMENTS}.validate_args", validate_args_wrapper)
    _hooks.apply_patches()


def unregister() -> None:
    """Leave Megatron as it was found, the features' patches included."""
    features_manager.remove_patches()
    _hooks.remove_patches()


def parse_args_wrapper(parse_args: Callable[..., Namespace]) -> Callable[..., Namespace]:
    """Add the features' options after Megatron's own and the script's."""

    @functools.wraps(parse_args)
    def wrapper(
        extra_args_provider: Callable[[ArgumentParser], ArgumentParser] | None = None,
        ignore_unknown_args: bool = False,
    ) -> Namespace:
        def provider(parser: ArgumentParser) -> ArgumentParser:
            if extra_args_provider is not None:
                parser = extra_args_provider(parser)
            features_manager.register_features_args(parser)
            tell_nearest_flags(parser)
            return parser

        args = parse_args(provider, ignore_unknown_args)
        if getattr(args, "yaml_cfg", None):
            stop(f"--yaml-cfg {args.yaml_cfg}: Megatron then ignores every flag; give the options as flags")
        return args

    return wrapper


def validate_args_wrapper(validate_args: Callable[..., Namespace]) -> Callable[..., Namespace]:
    """Check before Megatron does, and patch it now that the arguments say what is wanted.

    Megatron's modules are imported by then, which replacing a name everywhere allows for.
    """

    @functools.wraps(validate_args)
    def wrapper(args: Namespace, defaults: dict[str, Any] | None = None) -> Namespace:
        features_manager.pre_validate_features_args(args)
        features_manager.apply_features_pre_patches(args)
        features_manager.apply_features_patches(args)
        args = validate_args(args, {} if defaults is None else defaults)
        features_manager.post_validate_features_args(args)
        features_manager.validate_features_args(args)
        return args

    return wrapper
