"""What is put into Megatron: parallel linears and experts with a recipe.

Its modules import Megatron; but for `convert` and `delayed_scaling`, a newer one than MindSpeed's.
"""
