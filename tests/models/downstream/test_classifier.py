"""Classifier: frozen or trained encoders of any system, label policies, evaluation and early
stopping.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.contrastive_systems import gloria, make_batch, mgca, radzero, umrl
from helpers.errors import raises
from helpers.eval_fakes import make_source
from helpers.label_shards import NAMES, make_shards
from helpers.learning import fit, seed_of, share_of
from sklearn import metrics as reference

import medvl
from medvl.data.loading.loader import open_loader
from medvl.data.loading.sources import FileSource, LabelPolicyView, label_fraction, no_text
from medvl.data.shards.source import ShardSource
from medvl.data.transforms.image import ConVIRTAugmentation, EvalTransform
from medvl.data.transforms.text import WholeText
from medvl.encoders import create_image_encoder
from medvl.errors import CheckpointError, ConfigError, EvaluationError, SplitError
from medvl.eval import ClassifyEval, LabelPolicy, classify
from medvl.eval.probing.features import ProbedEncoder
from medvl.models import Classifier, ClassifierConfig, Segmenter, create_classifier, create_dense
from medvl.models.checkpoint import load, save
from medvl.schema import Batch
from medvl.train import OptimConfig, TrainConfig, train
from medvl.train.tasks.supervised import ClassificationDataConfig, open_classification

BRIGHT = EvalTransform(size=32, fit="squash")


def classifier(frozen: bool = False, **settings: Any) -> Classifier:
    torch.manual_seed(0)
    encoder = create_image_encoder("resnet_tiny", image_size=32)
    return Classifier.on(encoder, NAMES, BRIGHT, frozen_encoder=frozen, **settings)


def batch_of(count: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(1)
    return Batch(
        keys=[str(number) for number in range(count)],
        image_BCHW=torch.randint(
            0, 256, (count, 1, 32, 32), dtype=torch.uint8, generator=generator
        ),
        ids_BT=torch.empty(count, 0, dtype=torch.int64),
        mask_BT=torch.empty(count, 0, dtype=torch.bool),
        labels_BL=torch.tensor([[1.0, 0.0], [0.0, torch.nan], [1.0, 1.0], [0.0, 0.0]])[:count],
        texts=[""] * count,
    )


# The model


@pytest.mark.training
def test_loss_starts_at_ln_2_and_decreases() -> None:
    model = classifier(head_lr_mult=5.0)
    loss = model(batch_of()).total
    assert loss.item() == pytest.approx(np.log(2))
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=1e-3, weight_decay=0.01))
    assert fit(model, batch_of(), optimizer, 5)[-1]["total"] < 0.6


def test_uncertain_labels_are_not_learned() -> None:
    """Labels that no policy settled, as a loader of one's own may give them."""
    model, batch = classifier(), batch_of()
    nothing = torch.nan
    uncertain = dataclasses.replace(
        batch, labels_BL=torch.tensor([[1.0, -1.0], [-1.0, nothing], [1.0, 1.0], [0.0, 0.0]])
    )
    unknown = dataclasses.replace(
        batch, labels_BL=uncertain.labels_BL.masked_fill(uncertain.labels_BL == -1, nothing)
    )
    torch.nn.init.normal_(model.label_head.weight)
    torch.testing.assert_close(model.eval()(uncertain).total, model(unknown).total)
    assert model.loss_counts(uncertain).tolist() == [5]


def test_frozen_encoder_and_its_statistics_do_not_change() -> None:
    model = classifier(frozen=True).train()
    before = {name: tensor.clone() for name, tensor in model.image_encoder.state_dict().items()}
    assert any("running" in name or "num_batches" in name for name in before)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        "label_head.weight",
        "label_head.bias",
    }
    optimizer = torch.optim.SGD(model.parameter_groups(lr=0.1, weight_decay=0.1))
    for _ in range(3):
        model(batch_of()).total.backward()
        optimizer.step()
    for name, tensor in model.image_encoder.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)
    assert model.label_head.weight.abs().sum() > 0


def test_learning_rates_of_head_and_layers() -> None:
    groups = classifier(head_lr_mult=4.0).parameter_groups(
        lr=1e-3, weight_decay=0.1, layer_decay=0.5
    )
    rates = {
        group["name"].split(":")[0]: group["lr"]
        for group in groups
        if group["name"].startswith("head")
    }
    assert rates == {"head": 4e-3}
    encoder = {group["lr"] for group in groups if group["name"].startswith("encoder")}
    assert max(encoder) <= 1e-3
    assert len(encoder) > 2
    assert sum(len(group["params"]) for group in groups) == len(list(classifier().parameters()))


def test_loaded_checkpoint_equals_the_saved_model(tmp_path: Path) -> None:
    model = classifier(frozen=True).eval()
    torch.nn.init.normal_(model.label_head.weight)
    save(model, tmp_path)
    loaded = load(tmp_path)
    assert isinstance(loaded, Classifier)
    assert loaded.transform == BRIGHT
    assert loaded.config.labels == NAMES
    torch.testing.assert_close(
        loaded.label_logits(batch_of().image_BCHW), model.label_logits(batch_of().image_BCHW)
    )
    probabilities = loaded.predict(batch_of().image_BCHW)
    torch.testing.assert_close(
        probabilities["Edema"], torch.sigmoid(model.label_logits(batch_of().image_BCHW))[:, 0]
    )
    assert not any(p.requires_grad for p in loaded.image_encoder.parameters())


def test_create_classifier_uses_the_encoder_of_any_system(tmp_path: Path) -> None:
    settings = {
        "image_encoder": "resnet_tiny",
        "text_encoder": "tiny_bert",
        "image_size": 32,
        "vocab_size": 50,
    }
    convirt = medvl.create_model(
        "convirt", projection_dim=8, frozen_text_layers=0, **settings
    ).eval()
    save(convirt, tmp_path)
    model = create_classifier(tmp_path, NAMES, frozen_encoder=True)
    for name, tensor in convirt.image_encoder.state_dict().items():
        torch.testing.assert_close(model.image_encoder.state_dict()[name], tensor, rtol=0, atol=0)
    assert model.transform == convirt.transform
    other = tmp_path / "classifier"
    other.mkdir()
    save(model, other)
    assert create_classifier(other, ("Mass",)).config.labels == (
        "Mass",
    )  # a new head on an old classifier
    with raises(ConfigError, "unknown_name", names="nowhere"):
        create_classifier("nowhere", NAMES)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError):
        create_classifier(tmp_path, NAMES)


@pytest.mark.parametrize("make", [radzero, umrl])
def test_fine_tuning_trains_what_pretraining_froze(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And says that the trained layers of such systems lie above the encoder that it takes."""
    pretrained = make(frozen_image=True) if make is radzero else make()
    assert pretrained.image_encoder.is_frozen
    save(pretrained, tmp_path)
    model = create_classifier(tmp_path, NAMES).train()
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(module.training for module in model.modules())
    assert sum(len(group["params"]) for group in model.parameter_groups(1e-3, 0.1)) == len(
        list(model.parameters())
    )
    assert "left the image encoder frozen" in caplog.text
    assert create_classifier(tmp_path, NAMES, frozen_encoder=True).image_encoder.is_frozen
    dense = create_dense(Segmenter, tmp_path, NAMES, width=16, frozen_encoder=False)
    assert all(parameter.requires_grad for parameter in dense.parameters())


@pytest.mark.parametrize("make", [gloria, mgca])
def test_the_encoder_of_a_system_that_stretches_images_stretches_them(
    make: Any, tmp_path: Path
) -> None:
    pretrained = make().eval()
    save(pretrained, tmp_path)
    image_BCHW = make_batch("gloria").image_BCHW
    pixels = pretrained.image_encoder.normalize(image_BCHW)
    enlarged = torch.nn.functional.interpolate(
        pixels, (96, 96), mode="bilinear", align_corners=True
    )
    expected_BD = create_image_encoder("resnet_tiny", pretrained=False)
    expected_BD.load_state_dict(pretrained.image_encoder.state_dict())
    expected_BD = expected_BD.eval()(enlarged, normalized=True).pooled_BD
    model = create_classifier(tmp_path, NAMES).eval()
    torch.testing.assert_close(model.image_encoder(image_BCHW).pooled_BD, expected_BD)
    (tmp_path / "classifier").mkdir()
    save(model, tmp_path / "classifier")
    torch.testing.assert_close(
        load(tmp_path / "classifier").image_encoder(image_BCHW).pooled_BD, expected_BD
    )
    probed = ProbedEncoder.from_model(pretrained, name="")
    torch.testing.assert_close(probed.module(image_BCHW).pooled_BD, expected_BD)


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("labels", (), "out_of_range"),
        ("labels", ("a", "a"), "out_of_range"),
        ("head_lr_mult", 0.0, "out_of_range"),
        ("encoder", {}, "missing"),
    ],
)
def test_config_rejects_invalid_values(field: str, value: Any, code: str) -> None:
    with raises(ConfigError, code, field):
        ClassifierConfig(**{"encoder": {"name": "resnet_tiny"}, "labels": NAMES, field: value})


def test_create_model_creates_a_classifier() -> None:
    model = medvl.create_model(
        "classifier", encoder={"name": "resnet_tiny", "image_size": 32}, labels=NAMES
    )
    assert isinstance(model, Classifier)
    assert "classifier" in medvl.list_models()


# Data


def test_labels_follow_the_policy_and_the_chosen_columns() -> None:
    labels_NL = np.array([[-1, 1, np.nan], [0, np.nan, 1]])
    source = make_source(labels_NL, ("Edema", "Fracture", "No Finding"))
    settled = LabelPolicyView(
        source, ("Fracture", "Edema", "Mass"), LabelPolicy(uncertain="ones").apply
    )
    assert [settled.sample(place).labels for place in range(2)] == [
        {"Fracture": 1, "Edema": 1},
        {"Fracture": 0, "Edema": 0},
    ]
    ignoring = LabelPolicyView(
        source, NAMES, LabelPolicy(missing="ignore", no_finding="labelled").apply
    )
    assert [ignoring.sample(place).labels for place in range(2)] == [{"Fracture": 1}, {"Edema": 0}]
    assert settled.label_names == ("Fracture", "Edema", "Mass")
    assert settled.fingerprint != ignoring.fingerprint != source.fingerprint


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("labels"))


def data_of(shards: Path, **settings: Any) -> ClassificationDataConfig:
    return ClassificationDataConfig(
        train=shards / "train", valid=shards / "validate", workers=0, **settings
    )


@pytest.mark.training
def test_training_stops_early_and_keeps_the_best_step(shards, tmp_path):
    policy = LabelPolicy()
    data = data_of(shards, fraction=0.5, fraction_seed=3, seed=seed_of())
    assert data.names() == NAMES
    model = create_classifier_of(data)
    opened = open_classification(data, model, policy.apply, batch=4)
    assert opened.described["data"]["train"]["images"] == 16
    config = TrainConfig(
        run_dir=tmp_path, epochs=share_of(50), global_batch=4, best_metric="classify/auroc/Edema",
        best_mode="max", early_stop_patience=2, tensorboard=False, log_every=100,
    )  # fmt: skip
    evals = [ClassifyEval(opened.valid_images, policy=policy)]
    result = train(
        model, opened.train, valid_loader=opened.valid, evals=evals, optim=OptimConfig(lr=0.05),
        config=config, run=opened.described,
    )  # fmt: skip
    assert result.stopped == "early_stop"
    assert result.best_value > 0.9
    assert result.best is not None
    best = load(result.best)
    loader = open_loader(
        ShardSource(shards / "validate"),
        batch=5,
        image=best.transform,
        text=WholeText(),
        tokenizer=no_text,
        train=False,
    )
    evaluation = classify(best, loader, resamples=20, checkpoint=result.best)
    scores, truth = evaluation.images.scores_NL[:, 0], evaluation.images.labels_NL[:, 0]
    assert evaluation.results.row("auroc", "Edema").value == pytest.approx(
        reference.roc_auc_score(truth, scores)
    )
    assert evaluation.results.row("auroc", "Edema").value == pytest.approx(result.best_value)
    assert evaluation.results.config["ece_bins"] == 15
    assert {"ece", "brier", "average_precision"} <= {row.metric for row in evaluation.results.rows}
    assert "f1" not in {row.metric for row in evaluation.results.rows}
    with raises(SplitError, "leak"):
        classify(best, loader, valid_loader=loader)


def create_classifier_of(data: ClassificationDataConfig) -> Classifier:
    torch.manual_seed(0)
    return Classifier.on(
        create_image_encoder("resnet_tiny", image_size=32),
        data.names(),
        BRIGHT,
        frozen_encoder=True,
    )


def test_fractions_equal_those_of_the_linear_probe(shards):
    source = ShardSource(shards / "train")
    patients = [source.sample(place).patient for place in range(len(source))]
    data = data_of(shards, fraction=0.25, fraction_seed=7)
    opened = open_classification(data, create_classifier_of(data), LabelPolicy().apply, batch=4)
    wanted = {source.sample(int(place)).key for place in label_fraction(patients, 0.25, 7)}
    assert {key for batch in opened.train for key in batch.keys} == wanted


def test_training_images_have_the_models_size_and_fit(shards: Path) -> None:
    data, model = data_of(shards), classifier()
    loader = open_classification(data, model, LabelPolicy().apply, batch=4).train
    apply, source = BRIGHT.build(), ShardSource(shards / "train")
    keys = [source.sample(place).key for place in range(len(source))]
    batch = next(iter(loader))
    for key, image_CHW in zip(batch.keys, batch.image_BCHW, strict=True):
        expected_HWC = apply(source.pixels(keys.index(key)), np.random.default_rng(0)).image_HWC
        np.testing.assert_array_equal(image_CHW.permute(1, 2, 0).numpy(), expected_HWC)
    padding = Classifier.on(model.image_encoder, NAMES, EvalTransform(size=32, fit="pad"))
    fitting = ConVIRTAugmentation(size=32)
    for target, image in ((model, fitting), (padding, dataclasses.replace(fitting, pad=True))):
        opened = open_classification(
            dataclasses.replace(data, image=image), target, LabelPolicy().apply, batch=4
        )
        assert next(iter(opened.train)).image_BCHW.shape[2:] == (32, 32)
    augmented = open_classification(
        dataclasses.replace(data, augment=True), padding, LabelPolicy().apply, batch=4
    )
    assert augmented.train.samples.maker.image == dataclasses.replace(
        fitting, pad=True, blur_sigma=(0.1 / 7, 3 / 7)
    )
    with raises(ConfigError, "conflict", "augment"):
        dataclasses.replace(data, augment=True, image=fitting)
    for target, image in ((model, ConVIRTAugmentation(size=64)), (padding, fitting)):
        with raises(ConfigError, "mismatch", "data.image", names="data.image.size 32"):
            open_classification(
                dataclasses.replace(data, image=image), target, LabelPolicy().apply, batch=4
            )


def test_errors_of_data_and_evaluation(shards, tmp_path):
    with raises(ConfigError, "unknown_name", "data.labels", names="it has Edema, Fracture"):
        data_of(shards, labels=("Mass",)).names()
    with raises(ConfigError, "out_of_range", "fraction"):
        data_of(shards, fraction=0.0)
    with raises(ConfigError, "not_found", "data.train", names="\nmake it"):
        data_of(tmp_path).check("make it")
    same = dataclasses.replace(data_of(shards), valid=shards / "train")
    with pytest.raises(SplitError):
        open_classification(same, classifier(), LabelPolicy().apply, batch=4)
    stranger = FileSource(make_source(np.eye(2), ("Mass", "Nodule")).samples, ("Mass", "Nodule"))
    loader = open_loader(
        stranger, batch=2, image=BRIGHT, text=WholeText(), tokenizer=no_text, train=False
    )
    with raises(EvaluationError, "mismatch", "labels"):
        ClassifyEval(loader)(classifier())
