"""Checkpoints of low-precision training: resumed to the bit, and exchanged with other kinds of layers."""

import functools
import io

import pytest
import torch

from ..checkpoint import assert_same, contents
from ..parallelism import RECIPES
from ..trainer import MOE, MXFP8, succeeded, train

DEFER = ["--mxfp8-defer-backward-quant"]
DELAYED = ["--fp8-format", "hybrid", "--fp8-recipe", "delayed"]
DELAYED += ["--fp8-amax-history-len", "4", "--fp8-amax-compute-algo", "max"]
EVALUATION = ["--eval-interval", "3", "--eval-iters", "2"]  # whose magnitudes must not count
SEQUENTIAL = [flag for flag in MOE if flag != "--moe-grouped-gemm"]
REUSE = ["--fp8-reuse-quantized-weight"]
TE = ["--transformer-impl", "transformer_engine"]
SAVE = ["--save", "checkpoint", "--save-interval", "3"]
LOAD = ["--load", "checkpoint"]


def start(folder, flags, ranks=1):
    """Six steps with a checkpoint after three; afterwards the checkpoint counts as the latest."""
    run, *_ = succeeded(train(folder, [*flags, "--train-iters", "6", *SAVE], ranks))
    (folder / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("3")
    return run


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        pytest.param([], 1, id="dense"),
        pytest.param(["--use-distributed-optimizer"], 1, id="distributed-optimizer"),
        pytest.param(MOE, 1, id="moe"),
        pytest.param(
            "--ckpt-format torch --tensor-model-parallel-size 2 --use-distributed-optimizer".split(),
            2,
            id="torch-format",
        ),
    ],
)
def test_resumed_training_is_the_same_to_the_bit(tmp_path, flags, ranks):
    through = start(tmp_path, [*MXFP8, *flags], ranks)
    # Deferral is a matter of memory: the checkpoint is the same.
    resumed, *_ = succeeded(train(tmp_path, [*MXFP8, *DEFER, *flags, "--train-iters", "6", *LOAD], ranks))
    assert len(through.losses) == 6 and resumed.losses == through.losses[3:]
    for name, parameter in through.last.items():
        assert torch.equal(parameter, resumed.last[name]), name


@pytest.mark.parametrize("experts", [[], MOE], ids=["dense", "moe"])
def test_the_history_of_delayed_scaling_is_resumed_too(tmp_path, experts):
    flags = [*DELAYED, *experts, *EVALUATION]
    through = start(tmp_path, flags)
    [resumed] = succeeded(train(tmp_path, [*flags, "--train-iters", "6", *LOAD]))
    assert resumed.losses == through.losses[3:]
    for name, parameter in through.last.items():
        assert torch.equal(parameter, resumed.last[name]), name
    # The history counts: without it the same checkpoint goes on otherwise.
    tensorwise = ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise", *experts, *EVALUATION]
    [other] = succeeded(train(tmp_path, [*tensorwise, "--train-iters", "6", *LOAD]))
    assert other.losses != resumed.losses


@pytest.mark.parametrize(
    ("recipe", "precision"),
    [
        pytest.param("mxfp8, deferred", "mxfp8 (e4m3)"),
        pytest.param("mxfp8-32x32", "mxfp8-32x32 (e4m3)", marks=pytest.mark.slow),
        pytest.param("blockwise", "blockwise (e4m3)", marks=pytest.mark.slow),
        pytest.param("hif8", "hif8 (hif8)", marks=pytest.mark.slow),
        pytest.param("delayed", "delayed (hybrid)", marks=pytest.mark.slow),
    ],
)
def test_a_bf16_checkpoint_continues_in_any_recipe_and_back(tmp_path, recipe, precision):
    through = start(tmp_path, [])
    [lowp] = succeeded(train(tmp_path, [*RECIPES[recipe].split(), "--train-iters", "6", *LOAD, *SAVE]))
    assert lowp.output.count(f"the checkpoint was trained in bf16; it continues in {precision}\n") == 1
    assert lowp.losses != through.losses[3:]
    torch.testing.assert_close(lowp.losses, through.losses[3:], rtol=0.01, atol=0)
    [back] = succeeded(train(tmp_path, ["--train-iters", "7", "--override-opt_param-scheduler", *LOAD]))
    assert back.output.count(f"the checkpoint was trained in {precision}; it continues in bf16\n") == 1
    assert all(torch.equal(lowp.last[name], parameter) for name, parameter in back.first.items())


def test_a_distributed_optimizer_is_not_taken_for_one_of_other_modules(tmp_path):
    flags = [*MXFP8, "--use-distributed-optimizer", "--clip-grad", "0", "--train-iters", "2"]
    [through] = succeeded(train(tmp_path, [*flags, "--save", "checkpoint", "--save-interval", "1"]))
    (tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("1")
    [refused] = train(tmp_path, [*flags, *TE, *LOAD])
    assert refused.exit_code == 1 and "error: with --transformer-impl transformer_engine: " in refused.output
    # What the message advises: the same state by parameter, which any modules can load.
    again = [*LOAD, "--save", "again", "--save-interval", "3", "--dist-ckpt-optim-fully-reshardable"]
    succeeded(train(tmp_path, [*flags, "--override-opt_param-scheduler", *again, "--train-iters", "1"]))
    [resumed] = succeeded(train(tmp_path, [*flags, *TE, "--override-opt_param-scheduler", "--load", "again"]))
    assert resumed.losses == through.losses[1:]


@pytest.mark.parametrize("first", ["grouped", "sequential"])
def test_grouped_and_sequential_experts_read_each_others_checkpoints(tmp_path, first):
    kinds = {"grouped": MOE, "sequential": SEQUENTIAL}
    second = "sequential" if first == "grouped" else "grouped"
    through = start(tmp_path, kinds[first])
    [resumed] = succeeded(train(tmp_path, [*kinds[second], "--train-iters", "6", *LOAD]))
    torch.testing.assert_close(resumed.losses, through.losses[3:], rtol=1e-3, atol=0)
    grouped, sequential = (through, resumed) if first == "grouped" else (resumed, through)
    # After the same three further steps: the weights of expert 2, by their two names.
    prefix = "module.module.decoder.layers.1.mlp.experts."
    a = grouped.last[prefix + "linear_fc1.weight2"]
    b = sequential.last[prefix + "local_experts.2.linear_fc1.weight"]
    torch.testing.assert_close(a, b, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize(
    ("flags", "variants"),
    [
        # The norm of all gradients, which clips them, is summed in another order by the other modules.
        pytest.param(["--clip-grad", "0"], [[*DEFER, *REUSE], TE], id="dense"),
        pytest.param([*MOE, "--clip-grad", "0"], [[*DEFER, *REUSE]], id="moe"),
        pytest.param(["--ckpt-fully-parallel-save"], [["--async-save"]], id="asynchronous"),
    ],
)
def test_the_checkpoint_is_the_same_however_it_came_about(tmp_path, flags, variants):
    flags = [*MXFP8, *flags, "--train-iters", "3", "--global-batch-size", "4", "--save-interval", "3"]
    saved = []
    for number, variant in enumerate([[], *variants]):
        succeeded(train(tmp_path, [*flags, *variant, "--save", str(number)]))
        saved.append(contents(tmp_path / str(number) / "iter_0000003"))
        assert_same(saved[-1], saved[0], str(variant))


def leave_extra_states(state, model):
    """As Transformer Engine does for every linear and every attention."""
    from mindspeed_lowp.megatron.delayed_scaling import KeepsHistory
    from mindspeed_lowp.megatron.te_attention import TEDotProductAttention

    KeepsHistory.get_extra_state = TEDotProductAttention.get_extra_state = lambda self: state


@pytest.mark.parametrize(
    ("ckpt_format", "state"),
    [
        pytest.param("torch_dist", io.BytesIO(b"amax history"), marks=pytest.mark.slow),
        ("torch_dist", torch.zeros(7, dtype=torch.uint8)),
        ("torch", torch.zeros(7, dtype=torch.uint8)),
    ],
    ids=["torch_dist-older", "torch_dist", "torch"],
)
def test_extra_states_of_transformer_engine_are_passed_over(tmp_path, ckpt_format, state):
    flags = [*TE, "--ckpt-format", ckpt_format, "--clip-grad", "0"]
    save = ["--train-iters", "1", "--save-interval", "1", "--save"]
    succeeded(train(tmp_path, [*flags, *save, "own"]))
    leave = functools.partial(leave_extra_states, state)
    succeeded(train(tmp_path, [*flags, *save, "foreign"], prepare=leave))
    if ckpt_format == "torch":
        file = tmp_path / "foreign" / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt"
        saved = torch.load(file, weights_only=False)["model"]
    else:
        saved = contents(tmp_path / "foreign" / "iter_0000001")
    kept = [value for key, value in saved.items() if "_extra_state" in key and value is not None]
    assert len(kept) == (10 if ckpt_format == "torch" else 8)  # of every linear, of attentions in the former
    assert all(("BytesIO" if isinstance(state, io.BytesIO) else "uint8") in str(value) for value in kept)
    resume = [*DELAYED, *flags, "--train-iters", "3", "--override-opt_param-scheduler", "--load"]
    [expected] = succeeded(train(tmp_path, [*resume, "own"]))
    # In the format torch, the names of parameters are those of the modules.
    for modules in [TE] if ckpt_format == "torch" else [TE, ["--transformer-impl", "local"]]:
        [resumed] = succeeded(train(tmp_path, [*resume, "foreign", *modules]))
        assert len(expected.losses) == 2 and resumed.losses == expected.losses
