"""Take over the layers of a model that MindSpeed built."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from mindspeed_lowp.mindspeed import linear


def claim(chunks: Sequence[nn.Module], has_experts: bool) -> list[str]:
    """Make every layer of MindSpeed ours, in high precision until it is given a recipe.

    Returns the names of layers that go on computing in FP8 as MindSpeed does: of classes that are not ours to
    replace, such as those of its other features.
    """
    classes = dict(linear.CLASSES)
    if has_experts:
        from mindspeed_lowp.mindspeed import experts

        classes |= experts.CLASSES
    ours = tuple(classes.values())
    left = []
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if type(module) in classes:
                module.__class__ = classes[type(module)]
                module.claim()
            elif isinstance(module, tuple(classes)) and not isinstance(module, ours):
                left.append(name)
    return left
