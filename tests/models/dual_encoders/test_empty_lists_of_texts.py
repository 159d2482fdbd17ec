"""Empty lists of texts are refused with an error that names them, by every way to encode texts."""

from typing import Any

import pytest
import torch
from helpers import gloria_ranks
from helpers.errors import raises

import medvl
from medvl.errors import ConfigError, EvaluationError
from medvl.eval.core.full_pass import embed_texts
from medvl.models import DualEncoder

TINY = {
    "image_encoder": "resnet_tiny",
    "image_arguments": {},
    "image_size": 64,
    "text_encoder": "tiny_bert",
}
SYSTEMS: dict[str, dict[str, Any]] = {
    "convirt": {"frozen_text_layers": 1},
    "gloria": {},
    "mutual_info": {},
    "carzero": {"text_arguments": {}},
    "medklip": {"text_arguments": {}, "decoder_heads": 2},
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_an_empty_list_of_texts_is_refused(name: str) -> None:
    settings = {**TINY, "projection_dim": 16, "max_tokens": 64, **SYSTEMS[name]}
    model = medvl.create_model(name, tokenizer=gloria_ranks.tiny_tokenizer(), **settings).eval()
    assert isinstance(model, DualEncoder)
    for call in (
        lambda: model.encode_text([]),
        lambda: model.embed_texts([]),
        lambda: model.similarity(torch.zeros(1, 1, 64, 64, dtype=torch.uint8), []),
        lambda: model.tokenize([]),
    ):
        with raises(ConfigError, "empty", "texts"):
            call()
    with raises(EvaluationError, "empty", "texts"):
        embed_texts(model, [])
    with raises(ConfigError, "wrong_type", "text"):
        medvl.heatmap(model, torch.zeros(64, 64, dtype=torch.uint8).numpy(), [])
