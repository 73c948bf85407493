"""The specification: every operator in a few lines of PyTorch, on any device.

All other implementations equal these to the last bit, but for sign and payload of NaN results. One module for
each family of operators.
"""
