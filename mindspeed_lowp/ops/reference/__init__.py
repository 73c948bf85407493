"""The specification: every operator in a few lines of PyTorch, on any device.

All other implementations equal these to the last bit. One module for each family of operators.
"""
