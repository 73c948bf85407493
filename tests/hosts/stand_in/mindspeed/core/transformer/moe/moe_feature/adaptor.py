import torch


class MindSpeedGmmExperts(torch.nn.Module):
    def forward(self, permuted_local_hidden_states, tokens_per_expert, permuted_probs=None):
        from mindspeed.core.transformer.moe.grouped_matmul_util import get_gmm_quant_func

        return get_gmm_quant_func(), None
