"""The contract of a feature, which is MindSpeed's."""

from __future__ import annotations

import importlib.util
from argparse import ArgumentParser, Namespace
from typing import Any

from mindspeed_lowp.features.command_line import add_choices, stop

MINDSPEED_IS_HOST = importlib.util.find_spec("mindspeed") is not None

if MINDSPEED_IS_HOST:
    from mindspeed.features_manager.feature import MindSpeedFeature

    class Feature(MindSpeedFeature):
        """MindSpeed's, except that a flag of ours takes effect at every --optimization-level."""

        def is_need_apply(self, args: Namespace) -> bool:
            return self.default_patches or bool(getattr(args, self.feature_name, None))

else:

    class Feature:
        """One feature: its options, the checks on them, and the patches that make it work.

        A host calls `register_args` before the command line is parsed; around its own validation
        `pre_validate_args` before, `post_validate_args` and then `validate_args` after; and, when
        `is_need_apply` says so, `pre_register_patches` and `register_patches`.

        feature_name: the name of the attribute of the parsed arguments that turns the feature on.
        optimization_level: 0 for a feature that is always on.
        """

        def __init__(self, feature_name: str, optimization_level: int = 2) -> None:
            self.feature_name = feature_name.lower().strip().replace("-", "_")
            self.optimization_level = optimization_level
            self.default_patches = optimization_level == 0

        def is_need_apply(self, args: Namespace) -> bool:
            """Whether the patches are wanted."""
            return self.default_patches or bool(getattr(args, self.feature_name, None))

        def register_args(self, parser: ArgumentParser) -> None:
            """Add this feature's options to the host's parser."""

        def pre_validate_args(self, args: Namespace) -> None:
            """Check what the user typed, before the host derives anything from it."""

        def validate_args(self, args: Namespace) -> None:
            """Check the arguments as the host's validation left them, after every `post_validate_args`."""

        def post_validate_args(self, args: Namespace) -> None:
            """Put back what `pre_validate_args` hid from the host's validation."""

        def pre_register_patches(self, patch_manager: Any, args: Namespace) -> None:
            """Register the patches that others build on."""

        def register_patches(self, patch_manager: Any, args: Namespace) -> None:
            """Register the patches, by `patch_manager.register_patch(dotted_name, replacement)`."""

        def incompatible_check(self, global_args: Namespace, check_args: str) -> None:
            """Stop when this feature and the argument `check_args` are both on."""
            if getattr(global_args, self.feature_name, None) and getattr(global_args, check_args, None):
                stop(f"{_flag(self.feature_name)} and {_flag(check_args)} cannot be used together")

        def dependency_check(self, global_args: Namespace, check_args: str) -> None:
            """Stop when this feature is on without the argument `check_args`."""
            if getattr(global_args, self.feature_name, None) and not getattr(global_args, check_args, None):
                stop(f"{_flag(self.feature_name)} needs {_flag(check_args)}")

        @staticmethod
        def add_parser_argument_choices_value(
            parser: ArgumentParser, argument_name: str, new_choice: Any
        ) -> None:
            """Let an option that the host has take one more value."""
            add_choices(parser, argument_name, new_choice)

    def _flag(argument: str) -> str:
        return "--" + argument.replace("_", "-")
