"""SigLIP tokenizer: a SentencePiece vocabulary without a first token, lower case and no
punctuation.
"""

import json
import pickle
from pathlib import Path

import pytest
import tokenizers
import torch
from helpers.errors import raises

import medvl
from medvl.data.tokenizer.tokenizer import load_tokenizer
from medvl.errors import ConfigError

TEXTS = ["No effusion.", "effusion, NO_effusion; (no) a fusion's", "fuse?", ""]
PIECES = ["<pad>", "</s>", "<unk>", "▁no", "▁effusion", "▁", *"nofuseia"]
LENGTH = 16


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder as in SigLIP's repositories: the end token is also padding, and cleaning
    is not stated.
    """
    pieces = [(piece, -float(rank) / 4) for rank, piece in enumerate(dict.fromkeys(PIECES))]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=2))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    backend.add_special_tokens(["<pad>", "</s>", "<unk>"])
    target = tmp_path / "siglip"
    target.mkdir()
    backend.save(str(target / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "pad_token": "</s>",
    }
    (target / "tokenizer_config.json").write_text(json.dumps({**config, "unk_token": "<unk>"}))
    return target


def test_siglip_ids_match_open_clip(folder: Path) -> None:
    import open_clip

    reference = open_clip.tokenizer.HFTokenizer(
        str(folder), context_length=LENGTH, clean="canonicalize"
    )
    tokenizer = load_tokenizer(folder, cleaning="canonical", max_tokens=LENGTH)
    ids_BT, mask_BT = tokenizer(TEXTS)
    full = torch.full((len(TEXTS), LENGTH), tokenizer.pad_id)
    full[:, : ids_BT.shape[1]] = ids_BT
    assert torch.equal(full, reference(TEXTS))
    assert (tokenizer.sep_id, tokenizer.pad_id, tokenizer.cls_id) == (1, 1, 1)
    assert mask_BT.sum(dim=1).tolist()[-1] == 1  # only the last token
    assert not torch.equal(load_tokenizer(folder)(TEXTS)[0], ids_BT)


def test_saved_tokenizer_keeps_text_cleaning(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder, cleaning="canonical", max_tokens=LENGTH)
    tokenizer.save(tmp_path / "saved")
    for again in (load_tokenizer(tmp_path / "saved"), pickle.loads(pickle.dumps(tokenizer))):
        assert torch.equal(again(TEXTS)[0], tokenizer(TEXTS)[0])
    path = tmp_path / "saved" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "medvl_text": "unknown"}))
    with raises(ConfigError, "unknown_name", "medvl_text"):
        load_tokenizer(tmp_path / "saved")


def test_words_without_a_first_token(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, cleaning="canonical")
    ids_BT, mask_BT = tokenizer(["no effusion"])
    assert tokenizer.word_ids(ids_BT, mask_BT).tolist() == [[0, 1, -1]]


@pytest.mark.parametrize(("name", "canonical"), [("ViT-B-16-SigLIP", True), ("ViT-B-32", False)])
def test_open_clip_models_clean_texts_as_in_training(
    name: str, canonical: bool, folder: Path
) -> None:
    small = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 1, "embed_dim": 32}
    model = medvl.create_model(
        "siglip",
        image_encoder="resnet_tiny",
        text_encoder=f"open_clip:{name}",
        text_arguments=small,
        image_size=64,
        tokenizer=folder,
    )
    assert model.tokenizer is not None
    expected = load_tokenizer(folder, cleaning="canonical" if canonical else None)(TEXTS)[0]
    assert torch.equal(model.tokenizer(TEXTS)[0], expected)
    assert model.text_encoder.pad_id == 1  # the text encoder attends to it
