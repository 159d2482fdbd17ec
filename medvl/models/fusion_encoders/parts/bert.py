"""Initialisation of fusion layers from the layers of a pretrained BERT."""

from typing import Any

from torch import nn

from medvl.encoders import TextEncoder
from medvl.errors import ConfigError, WeightsError

_BERT_NAMES = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.out": "attention.output.dense",
    "attention.norm": "attention.output.LayerNorm",
    "feed_forward.inner": "intermediate.dense",
    "feed_forward.outer": "output.dense",
    "feed_forward.norm": "output.LayerNorm",
}
"""Submodule of a `CoAttentionLayer` -> submodule of a BERT layer, which has no cross-attention."""


def init_from_bert(fusion: nn.ModuleList, bert: TextEncoder) -> None:
    """Copy the last layers of a BERT into the layers of a fusion-encoder; cross-attention keeps its weights.

    Raises ConfigError if the encoder is not a BERT, WeightsError if its layers have other sizes.
    """
    backbone: Any = bert.backbone
    blocks = getattr(getattr(backbone, "encoder", None), "layer", None)
    if not isinstance(blocks, nn.ModuleList) or any(
        name not in dict(blocks[0].named_modules()) for name in _BERT_NAMES.values()
    ):
        message = f"the fusion-encoder starts from the upper layers of a BERT; {bert.name} is not a BERT"
        raise ConfigError(message, "unsupported", field="text_encoder")
    for layer, block in zip(fusion, blocks[-len(fusion) :], strict=True):
        for name, bert_name in _BERT_NAMES.items():
            try:
                layer.get_submodule(name).load_state_dict(block.get_submodule(bert_name).state_dict())
            except RuntimeError as error:
                raise WeightsError(f"the layers of {bert.name} have other sizes: {error}", "mismatch") from error
