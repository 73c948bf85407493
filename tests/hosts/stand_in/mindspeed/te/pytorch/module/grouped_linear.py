import torch


class MindSpeedTEGroupedLinearGMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input_tensor, m_split=None, group_list_type=None, ori_weight=None, *weight_input_T):
        raise NotImplementedError


class MindSpeedTEColumnParallelGroupedLinear(torch.nn.Module):
    def forward(self, x, m_splits):
        raise NotImplementedError


class MindSpeedTERowParallelGroupedLinear(torch.nn.Module):
    def forward(self, x, m_splits):
        raise NotImplementedError
