"""Imported once by the process that the training runs are forked from."""

import torch

import mindspeed_lowp.adaptor  # noqa: F401 - before Megatron

torch.set_num_threads(1)

import megatron.training  # noqa: E402, F401
