"""The list of features and the order in which their hooks run, with MindSpeed's contract."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from mindspeed_lowp.features import Feature
from mindspeed_lowp.hosts.patch_manager import PatchManager


class FeaturesManager:
    """Calls each hook of every feature in turn."""

    def __init__(self, features: Sequence[Feature], patch_manager: PatchManager) -> None:
        self.features = list(features)
        self.patch_manager = patch_manager

    def register_features_args(self, parser: ArgumentParser) -> None:
        for feature in self.features:
            feature.register_args(parser)

    def pre_validate_features_args(self, args: Namespace) -> None:
        for feature in self.features:
            feature.pre_validate_args(args)

    def post_validate_features_args(self, args: Namespace) -> None:
        for feature in self.features:
            feature.post_validate_args(args)

    def validate_features_args(self, args: Namespace) -> None:
        for feature in self.features:
            feature.validate_args(args)

    def apply_features_pre_patches(self, args: Namespace) -> None:
        for feature in self.features:
            if feature.is_need_apply(args):
                feature.pre_register_patches(self.patch_manager, args)
        self.patch_manager.apply_patches()

    def apply_features_patches(self, args: Namespace) -> None:
        for feature in self.features:
            if feature.is_need_apply(args):
                feature.register_patches(self.patch_manager, args)
        self.patch_manager.apply_patches()

    def remove_patches(self) -> None:
        self.patch_manager.remove_patches()
