"""What the README shows as Python runs."""

import re
from pathlib import Path

import torch
from torch import nn

from mindspeed_lowp import convert_model, get_recipe
from mindspeed_lowp.recipes import registry

ROOT = Path(__file__).parents[1]
README, QAT = (ROOT / "README.md").read_text(), (ROOT / "docs" / "qat.md").read_text()


def code(marker, text=README):
    """The one block of Python that contains `marker`."""
    [block] = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if marker in block]
    return block


def test_a_recipe_of_ones_own_takes_fifteen_lines(monkeypatch):
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    block = code("@register_recipe")
    assert len([line for line in block.splitlines() if line.strip()]) <= 15
    exec(block, {"__name__": "readme"})

    model = nn.Linear(64, 64, bias=False)
    convert_model(model, get_recipe("mxfp8-clipped", limit=2.0))
    x = torch.randn(32, 64)
    x[0, 0] = 1000
    bound = 2 * x.std()
    clipped = nn.Linear(64, 64, bias=False)
    clipped.load_state_dict(model.state_dict())
    convert_model(clipped, get_recipe("mxfp8"))
    assert torch.equal(model(x), clipped(x.clamp(-bound, bound)))


def test_a_model_is_converted():
    model = nn.ModuleDict({"body": nn.Linear(32, 32), "lm_head": nn.Linear(32, 8)})
    names = {"model": model}
    exec(code("convert_model("), names)
    assert (names["report"].linears, names["report"].kept) == (["body"], ["lm_head"])


def test_a_model_is_fake_quantized():
    model = nn.ModuleDict({"body": nn.Linear(32, 32), "lm_head": nn.Linear(32, 8)})
    exec(code("convert_to_mxfp4_qat("), {"model": model})
    assert [type(layer).__name__ for layer in model.values()] == ["MXFP4QATLinear", "Linear"]


def test_the_examples_of_quantization_aware_training(tmp_path, monkeypatch):
    names = {
        "model": nn.ModuleDict({"body": nn.Linear(32, 32), "lm_head": nn.Linear(32, 8)}),
        "x": torch.randn(6, 32),
        "weights": torch.randn(2, 32, 16),
        "tokens_per_expert": [2, 4],
    }
    exec(code("lowp_grouped_linear(", QAT), names)
    assert names["y"].shape == (6, 16)
    assert names["model"]["body"].recipe.base.name == "mxfp8"

    monkeypatch.chdir(tmp_path)
    names["model"] = nn.ModuleDict({"body": nn.Linear(32, 32), "lm_head": nn.Linear(32, 8)})
    torch.save(names["model"].state_dict(), "float.pt")
    exec(code("convert_to_mxfp4_qat(", QAT).replace("...\n", ""), names | {"torch": torch})
    assert torch.load("qat.pt").keys() == torch.load("float.pt").keys()
