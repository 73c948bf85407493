"""Imported once by the process that training runs and ranks are forked from."""

import importlib
import importlib.util

import torch

from mindspeed_lowp import runtime

runtime.install()  # before Megatron
torch.set_num_threads(1)

if importlib.util.find_spec("megatron.training") is not None:  # not every version's wheel has it
    importlib.import_module("mindspeed_lowp.adaptor")
    importlib.import_module("megatron.training")
