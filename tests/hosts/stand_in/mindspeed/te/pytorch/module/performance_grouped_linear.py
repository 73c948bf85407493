import torch


class MindSpeedTEPerformanceColumnParallelGroupedLinear(torch.nn.Module):
    def forward(self, x, m_splits):
        raise NotImplementedError


class MindSpeedTEPerformanceRowParallelGroupedLinear(torch.nn.Module):
    def forward(self, x, m_splits):
        raise NotImplementedError
