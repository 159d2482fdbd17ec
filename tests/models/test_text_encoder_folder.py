"""A text encoder by the folder of another program: the checkpoint does not depend on the folder."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from helpers.errors import raises

import medvl
from medvl.encoders import create_text_encoder
from medvl.errors import ConfigError, WeightsError
from medvl.models import save

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 50,
}


@pytest.mark.parametrize("prefix", ["", "hf:"])
@pytest.mark.parametrize("pretrained", [False, True])
def test_checkpoint_loads_without_the_folder(tmp_path: Path, prefix: str, pretrained: bool) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, hidden_act="relu", attention_probs_dropout_prob=0.3)
    bert = transformers.BertModel(config)
    bert.save_pretrained(tmp_path / "bert")
    weights = {"text_weights": str(tmp_path / "bert")} if pretrained else {}
    settings = {
        "image_encoder": "resnet_tiny",
        "image_size": 32,
        "projection_dim": 4,
        "frozen_text_layers": 0,
    }
    model = medvl.create_model(
        "convirt", text_encoder=f"{prefix}{tmp_path / 'bert'}", **settings, **weights
    ).eval()
    if pretrained:
        state = model.text_encoder.backbone.state_dict()
        assert torch.equal(
            state["embeddings.word_embeddings.weight"], bert.embeddings.word_embeddings.weight
        )
    (tmp_path / "saved").mkdir()
    save(model, tmp_path / "saved")
    shutil.rmtree(tmp_path / "bert")
    again = medvl.load(tmp_path / "saved")
    ids_BT, mask_BT = torch.randint(5, 50, (2, 6)), torch.ones(2, 6, dtype=torch.bool)
    assert torch.equal(again.encode_text(ids_BT, mask_BT), model.encode_text(ids_BT, mask_BT))
    assert again.text_encoder.config == model.text_encoder.config
    assert str(tmp_path / "bert") not in again.config.text_encoder


@pytest.mark.parametrize(
    ("name", "code", "part"),
    [
        ("hf:nowhere/bert", "unknown_name", "no such folder"),
        ("hf:bret", "unknown_name", "did you mean bert"),
        ("hf:bert{hidden_size}", "malformed", "JSON object"),
        ('hf:bert{"hidden": 3}', "unknown_name", "hidden_size"),
    ],
)
def test_messages_about_names(name: str, code: str, part: str) -> None:
    with raises(ConfigError, code, names=part) as caught:
        create_text_encoder(name)
    assert len(str(caught.value)) < 300


def test_a_folder_of_other_sizes_than_the_preset_is_advised_as_the_encoder(tmp_path: Path) -> None:
    transformers.BertModel(transformers.BertConfig(**SIZES)).save_pretrained(tmp_path / "bert")
    folder = str(tmp_path / "bert")
    settings = {
        "image_encoder": "resnet_tiny",
        "text_encoder": "tiny_bert",
        "frozen_text_layers": 0,
        "vocab_size": 50,
    }
    with raises(
        WeightsError,
        "mismatch",
        "text_weights",
        names=f"text_encoder {folder!r} takes its sizes from",
    ):
        medvl.create_model("convirt", text_weights=folder, **settings)
