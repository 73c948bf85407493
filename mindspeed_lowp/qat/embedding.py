"""nn.Embedding with fake-quantized rows."""

from __future__ import annotations

from torch import Tensor, nn

from mindspeed_lowp.qat.config import MXFP4QATConfig


class MXFP4QATEmbedding(nn.Embedding):
    """`Q(weight)[input]`; blocks lie along the rows, so that only those looked up are quantized.

    config: None takes the defaults of `MXFP4QATConfig`; what it says of inputs does not matter here.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *args, config: MXFP4QATConfig | None = None, **options
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, *args, **options)
        self._set(config)

    def _set(self, config: MXFP4QATConfig | None) -> None:
        self.config = config or MXFP4QATConfig()
        self.weight_quantizer = self.config.weight_quantizer().to(self.weight.device)

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, config: MXFP4QATConfig | None = None
    ) -> MXFP4QATEmbedding:
        """A fake-quantized layer with the very Parameter of `embedding`."""
        layer = cls(
            embedding.num_embeddings,
            embedding.embedding_dim,
            embedding.padding_idx,
            embedding.max_norm,
            embedding.norm_type,
            embedding.scale_grad_by_freq,
            embedding.sparse,
            device="meta",
            config=config,
        )
        layer.weight = embedding.weight
        layer._set(config)
        return layer.train(embedding.training)

    def forward(self, input: Tensor) -> Tensor:
        return self.weight_quantizer(super().forward(input))
