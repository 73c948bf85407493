from mindspeed.args_utils import get_mindspeed_args
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager
from torch_npu.contrib import transfer_to_npu  # noqa: F401

_args = get_mindspeed_args()
MindSpeedFeaturesManager.apply_features_pre_patches(_args)
MindSpeedFeaturesManager.apply_features_patches(_args)
