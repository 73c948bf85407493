"""`import mindspeed_lowp.adaptor`: the one line that adds low-precision training to a Megatron script.

It registers the features with their host: MindSpeed where it is installed, Megatron's own argument parser
otherwise; that one it also lets run where there is neither CUDA nor an NPU. It belongs above the imports of
Megatron.
"""

from mindspeed_lowp import hosts

hosts.register()
