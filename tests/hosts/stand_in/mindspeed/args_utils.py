import argparse

from mindspeed.features_manager import MindSpeedFeaturesManager

_MINDSPEED_ARGS = None


def get_mindspeed_args():
    global _MINDSPEED_ARGS
    if _MINDSPEED_ARGS is None:
        parser = argparse.ArgumentParser(allow_abbrev=False)
        MindSpeedFeaturesManager.register_features_args(parser)
        args, unknown = parser.parse_known_args()
        key = None
        for word in unknown:  # untyped
            if word.startswith("--"):
                key = word[2:].replace("-", "_")
                setattr(args, key, True)
            else:
                setattr(args, key, word)
        _MINDSPEED_ARGS = args
    return _MINDSPEED_ARGS
