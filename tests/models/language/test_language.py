"""Systems of text alone: losses against transformers' models, objectives, starts, and their
encoder in other systems.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.errors import raises
from helpers.text_shards import text_vocabulary, write_text_shards

from medvl.common.seeding import seeded
from medvl.data.loading.text_loader import open_text_loader
from medvl.data.tokenizer.tokenizer import Tokenizer, train_wordpiece
from medvl.data.transforms.masked_text import TextBatch
from medvl.errors import CheckpointError, ConfigError
from medvl.models import checkpoint, create_model, train_manifests
from medvl.models.language.base import MaskedWordScore

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
}
SIZES: dict[str, dict[str, Any]] = {
    "masked_text": {"text_encoder": "bert", "text_arguments": SMALL},
    "albert_text": {"text_encoder": "bioalbert", "text_arguments": {**SMALL, "embedding_size": 16}},
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return text_vocabulary()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("text") / "out"


@pytest.fixture(scope="module")
def source(folder: Path) -> Any:
    return write_text_shards(folder)


def make(name: str, tokenizer: Tokenizer, **settings: Any) -> Any:
    with seeded(0):
        return create_model(name, tokenizer=tokenizer, max_tokens=32, **{**SIZES[name], **settings})


def batch_of(model: Any, source: Any, rows: int = 8, **settings: Any) -> TextBatch:
    batch = next(
        iter(open_text_loader(source, model.sequences, batch=rows, train=True, **settings))
    )
    assert isinstance(batch, TextBatch)
    return batch


def hugging_face(model: Any) -> Any:
    """Return transformers' pretraining model with the same weights, filled by hand."""
    import transformers

    config = model.text_encoder.backbone.config
    state = {
        f"net.{name}": tensor for name, tensor in model.text_encoder.backbone.state_dict().items()
    }
    if model.name == "masked_text":
        net: Any = transformers.BertForPreTraining(config)
        parts = {"cls.predictions.transform.dense": model.word_head.dense}
        parts |= {"cls.predictions.transform.LayerNorm": model.word_head.norm}
        parts |= {"bert.pooler.dense": model.pooler, "cls.seq_relationship": model.pair_head}
        biases, prefix = ("cls.predictions.bias", "cls.predictions.decoder.bias"), "bert."
    else:
        net = transformers.AlbertForPreTraining(config)
        parts = {
            "predictions.dense": model.word_head.dense,
            "predictions.LayerNorm": model.word_head.norm,
        }
        parts |= {"albert.pooler": model.pooler, "sop_classifier.classifier": model.pair_head}
        biases, prefix = ("predictions.bias", "predictions.decoder.bias"), "albert."
    values = {name.replace("net.", prefix): tensor for name, tensor in state.items()}
    for name, part in parts.items():
        values |= {f"{name}.{leaf}": tensor for leaf, tensor in part.state_dict().items()}
    values |= dict.fromkeys(biases, model.word_head.bias.detach())
    values = {name: tensor for name, tensor in values.items() if name in net.state_dict()}
    missing, unexpected = net.load_state_dict(values, strict=False), ()
    assert not unexpected
    assert all(name.endswith(("decoder.weight", "position_ids")) for name in missing.missing_keys)
    net.tie_weights()
    return net.eval()


@pytest.mark.parametrize("name", list(SIZES))
def test_losses_are_those_of_transformers(name: str, tokenizer: Tokenizer, source: Any) -> None:
    model = make(name, tokenizer)
    torch.nn.init.normal_(model.word_head.bias)
    batch = batch_of(model, source)
    losses = model.eval()(batch)
    masked = model.mask(batch)
    output = hugging_face(model)(
        input_ids=masked.ids_BT,
        attention_mask=batch.mask_BT.long(),
        token_type_ids=batch.types_BT,
    )
    words = F.cross_entropy(output.prediction_logits.flatten(0, 1), masked.labels_BT.flatten())
    pair_logits = output.seq_relationship_logits if name == "masked_text" else output.sop_logits
    torch.testing.assert_close(losses.terms["mlm"], words)
    torch.testing.assert_close(losses.terms["pairs"], F.cross_entropy(pair_logits, batch.pair_B))
    torch.testing.assert_close(losses.total, losses.terms["mlm"] + losses.terms["pairs"])
    assert abs(float(losses.terms["mlm"].detach()) - math.log(60)) < 1.5


def test_albert_shares_its_layers_and_narrows_its_words(tokenizer: Tokenizer) -> None:
    one, two = (
        make(
            "albert_text",
            tokenizer,
            text_arguments={**SIZES["albert_text"]["text_arguments"], "num_hidden_layers": n},
        )
        for n in (1, 2)
    )
    count = [sum(parameter.numel() for parameter in model.parameters()) for model in (one, two)]
    assert count[0] == count[1]
    assert two.text_encoder.backbone.get_input_embeddings().weight.shape == (60, 16)
    with raises(ConfigError, "unsupported", "text_encoder"):
        create_model(
            "albert_text",
            tokenizer=tokenizer,
            text_encoder="bert",
            text_arguments=SMALL,
            max_tokens=32,
        )


def test_parts_of_a_batch_sum_to_the_mean_over_all_masked_tokens(
    tokenizer: Tokenizer, source: Any
) -> None:
    """Unequal parts with the mean counts have together the loss and the gradient of the whole."""
    model = make("masked_text", tokenizer)
    batch = batch_of(model, source, rows=9)
    parts = [batch.rows(rows) for rows in ([0, 1], [2], [3, 4, 5, 6, 7, 8])]
    mean_K = sum(model.loss_counts(part) for part in parts) / 3
    whole = model(batch).total
    (expected,) = torch.autograd.grad(whole, model.word_head.dense.weight)
    of_parts = [model(dataclasses.replace(part, mean_counts_K=mean_K)).total for part in parts]
    (actual,) = torch.autograd.grad(torch.stack(of_parts).mean(), model.word_head.dense.weight)
    torch.testing.assert_close(torch.stack(of_parts).mean(), whole)
    torch.testing.assert_close(actual, expected)
    naive = torch.stack([model(part).total for part in parts]).mean()
    assert not torch.allclose(naive, whole, rtol=1e-3)


def test_packed_documents_do_not_see_each_other(tokenizer: Tokenizer, source: Any) -> None:
    model = make("masked_text", tokenizer).eval()
    batch = batch_of(model, source)
    padded = model(batch)
    model.text_encoder.pack()
    torch.testing.assert_close(model(batch).total, padded.total)
    other = dataclasses.replace(
        batch, masked_BT=batch.masked_BT.clone(), ids_BT=batch.ids_BT.clone()
    )
    other.ids_BT[1:], other.masked_BT[1:] = 7, 7
    first, changed = (
        model.text_encoder(b.ids_BT, b.mask_BT, types_BT=b.types_BT).tokens_BTD[0]
        for b in (batch, other)
    )
    assert torch.equal(first, changed)


def test_the_rate_rises_with_the_steps(tokenizer: Tokenizer, source: Any) -> None:
    model = make("masked_text", tokenizer, rate_ramp=(0.05, 0.2, 0.6), ramp_steps=30)
    batch, counts = batch_of(model, source), []
    for step in (0, 9, 10, 20, 29, 50):
        model.before_step(step)
        counts.append(int(model.loss_counts(batch)[0]))
    assert counts[0] == counts[1] < counts[2] < counts[3] == counts[4] == counts[5]
    model.eval()
    assert counts[0] < int(model.loss_counts(batch)[0]) < counts[2]  # 0.15 in evaluation
    with raises(ConfigError, "conflict", "ramp_steps"):
        make("masked_text", tokenizer, rate_ramp=(0.1, 0.2))
    with raises(ConfigError, "out_of_range", "rate_ramp"):
        make("masked_text", tokenizer, rate_ramp=(0.1, 1.2), ramp_steps=3)


def test_adversarial_noise_changes_predictions_more_than_random_noise(
    tokenizer: Tokenizer, source: Any
) -> None:
    model = make(
        "masked_text", tokenizer, pairs="none", adversarial_weight=10.0, adversarial_step=0.02
    )
    batch = batch_of(model, source)
    model.eval()
    losses = model(batch)
    assert losses.terms.keys() == {"mlm", "adversarial"}
    torch.testing.assert_close(losses.total, losses.terms["mlm"] + 10 * losses.terms["adversarial"])
    with torch.no_grad():
        unmoved = model(batch).terms["adversarial"]  # noise of 1e-5 without the step
    assert losses.terms["adversarial"] > 100 * unmoved
    random = make(
        "masked_text", tokenizer, pairs="none", adversarial_weight=1.0, adversarial_std=0.02 / 3
    ).eval()
    random.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert losses.terms["adversarial"] > 2 * random(batch).terms["adversarial"]
    losses.total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["convirt", "m3ae"])
def test_the_trained_encoder_starts_other_systems(
    name: str, tokenizer: Tokenizer, source: Any, tmp_path: Path
) -> None:
    model = make("masked_text", tokenizer)
    checkpoint.save(model, tmp_path, {"train_manifest": dataclasses.asdict(source.manifest)})
    settings: dict[str, Any] = {
        "text_encoder": "bert",
        "text_arguments": SMALL,
        "image_encoder": "resnet_tiny",
    }
    if name == "m3ae":
        settings |= {
            "image_encoder": "timm:test_vit",
            "image_size": 160,
            "width": 32,
            "layers": 1,
            "heads": 2,
        }
        settings |= {"mim_layer": 1, "image_arguments": {"depth": 1}}
        settings |= {
            "decoder_width": 32,
            "decoder_layers": 1,
            "decoder_heads": 2,
            "intermediate": 32,
        }
    else:
        settings["frozen_text_layers"] = 0
    with seeded(1):
        started = create_model(name, init_from=tmp_path, max_tokens=32, **settings)
    assert started.tokenizer is not None
    assert started.tokenizer.vocabulary == tokenizer.vocabulary
    for key, tensor in model.text_encoder.state_dict().items():
        assert torch.equal(started.get_submodule("text_encoder").state_dict()[key], tensor)
    other = train_wordpiece(["a b c"], min_frequency=1)
    with raises(CheckpointError, "mismatch", "tokenizer"):
        create_model(name, init_from=tmp_path, tokenizer=other, max_tokens=32, **settings)
    folder = tmp_path / "started"
    folder.mkdir()
    checkpoint.save(started, folder)
    assert train_manifests(folder)[0].fingerprint == source.manifest.fingerprint
    back = make("masked_text", tokenizer, text_encoder="bert")
    checkpoint.load_towers(back, folder)  # and back: the image encoder is left out


def test_a_new_vocabulary_under_an_old_encoder(
    tokenizer: Tokenizer, source: Any, tmp_path: Path
) -> None:
    """The start is a run, of which the best checkpoint is taken."""
    old, run = make("masked_text", tokenizer), tmp_path / "run"
    (run / "best").mkdir(parents=True)
    checkpoint.save(old, run / "best", {"train_manifest": dataclasses.asdict(source.manifest)})
    words = train_wordpiece(
        ["effusion lung heart ward"], vocab_size=30, min_frequency=1, max_tokens=32
    )
    with raises(CheckpointError, "mismatch"):
        make("masked_text", words, init_from=run)
    with raises(ConfigError, "missing", "tokenizer"):
        create_model("masked_text", init_from=run, new_vocabulary=True)
    started = make("masked_text", words, init_from=run, new_vocabulary=True)
    assert started.text_encoder.trained_on[0]["corpus"] == source.manifest.corpus
    table = "text_encoder.backbone.embeddings.word_embeddings.weight"
    for key, tensor in started.state_dict().items():
        if key in (table, "word_head.bias"):
            assert tensor.shape[0] == words.vocab_size
        else:
            assert torch.equal(tensor, old.state_dict()[key]), key
    (run / "best" / "complete.json").write_text("{}")
    with raises(CheckpointError, "malformed", names="complete.json"):
        make("masked_text", words, init_from=run, new_vocabulary=True)
    published = tmp_path / "published"
    old.text_encoder.backbone.save_pretrained(published)
    tokenizer.save(published)
    started = make("masked_text", words, text_weights=str(published), new_vocabulary=True)
    layer = "text_encoder.backbone.encoder.layer.1.output.dense.weight"
    assert torch.equal(started.state_dict()[layer], old.state_dict()[layer])
    assert started.state_dict()[table].shape[0] == words.vocab_size


def test_foreign_vocabularies_of_weights_are_reported(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Equal sizes fit, equal words do not."""
    make("masked_text", tokenizer).text_encoder.backbone.save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    words = [chr(0x4E00 + number) for number in range(54)]
    other = train_wordpiece(words, vocab_size=60, min_frequency=1, max_tokens=32)
    assert other.vocab_size == tokenizer.vocab_size
    make("masked_text", tokenizer, text_weights=str(tmp_path), vocab_size=60)
    assert "vocabulary" not in caplog.text
    make("masked_text", other, text_weights=str(tmp_path), vocab_size=60)
    assert "another vocabulary" in caplog.text


def test_scores_of_held_out_text(tokenizer: Tokenizer, source: Any) -> None:
    model = make("masked_text", tokenizer).eval()
    loader = open_text_loader(source, model.sequences, batch=5, train=False)
    scores = MaskedWordScore(loader)(model)
    assert scores == MaskedWordScore(loader)(model)
    assert 0 <= scores["masked/accuracy"] <= 1
    assert 0.02 < scores["masked/unigram"] < 0.5
    targets = torch.cat([model.mask(batch).labels_BT.flatten() for batch in loader])
    counts = torch.bincount(targets[targets >= 0])
    assert scores["masked/unigram"] == pytest.approx(float(counts.max() / counts.sum()))
    with torch.no_grad():
        model.word_head.dense.weight.zero_()
        model.word_head.bias.zero_()[int(counts.argmax())] = 9.0
        model.word_head.norm.weight.zero_()
    constant = MaskedWordScore(loader)(model)
    assert constant["masked/accuracy"] == constant["masked/unigram"]


def test_models_need_what_they_mask_with(tokenizer: Tokenizer, source: Any) -> None:
    model = create_model("masked_text", vocab_size=50, **SIZES["masked_text"])
    with raises(ConfigError, "missing", "tokenizer"):
        _ = model.sequences
    from helpers.train_fakes import make_batch

    with raises(ConfigError, "wrong_type", "batch"):
        make("masked_text", tokenizer)(make_batch([0, 1]))
    with raises(ConfigError, "unsupported", "pairs"):
        make("masked_text", tokenizer, pairs="none").score_pairs(torch.zeros(1, 32))
