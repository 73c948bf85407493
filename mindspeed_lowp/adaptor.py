"""`import mindspeed_lowp.adaptor`: the one line that adds low-precision training to a Megatron script.

It lets Megatron run where there is neither CUDA nor an NPU, and registers the features with their host:
MindSpeed where it is installed, Megatron's own argument parser otherwise. It belongs above the imports of
Megatron.
"""

from mindspeed_lowp import hosts, runtime

runtime.install()
hosts.register()
