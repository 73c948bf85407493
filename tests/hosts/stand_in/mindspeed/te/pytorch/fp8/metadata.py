from mindspeed.te.pytorch.fp8.state_manager import FP8GlobalStateManager


class FP8Metadata:
    tp_world_size, tp_rank, tp_group = 1, 0, None

    @property
    def fp8_enable(self):
        return FP8GlobalStateManager.FP8_ENABLED

    @staticmethod
    def is_fp8_enable():
        return FP8GlobalStateManager.is_fp8_enabled()
