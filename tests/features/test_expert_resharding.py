"""The settings of optimizers, from as many parts as a checkpoint has to as many as there are optimizers."""

from types import SimpleNamespace

import pytest

from mindspeed_lowp.features.expert_resharding import redistributed

STEP = {"state": {"common_step": 2}}


def group(wd_mult, experts, **settings):
    return {
        "wd_mult": wd_mult,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "is_expert_parallel": experts,
        **settings,
    }


def optimizer(*groups):
    return SimpleNamespace(optimizer=SimpleNamespace(param_groups=list(groups)))


def alone(torchs):
    return torchs  # fp32


def around(torchs):
    return {"optimizer": torchs, "grad_scaler": None}


@pytest.mark.parametrize("state", [alone, around])
def test_of_one_optimizer_for_two(state):
    """Two ask for what they have by parameter; the checkpoint has the settings of one."""
    saved = [group(1.0, False, lr=3.0), group(0.0, False, lr=4.0)]
    asked = {
        number: {key: value for key, value in state({"state": {0: name}}).items() if value}
        for number, name in enumerate(("dense", "experts"))
    }
    optimizers = [optimizer(group(0.0, False), group(1.0, False)), optimizer(group(1.0, True))]
    result = redistributed({**asked, **state({"param_groups": saved, **STEP})}, optimizers)
    assert result == {
        0: state(
            {
                "param_groups": [group(0.0, False, lr=4.0), group(1.0, False, lr=3.0)],
                "state": {0: "dense", "common_step": 2},
            }
        ),
        1: state(
            {"param_groups": [group(1.0, True, lr=3.0)], "state": {0: "experts", "common_step": 2}},
        ),
    }


@pytest.mark.parametrize("state", [alone, around])
def test_of_two_optimizers_for_one(state):
    saved = {
        0: state({"param_groups": [group(0.0, False, lr=4.0)], **STEP}),
        1: state({"param_groups": [group(1.0, True, lr=3.0)], **STEP}),
    }
    asked = {key: value for key, value in state({"state": {0: "all"}}).items() if value}
    result = redistributed({**asked, **saved}, [optimizer(group(1.0, False), group(0.0, False))])
    assert result == state(
        {
            "param_groups": [group(1.0, False, lr=3.0), group(0.0, False, lr=4.0)],
            "state": {0: "all", "common_step": 2},
        }
    )


def test_the_same_number_of_optimizers_is_left_alone():
    for same in ({0: {"optimizer": {}}, 1: {"optimizer": {}}}, {"optimizer": {}}):
        assert redistributed(same, []) is same


def test_a_group_that_was_not_saved_stops_the_run():
    saved = around({"param_groups": [group(1.0, False)], **STEP})
    with pytest.raises(SystemExit, match=r"error: --load: .* wd_mult=0\.0.*--no-load-optim"):
        redistributed({0: {}, 1: {}, **saved}, [optimizer(group(0.0, False))] * 2)
