from mindspeed.features_manager.feature import MindSpeedFeature
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager


class HostFeature(MindSpeedFeature):
    """One that shares options and a patch point with ours."""

    def __init__(self):
        super().__init__("host", optimization_level=0)

    def register_args(self, parser):
        group = parser.add_argument_group("host")
        self.add_parser_argument_choices_value(parser, "--fp8-recipe", "blockwise")
        group.add_argument("--no-use-gmm-fp8", action="store_false", dest="use_gmm_fp8")
        group.add_argument("--fp8-reuse-quantized-weight", action="store_true")
        group.add_argument("--optimization-level", type=int, default=2)

    def register_patches(self, patch_manager, args):
        patch_manager.register_patch("megatron.training.training.train_step", host_wrapper)


def host_wrapper(train_step):
    def wrapper(*args, **kwargs):
        return train_step(*args, **kwargs)

    return wrapper


MindSpeedFeaturesManager.set_features_list([HostFeature()])
