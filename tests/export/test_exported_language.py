"""Language models to and from transformers, with their heads: equal scores both ways."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.errors import raises
from helpers.text_shards import text_vocabulary

import medvl
from medvl.common.seeding import seeded
from medvl.data.tokenizer.tokenizer import train_wordpiece
from medvl.errors import ConfigError, WeightsError
from medvl.export import export_hugging_face, import_checkpoint
from medvl.models import create_model

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}
CLASSES: dict[str, Any] = {
    "bert_mlm_nsp": (transformers.BertForPreTraining, transformers.BertConfig),
    "bert_mlm": (transformers.BertForMaskedLM, transformers.BertConfig),
    "albert_mlm_sop": (transformers.AlbertForPreTraining, transformers.AlbertConfig),
    "albert_mlm": (transformers.AlbertForMaskedLM, transformers.AlbertConfig),
}
IDS = torch.tensor([[2, 9, 12, 30, 3], [2, 7, 8, 3, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]).bool()


def published(name: str) -> Any:
    """Return transformers' model with random weights, biases too."""
    cls, config = CLASSES[name]
    sizes = {**SMALL, "num_hidden_layers": 12, "embedding_size": 16} if "albert" in name else SMALL
    torch.manual_seed(0)
    net = cls(
        config(**sizes, vocab_size=60, hidden_act="gelu_new" if "albert" in name else "gelu")
    ).eval()
    for parameter in net.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.1)
    return net


@pytest.mark.parametrize("name", list(CLASSES))
def test_published_models_are_imported_and_exported_with_their_heads(
    name: str, tmp_path: Path
) -> None:
    net = published(name)
    torch.save(net.state_dict(), tmp_path / "model.bin")  # both tied copies, as in older files
    imported = import_checkpoint(
        name, tmp_path / "model.bin", tokenizer=text_vocabulary(40), out=tmp_path / "ours"
    )
    model: Any = medvl.load(tmp_path / "ours")
    expected = net(input_ids=IDS, attention_mask=MASK.long())
    with torch.no_grad():
        states_BTD = model.text_encoder(IDS, MASK).tokens_BTD
        words_BTV = model.score_words(states_BTD)
        torch.testing.assert_close(words_BTV[MASK], getattr(expected, "logits", expected[0])[MASK])
        if model.pair_head is not None:
            torch.testing.assert_close(model.score_pairs(states_BTD[:, 0]), expected[1])
    assert (model.pair_head is None) == name.endswith("mlm")
    assert imported.system == name

    exported = export_hugging_face(model, tmp_path / "theirs")
    assert all(value < 1e-5 for value in exported.differences.values())
    back = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "theirs").eval()
    torch.testing.assert_close(
        back(input_ids=IDS, attention_mask=MASK.long()).logits[MASK], words_BTV[MASK]
    )
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    assert (
        words("small effusion")["input_ids"]
        == text_vocabulary(40)(["small effusion"])[0][0].tolist()
    )
    pair, own = (
        words("small effusion", "edema"),
        text_vocabulary(40).pairs(["small effusion"], ["edema"]),
    )
    assert pair["input_ids"] == own.ids_BT[0].tolist()
    assert pair.get("token_type_ids") == (
        own.types_BT[0].tolist() if back.config.type_vocab_size > 1 else None
    )


def test_files_of_other_heads_are_refused_by_name(tmp_path: Path) -> None:
    torch.save(published("bert_mlm").state_dict(), tmp_path / "bert.bin")
    with raises(WeightsError, "mismatch", names="missing pair_head"):
        import_checkpoint("bert_mlm_nsp", tmp_path / "bert.bin")
    state = published("bert_mlm_nsp").state_dict()
    torch.save(state, tmp_path / "both.bin")
    left_out = import_checkpoint("bert_mlm", tmp_path / "both.bin").left_out
    assert {"bert.pooler.dense.weight", "cls.seq_relationship.bias"} <= left_out.keys()
    projection = {
        f"cls_projection_head.{name}": torch.zeros(3)
        for name in ("dense_to_hidden.bias", "LayerNorm.bias")
    }
    torch.save(published("bert_mlm").state_dict() | projection, tmp_path / "cxr.bin")  # CXR-BERT
    assert len(import_checkpoint("bert_mlm", tmp_path / "cxr.bin").left_out) >= 2
    state["cls.predictions.decoder.weight"] = (
        state["cls.predictions.decoder.weight"] + 1
    )  # not tied
    torch.save(state, tmp_path / "untied.bin")
    with raises(WeightsError, "mismatch"):
        import_checkpoint("bert_mlm", tmp_path / "untied.bin")


def test_training_goes_on_with_and_without_the_head_for_pairs(tmp_path: Path) -> None:
    torch.save(published("bert_mlm").state_dict(), tmp_path / "model.bin")
    import_checkpoint(
        "bert_mlm", tmp_path / "model.bin", tokenizer=text_vocabulary(40), out=tmp_path / "ours"
    )
    settings = {"text_encoder": "bert", "text_arguments": SMALL, "max_tokens": 40}
    with seeded(3):
        model: Any = create_model(
            "masked_text", init_from=tmp_path / "ours", pairs="next", **settings
        )
    start: Any = medvl.load(tmp_path / "ours")
    assert torch.equal(model.word_head.dense.weight, start.word_head.dense.weight)
    assert model.pair_head is not None


def test_roberta_is_exported_and_other_encoders_are_refused(tmp_path: Path) -> None:
    tokenizer = train_wordpiece(["a b c"], min_frequency=1, max_tokens=16)
    sizes = {**SMALL, "pad_token_id": 0}
    roberta = create_model("masked_text", text_encoder="roberta", tokenizer=tokenizer, pairs="none",
        max_tokens=16,
                           text_arguments=sizes)  # fmt: skip
    exported = export_hugging_face(roberta, tmp_path / "roberta")
    assert exported.differences.keys() == {"word scores"}
    assert "image" not in (tmp_path / "roberta/README.md").read_text().partition("## Use")[0]
    pairs = create_model("masked_text", text_encoder="roberta", tokenizer=tokenizer, max_tokens=16,
                         text_arguments=sizes)  # fmt: skip
    with raises(ConfigError, "unsupported", "text_encoder"):
        export_hugging_face(pairs, tmp_path / "pairs")
    assert not (tmp_path / "pairs").exists()


@pytest.mark.parametrize(
    ("encoder", "default"), [("bert", 0.1), ("cxrbert", 0.25), ("bioalbert", 0.0)]
)
def test_exports_have_the_attention_dropout_of_their_architecture(
    encoder: str, default: float, tmp_path: Path
) -> None:
    """A pretraining with packed texts has none, whoever fine-tunes the export gets the default."""
    settings: dict[str, Any] = {
        "text_encoder": encoder,
        "text_arguments": SMALL,
        "max_tokens": 40,
        "vocab_size": 60,
    }
    language = create_model("masked_text", pairs="none", attention_dropout=0.05, **settings)
    dual = create_model(
        "convirt",
        image_encoder="resnet_tiny",
        image_size=64,
        frozen_text_layers=0,
        attention_dropout=0.05,
        **settings,
    )
    for model, folder in ((language, tmp_path / "language"), (dual, tmp_path / "dual")):
        export_hugging_face(model, folder)
        text_folder = folder if model is language else folder / "text_encoder"
        config = transformers.AutoConfig.from_pretrained(text_folder)
        assert config.attention_probs_dropout_prob == default
        assert config.architectures


def test_the_knowledge_encoder_is_exported_with_its_head(tmp_path: Path) -> None:
    """The code of the card gives medvl's embeddings."""
    tokenizer = text_vocabulary(40)
    model: Any = create_model(
        "kebert", text_encoder="tiny_bert", projection_dim=12, tokenizer=tokenizer
    ).eval()
    exported = export_hugging_face(model, tmp_path / "out")
    assert all(value < 1e-5 for value in exported.differences.values())
    code = (tmp_path / "out/README.md").read_text().split("```python\n")[1].split("```")[0]
    found: dict[str, Any] = {}
    exec(code.replace("FOLDER", str(tmp_path / "out")), found)
    ids_BT = IDS % tokenizer.vocab_size
    states_BTD = found["text_encoder"](
        input_ids=ids_BT, attention_mask=MASK.long()
    ).last_hidden_state
    vectors_BE = torch.nn.functional.normalize(found["head"](states_BTD[:, 0]), dim=-1)
    torch.testing.assert_close(vectors_BE, model.encode_text(ids_BT, MASK))


def test_a_file_of_few_weights_builds_no_large_model(tmp_path: Path) -> None:
    """A size that an empty tensor claims is refused before the memory is allocated."""
    state = published("bert_mlm").state_dict()
    state["bert.encoder.layer.0.intermediate.dense.weight"] = torch.zeros(1 << 26, 0)
    torch.save(state, tmp_path / "bert.bin")
    with raises(WeightsError, "mismatch", names="far more weights than it has"):
        import_checkpoint("bert_mlm", tmp_path / "bert.bin")
