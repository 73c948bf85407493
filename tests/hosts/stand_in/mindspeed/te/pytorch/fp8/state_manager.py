class FP8GlobalStateManager:
    FP8_ENABLED = False

    @classmethod
    def is_fp8_enabled(cls):
        return cls.FP8_ENABLED
