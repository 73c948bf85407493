"""Megatron's real argument parser with the features hooked in."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest

from mindspeed_lowp.recipes import MXFP8Recipe, register_recipe, registry

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


@pytest.fixture
def other_recipes(monkeypatch):
    """Registers a recipe of a single format, one with options from flags, one with nothing to defer."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))

    @dataclass(frozen=True)
    class WithoutDeferral(MXFP8Recipe):
        defer_backward_quant: ClassVar[bool] = False
        defer_operands: ClassVar[str] = "weight"

    @register_recipe
    @dataclass(frozen=True)
    class OneFormat(WithoutDeferral):
        name: ClassVar[str] = "one-format"
        formats: ClassVar[tuple[str, ...]] = ("special",)
        fp8_format: str = "special"

    @register_recipe
    @dataclass(frozen=True)
    class History(WithoutDeferral):
        name: ClassVar[str] = "history"
        amax_history_len: int = 1024
        amax_compute_algo: Literal["max", "most_recent"] = "max"
        margin: int = 0

        def __post_init__(self):
            super().__post_init__()
            if self.amax_history_len < 1:
                raise ValueError(f"amax_history_len={self.amax_history_len}: expected at least 1")

    @register_recipe
    @dataclass(frozen=True)
    class OneCopy(WithoutDeferral):
        name: ClassVar[str] = "one-copy"

        def one_copy_serves_both_axes(self, role):
            return role == "weight"

    return registry
