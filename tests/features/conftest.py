"""Megatron's real argument parser with the features hooked in."""

import pytest

MODEL = (
    "--transformer-impl local --num-layers 1 --hidden-size 32 --num-attention-heads 1 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 1 --train-iters 1 --tokenizer-type NullTokenizer "
    "--vocab-size 9 --mock-data"
).split()


@pytest.fixture
def parse(monkeypatch):
    """parse("--flag value ...") -> arguments as `pretrain()` gets them; SystemExit where a run would stop."""
    from megatron.training import arguments

    from mindspeed_lowp.hosts import bare_megatron

    def parse(flags: str):
        monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *MODEL, *flags.split()])
        return arguments.validate_args(arguments.parse_args(), {})

    # Megatron asks the device; there may be none.
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    bare_megatron.register()
    yield parse
    bare_megatron.unregister()


@pytest.fixture
def stops(parse):
    """stops(flags) -> the message with which these flags end the run."""

    def stops(flags: str) -> str:
        with pytest.raises(SystemExit) as info:
            parse(flags)
        message = str(info.value.code)
        assert message.startswith("error: --")
        return message

    return stops
