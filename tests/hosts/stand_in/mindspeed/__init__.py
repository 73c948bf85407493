"""A stand-in for MindSpeed: the interface of its managers, and the names in it that are relied upon.

Written from its documented contract, to run where MindSpeed is not: importing `features_manager` fills the
list; importing `megatron_adaptor` parses the command line with a parser that knows none of Megatron's
options, leaves those untyped, and patches Megatron.
"""
