"""Reuse of quantized weights: every refusal names the flag that was typed and says what to set."""

from argparse import ArgumentParser, Namespace

import pytest

from mindspeed_lowp.features import reuse_quantized_weight
from mindspeed_lowp.features.reuse_quantized_weight import ReuseQuantizedWeightFeature, reuse_policy

MXFP8 = "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8"
REUSE = "--fp8-reuse-quantized-weight"
CHECK = "--lowp-check-reused-weights"


@pytest.mark.parametrize(
    ("flags", "policy"),
    [("", (False, False)), (REUSE, (True, False)), (f"{CHECK} {REUSE}", (True, True))],
)
def test_policy(parse, flags, policy):
    assert reuse_policy(parse(f"{MXFP8} {flags}")) == policy


def test_reuse_without_fp8(stops):
    message = stops(f"--bf16 {REUSE}")
    assert message == f"error: {REUSE} needs FP8 training: add --fp8-format e4m3 --fp8-recipe mxfp8"


@pytest.mark.parametrize("given", ["--bf16", MXFP8])
def test_check_without_reuse(stops, given):
    message = stops(f"{given} {CHECK}")
    assert message == f"error: {CHECK} has no effect without {REUSE}: add {REUSE}, or leave {CHECK} out"


@pytest.mark.parametrize(
    "graphs", ["--cuda-graph-impl local", "--enable-cuda-graph", "--external-cuda-graph"]
)
def test_captured_graphs_are_refused(stops, graphs):
    message = stops(f"{MXFP8} {REUSE} {graphs}")
    assert message.startswith(f"error: {REUSE} cannot be used with {graphs.split()[0]}: a captured graph")


def test_no_graphs_are_accepted(parse):
    assert reuse_policy(parse(f"{MXFP8} {REUSE} --cuda-graph-impl none")) == (True, False)


def test_host_with_the_option_already():
    """MindSpeed has it."""
    parser = ArgumentParser()
    parser.add_argument(REUSE, action="store_true")
    feature = ReuseQuantizedWeightFeature()
    feature.register_args(parser)
    feature.register_args(parser)
    assert reuse_policy(parser.parse_args([REUSE, CHECK])) == (True, True)


def test_arguments_that_know_nothing_of_it():
    ReuseQuantizedWeightFeature().pre_validate_args(Namespace())


def test_weights_are_dropped_although_the_write_fails(monkeypatch):
    dropped = []
    monkeypatch.setattr(reuse_quantized_weight, "drop_reused_weights", lambda: dropped.append("all"))

    @reuse_quantized_weight.drop_around_wrapper
    def write():
        dropped.append("writing")
        raise KeyError

    with pytest.raises(KeyError):
        write()
    assert dropped == ["all", "writing", "all"]


def test_a_gather_drops_the_weights_of_its_bucket_once(monkeypatch):
    dropped = []
    monkeypatch.setattr(
        reuse_quantized_weight, "drop_reused_weights", lambda weights: dropped.extend(weights)
    )

    class Buckets:
        buckets = (Namespace(params_list=["a", "b"]), Namespace(params_list=["c"]))
        param_gather_handle, param_gather_dispatched = None, False

        @reuse_quantized_weight.drop_after_gather_wrapper
        def start_param_sync(self, force_sync=False):
            assert not dropped
            self.param_gather_handle, self.param_gather_dispatched = "handle", True

        @reuse_quantized_weight.drop_after_gather_wrapper
        def finish_param_sync(self):
            assert not dropped
            self.param_gather_handle = None

    buckets = Buckets()
    for sync, expected in [
        (buckets.start_param_sync, ["a", "b", "c"]),
        (buckets.finish_param_sync, ["a", "b", "c"]),
        (buckets.finish_param_sync, []),
    ]:
        sync()
        assert dropped == expected
        dropped.clear()
