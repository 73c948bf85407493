import torch
from mindspeed.te.pytorch.fp8.metadata import FP8Metadata


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input_, weight, bias, fp8_meta):
        """FP8 of the host's own, which is to be seen in results: everything is 7."""
        ctx.save_for_backward(input_, weight)
        y = input_ @ weight.t()
        return torch.full_like(y, 7.0) if fp8_meta.is_fp8_enable() else y

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        return g @ weight, g.flatten(0, -2).t() @ x.flatten(0, -2), None, None


class ColumnParallelNoSeq(_Product):
    @staticmethod
    def forward(ctx, input_, weight, bias, fp8_meta):
        return _Product.forward(ctx, input_, weight, bias, fp8_meta)


class ColumnParallelSeq(ColumnParallelNoSeq):
    pass


class RowParallelNoSeq(ColumnParallelNoSeq):
    pass


class RowParallelSeq(ColumnParallelNoSeq):
    pass


class _Linear(torch.nn.Module):
    def __init__(self, input_size, output_size, config):
        super().__init__()
        self.config, self.fp8_meta = config, FP8Metadata()
        self.weight = torch.nn.Parameter(torch.randn(output_size, input_size).bfloat16())
        self.register_parameter("bias", None)
        self.explicit_expert_comm, self.skip_bias_add = False, True


class TEColumnParallelLinear(_Linear):
    def forward(self, input_, weight=None):
        return ColumnParallelNoSeq.apply(input_, self.weight, None, self.fp8_meta), None


class TERowParallelLinear(_Linear):
    def forward(self, input_):
        return RowParallelNoSeq.apply(input_, self.weight, None, self.fp8_meta), None
