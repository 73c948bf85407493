"""MindSpeed as the host: our features join its list before its adaptor reads it."""

from __future__ import annotations

import sys

from mindspeed_lowp.features import create_features
from mindspeed_lowp.features.command_line import stop

_ADAPTOR = "mindspeed.megatron_adaptor"
_registered = False


def register() -> None:
    """Append the features to MindSpeed's list, then let its adaptor patch Megatron with all of them.

    Calling it again changes nothing. Stops the run where MindSpeed's adaptor has done its work already.
    """
    global _registered
    if _registered:
        return
    if _ADAPTOR in sys.modules:
        stop(
            f"`import {_ADAPTOR}` came before `import mindspeed_lowp.adaptor`, too early for these features "
            "to join: swap the two lines (mindspeed_lowp.adaptor imports the other by itself)"
        )
    # Importing the package fills the list with MindSpeed's own features.
    from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager

    MindSpeedFeaturesManager.FEATURES_LIST.extend(create_features())
    _registered = True
    import mindspeed.megatron_adaptor  # noqa: F401
