"""What is put into Megatron: parallel linears and experts with a recipe. Its modules import Megatron."""
