"""Classification on fusion-encoders: heads, losses, modalities, evaluation."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.contrastive_systems import gloria
from helpers.errors import raises
from helpers.fusion_samples import SIDE, TEXTS, TINY, flags, make_batch, tiny_model, tiny_tokenizer
from helpers.label_shards import NAMES, make_shards
from torch import nn

import medvl
from medvl.cli import main as cli
from medvl.errors import ConfigError
from medvl.eval import ClassifyEval, LabelPolicy, classify
from medvl.models import (
    FusedClassifier,
    FusedClassifierConfig,
    create_fused_classifier,
    create_retrieval,
    create_vqa,
)
from medvl.models.checkpoint import load, save
from medvl.models.fusion_encoders.streams import DualStreamConfig
from medvl.schema import Batch
from medvl.train.tasks.supervised import ClassificationDataConfig, open_classification

LABELS = ("Edema", "Fracture", "Normal")
TOKENIZER = tiny_tokenizer()


def classifier(name: str = "dual_stream", **choices: Any) -> FusedClassifier:
    return FusedClassifier.on(tiny_model(name, TOKENIZER), LABELS, **choices)


def labelled(size: int = 6, **fields: Any) -> Batch:
    values = torch.tensor([[1.0, 0.0, torch.nan], [0.0, torch.nan, 1.0], [0.0, 1.0, 0.0]])
    return make_batch(TOKENIZER, size, labels_BL=values.repeat(2, 1)[:size], **fields)


@pytest.mark.parametrize("name", sorted(TINY))
def test_every_fusion_encoder_learns_labels(name: str) -> None:
    model = classifier(name)
    losses = model(labelled())
    assert losses.total.item() == pytest.approx(len(LABELS) * np.log(2), rel=0.2)
    losses.total.backward()
    still = [
        key
        for key, p in model.named_parameters()
        if p.requires_grad and (p.grad is None or not p.grad.any())
    ]
    assert still == []
    frozen = {
        key.removeprefix("fusion_model.")
        for key, p in model.named_parameters()
        if not p.requires_grad
    }
    assert {"itm_head", "mlm_head"} <= {key.split(".")[0] for key in frozen}
    # LXMERT's last states of images reach no pooled vector; PTUnifier's prompts stand for what is
    # missing.
    unread = {"lxmert": "cross_layers.1.image", "ptunifier": "prompts_RD"}.get(name)
    rest = [key for key in frozen if "head" not in key.split(".")[0] and "momentum" not in key]
    assert all(unread is not None and unread in key for key in rest), rest


@pytest.mark.parametrize("name", sorted(TINY))
def test_absent_modalities_cannot_reach_the_logits(name: str) -> None:
    """Other texts, of other lengths, change nothing in a model of images, and other images
    nothing in one of texts.
    """
    batch = labelled()
    other_text = make_batch(TOKENIZER, 6, texts=TEXTS[::-1], image_BCHW=batch.image_BCHW)
    other_image = dataclasses.replace(batch, image_BCHW=255 - batch.image_BCHW)
    for modalities, same, different in (
        ("image", other_text, other_image),
        ("text", other_image, other_text),
    ):
        model = classifier(name, modalities=modalities).eval()
        nn.init.normal_(model.label_head[-1].weight)
        with torch.no_grad():
            logits_BL = model.label_logits(batch)
            torch.testing.assert_close(model.label_logits(same), logits_BL)
            assert not torch.allclose(model.label_logits(different), logits_BL, atol=1e-6)
        assert model.reads == modalities
    model = classifier(name).eval()
    nn.init.normal_(model.label_head[-1].weight)
    with torch.no_grad():
        assert not torch.allclose(
            model.label_logits(other_text), model.label_logits(batch), atol=1e-6
        )
        assert not torch.allclose(
            model.label_logits(other_image), model.label_logits(batch), atol=1e-6
        )
        absent = dataclasses.replace(batch, has_text_B=flags(1, 1, 1, 0, 1, 0))
        assert model.label_logits(absent).isfinite().all()
    assert model.reads == "image and text"


@pytest.mark.parametrize("name", ["albef", "dual_stream", "lxmert", "visualbert"])
@pytest.mark.parametrize("modalities", ["image", "text", "image_text"])
def test_what_stands_for_a_missing_modality_has_a_moderate_gradient(
    name: str, modalities: Any
) -> None:
    """Layer norms of zeros made gradients of 1e7 to 1e16, or NaN."""
    torch.manual_seed(0)
    model = classifier(name, modalities=modalities)
    missing: dict[str, Any] = {
        "has_image_B": flags(1, 0, 1, 1, 0, 1),
        "has_text_B": flags(1, 1, 0, 1, 1, 0),
    }
    for batch in (labelled(), labelled(**missing)):
        model.zero_grad()
        model(batch).total.backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        assert torch.cat(gradients).norm() < 200


def test_multi_label_loss_is_bce_over_known_labels_times_their_number() -> None:
    model, batch = classifier().eval(), labelled()
    nn.init.normal_(model.label_head[-1].weight)
    logits_BL = model.label_logits(batch)
    known_BL = ~batch.labels_BL.isnan()
    terms = nn.functional.binary_cross_entropy_with_logits(
        logits_BL[known_BL], batch.labels_BL[known_BL]
    )
    loss = model(batch).total
    torch.testing.assert_close(loss, 3 * terms)
    for expected, found in zip(
        torch.autograd.grad(3 * terms, model.label_head.parameters()),
        torch.autograd.grad(loss, model.label_head.parameters()),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(model.probabilities(batch), logits_BL.double().sigmoid())
    uncertain = dataclasses.replace(batch, labels_BL=batch.labels_BL.nan_to_num(-1))
    torch.testing.assert_close(model(uncertain).total, loss)
    assert model.loss_counts(uncertain) == model.loss_counts(batch) == known_BL.sum()


def test_single_label_loss_ignores_samples_without_exactly_one_label() -> None:
    model = classifier(target="single_label").eval()
    nn.init.normal_(model.label_head[-1].weight)
    rows = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [torch.nan] * 3, [1.0, 1.0, 0.0]]
    batch = make_batch(TOKENIZER, 4, labels_BL=torch.tensor(rows))
    logits_BL = model.label_logits(batch)
    expected = nn.functional.cross_entropy(logits_BL[:2], torch.tensor([0, 1]))
    torch.testing.assert_close(model(batch).total, expected)
    torch.testing.assert_close(model.probabilities(batch).sum(dim=1), torch.ones(4).double())
    assert model(dataclasses.replace(batch, labels_BL=batch.labels_BL * torch.nan)).total == 0


def test_heads_have_the_published_layers() -> None:
    mlp, linear = classifier().label_head, classifier(head="linear").label_head
    assert [type(layer).__name__ for layer in mlp] == ["Linear", "GELU", "LayerNorm", "Linear"]
    assert (mlp[0].in_features, mlp[0].out_features, mlp[3].in_features) == (48, 96, 96)
    assert mlp[2].eps == 1e-12
    assert mlp[0].weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not mlp[0].bias.any()
    assert [type(layer).__name__ for layer in linear] == ["Linear"]
    meter = classifier(head="meter").label_head
    assert [type(layer).__name__ for layer in meter] == [
        "Linear",
        "LayerNorm",
        "GELU",
        "Linear",
    ]  # M3AE's cls_head
    assert (meter[0].in_features, meter[0].out_features, meter[3].in_features) == (48, 48, 48)
    assert meter[1].eps == 1e-5
    groups = classifier(head_lr_mult=4.0).parameter_groups(1e-3, 0.1)
    assert {group["lr"] for group in groups if group["name"].startswith("label_head")} == {4e-3}


def test_checkpoints_start_other_heads(tmp_path: Path) -> None:
    model = classifier("medvill", modalities="text").eval()
    nn.init.normal_(model.label_head[-1].weight)
    for folder in ("first", "dual"):
        (tmp_path / folder).mkdir()
    save(model, tmp_path / "first")
    loaded = load(tmp_path / "first")
    assert isinstance(loaded, FusedClassifier)
    assert loaded.config.modalities == "text"
    torch.testing.assert_close(loaded.label_logits(labelled()), model.label_logits(labelled()))
    vqa = create_vqa(tmp_path / "first", ("yes", "no"), fusion=DualStreamConfig())
    for name, tensor in model.fusion_model.state_dict().items():
        torch.testing.assert_close(vqa.fusion_model.state_dict()[name], tensor, rtol=0, atol=0)
    towers = {
        "image_encoder": "resnet_tiny",
        "text_encoder": "tiny_bert",
        "image_size": 32,
        "tokenizer": TOKENIZER,
    }
    convirt = medvl.create_model("convirt", projection_dim=8, frozen_text_layers=0, **towers)
    save(convirt, tmp_path / "dual")
    sizes = DualStreamConfig(image_arguments={}, width=24, layers=1, heads=2, intermediate=24)
    on_towers = create_fused_classifier(
        tmp_path / "dual", LABELS, fusion=sizes, modalities="image", head="linear"
    )
    torch.testing.assert_close(
        on_towers.fusion_model.image_encoder.state_dict(),
        convirt.image_encoder.state_dict(),
        rtol=0,
        atol=0,
    )
    with raises(ConfigError, "missing", "fusion"):
        create_fused_classifier(tmp_path / "dual", LABELS)


def test_towers_get_the_pixels_of_their_pretraining(tmp_path: Path) -> None:
    """Statistics and stretch of GLoRIA's images; at another size, none to the former one."""
    dual = gloria().eval()
    save(dual, tmp_path)
    sizes = DualStreamConfig(
        image_arguments={}, width=24, layers=1, heads=2, intermediate=24, image_positions=True
    )
    model = create_fused_classifier(tmp_path, LABELS, fusion=sizes, modalities="image").eval()
    image_BCHW, encoder = (
        labelled(2).image_BCHW.repeat(1, 1, 2, 2),
        model.fusion_model.image_encoder,
    )
    torch.testing.assert_close(
        encoder(image_BCHW).pooled_BD, dual.image_encoder(image_BCHW).pooled_BD
    )
    assert model.transform.size == dual.transform.size
    assert (
        model.probabilities(dataclasses.replace(labelled(2), image_BCHW=image_BCHW))
        .isfinite()
        .all()
    )
    larger = create_fused_classifier(tmp_path, LABELS, fusion=sizes, image_size=128)
    assert larger.fusion_model.image_encoder.image_size == (128, 128)
    assert "stretch" not in larger.fusion_model.image_encoder.config
    (tmp_path / "fused").mkdir()
    save(model, tmp_path / "fused")
    again = load(tmp_path / "fused").fusion_model.image_encoder(image_BCHW)
    torch.testing.assert_close(again.pooled_BD, encoder(image_BCHW).pooled_BD)


def test_texts_can_be_longer_than_in_pretraining(tmp_path: Path) -> None:
    """M3AE reads 64 tokens of captions in pretraining, and 128 of MELINDA's."""
    start, report = tiny_model("dual_stream", TOKENIZER), ["small left effusion " * 20]
    save(start, tmp_path)
    before = create_fused_classifier(tmp_path, LABELS)
    longer = create_fused_classifier(tmp_path, LABELS, max_tokens=56)
    assert before.config.max_tokens == start.config.max_tokens == 50
    (tmp_path / "longer").mkdir()
    save(longer, tmp_path / "longer")
    retrieval = create_retrieval(tmp_path, max_tokens=56)
    for model in (longer, load(tmp_path / "longer"), retrieval):
        assert model.config.max_tokens == 56
        assert model.tokenizer is not None
        assert model.tokenizer(report)[0].shape == (1, 56)
    assert before.tokenizer is not None
    assert before.tokenizer(report)[0].shape == (1, 50)
    assert TOKENIZER(report)[0].shape == (1, 62)  # not changed either
    with raises(ConfigError, "too_large", "max_tokens"):
        create_fused_classifier(tmp_path, LABELS, max_tokens=start.text_encoder.max_tokens + 1)


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("labels", (), "out_of_range"),
        ("modalities", "both", "unknown_name"),
        ("head", "product", "unknown_name"),
        ("target", "ordinal", "unknown_name"),
        ("head_lr_mult", 0.0, "out_of_range"),
    ],
)
def test_config_rejects_invalid_values(field: str, value: Any, code: str) -> None:
    with raises(ConfigError, code, field):
        dataclasses.replace(classifier().config, **{field: value})


def test_evaluator_names_what_was_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From loader to page, for a model that reads images of samples without texts."""
    shards = make_shards(tmp_path)
    torch.manual_seed(0)
    fusion = tiny_model(
        "dual_stream", TOKENIZER, image_encoder="resnet_tiny", image_arguments={}, image_size=32
    )
    model = FusedClassifier.on(fusion, NAMES, modalities="image").eval()
    nn.init.normal_(model.label_head[-1].weight)
    data = ClassificationDataConfig(
        train=shards / "train", valid=shards / "validate", workers=0, fraction=0.5
    )
    opened = open_classification(data, model, LabelPolicy().apply, batch=8)
    batch = next(iter(opened.train))
    assert batch.ids_BT.shape[1] >= 2
    assert model(batch).total.isfinite()
    result = classify(model, opened.valid_images, resamples=10)
    assert result.results.config["reads"] == "image"
    (tmp_path / "run").mkdir()
    save(model, tmp_path / "run")
    options = [
        "--checkpoint",
        str(tmp_path / "run"),
        "--data",
        str(shards / "test"),
        "--out",
        str(tmp_path / "eval"),
    ]
    cli.main(["eval", "classify", *options, "--resamples", "10", "--workers", "0"])
    assert "Edema" in capsys.readouterr().out
    page = (
        (tmp_path / "eval" / "index.html") if (tmp_path / "eval" / "index.html").exists() else None
    )
    pages = [page] if page else list((tmp_path / "eval").glob("*.html"))
    assert "Reads" in pages[0].read_text()
    assert "fused_classifier of image" in pages[0].read_text()


@pytest.mark.parametrize("target", ["single_label", "multi_label"])
def test_accuracy_is_of_classifiers_of_one_label(target: Any, tmp_path: Path) -> None:
    """Of images with exactly one label; an uncertain or missing label leaves its image out."""
    torch.manual_seed(0)
    fusion = tiny_model(
        "dual_stream", TOKENIZER, image_encoder="resnet_tiny", image_arguments={}, image_size=32
    )
    model = FusedClassifier.on(fusion, NAMES, modalities="image", target=target).eval()
    nn.init.normal_(model.label_head[-1].weight)
    shards = make_shards(tmp_path)
    data = ClassificationDataConfig(train=shards / "train", valid=shards / "validate", workers=0)
    images = open_classification(data, model, LabelPolicy().apply, batch=8).valid_images
    assert images is not None
    result, during = classify(model, images, resamples=10), ClassifyEval(images)(model)
    rows = {row.metric: row for row in result.results.rows if row.metric.startswith("top1")}
    if target == "multi_label":
        assert not rows
        assert not any("top1" in name for name in during)
        return
    scores_NL, labels_NL = result.images.scores_NL, result.images.labels_NL
    np.testing.assert_allclose(scores_NL.sum(axis=1), 1)
    right = [
        scores.argmax() == labels.tolist().index(1)
        for scores, labels in zip(scores_NL, labels_NL, strict=True)
        if sorted(labels.tolist()) == [0, 1]
    ]
    assert 0 < len(right) < len(labels_NL)
    assert rows["top1_accuracy"].n == len(right)
    assert (
        rows["top1_accuracy"].value
        == during["classify/top1_accuracy"]
        == pytest.approx(np.mean(right))
    )
    assert rows["top1_balanced_accuracy"].value == during["classify/top1_balanced_accuracy"]
    assert during["classify/auroc_macro"] == next(
        row.value for row in result.results.rows if row.target == "macro"
    )


def test_images_have_the_fused_models_size() -> None:
    assert classifier().transform.size == SIDE


def test_a_checkpoint_names_no_further_files_to_read(tmp_path: Path) -> None:
    for name, settings in ((str(tmp_path), {}), ("dual_stream", {"init_from": str(tmp_path)})):
        config = FusedClassifierConfig(
            fusion=name, settings=settings, labels=("Edema",), max_tokens=16
        )
        with torch.device("meta"), raises(ConfigError, "unknown_name"):
            FusedClassifier.build(config, pretrained=False, tokenizer=None)


def test_towers_keep_their_pixel_statistics_and_arguments(tmp_path: Path) -> None:
    """With the default sizes of the new fusion-encoder, whose arguments are those of another
    image encoder.
    """
    towers = {
        "image_encoder": "resnet_tiny",
        "text_encoder": "tiny_bert",
        "image_size": 32,
        "tokenizer": TOKENIZER,
    }
    arguments = {"text_arguments": {"num_hidden_layers": 1}, "attention_dropout": 0.0}
    medclip = medvl.create_model(
        "medclip", projection_dim=8, text_layers=(-1,), **towers, **arguments
    ).eval()
    save(medclip, tmp_path)
    sizes = DualStreamConfig(width=16, layers=1, heads=2, intermediate=16)
    encoder = create_fused_classifier(
        tmp_path, LABELS, fusion=sizes, modalities="image"
    ).fusion_model.image_encoder
    image_BCHW = torch.randint(0, 256, (2, 1, 32, 32), dtype=torch.uint8)
    expected_BD = medclip.image_encoder(image_BCHW).pooled_BD
    torch.testing.assert_close(encoder.eval()(image_BCHW).pooled_BD, expected_BD)


@pytest.mark.parametrize("name", ["vilt", "pixelbert", "medvill"])
def test_heads_read_all_tokens_in_training(name: str) -> None:
    """The draw of tokens belongs to the pretraining."""
    model = FusedClassifier.on(tiny_model(name, TOKENIZER, image_tokens=2), LABELS).train()
    batch = labelled()
    seen = [
        model.train(mode).fusion_model.image_tokens(batch.image_BCHW).states_BND.shape[1]
        for mode in (True, False)
    ]
    assert seen[0] == seen[1] > 3


@pytest.mark.parametrize("name", ["chexzero", "siglip"])
def test_towers_with_a_projection_take_a_fusion_encoder(name: str, tmp_path: Path) -> None:
    tower = "open_clip:ViT-B-32" if name == "chexzero" else "open_clip:ViT-B-16-SigLIP"
    image = {"image_encoder": "resnet_tiny", "image_size": 32}
    text = {
        "text_encoder": tower,
        "text_arguments": {"num_hidden_layers": 1, "width": 32, "heads": 2, "embed_dim": 8},
    }
    save(medvl.create_model(name, tokenizer=TOKENIZER, max_tokens=20, **image, **text), tmp_path)
    sizes = DualStreamConfig(width=16, layers=1, heads=2, intermediate=16)
    model = create_fused_classifier(tmp_path, LABELS, fusion=sizes, modalities="image")
    assert model.label_logits(labelled()).shape[1] == len(LABELS)
