from mindspeed.te.pytorch.module.linear import _Linear


class MindSpeedTELayerNormColumnParallelLinear(_Linear):
    def forward(self, inp):
        from mindspeed.te.pytorch.module.linear import ColumnParallelNoSeq

        return ColumnParallelNoSeq.apply(inp, self.weight, None, self.fp8_meta), None
