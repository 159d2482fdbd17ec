"""Classifier of change: loss and gradients, prior images, checkpoints, training on shards and
evaluation.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.contrastive_systems import biovil_t, convirt, make_batch, radzero
from helpers.errors import raises
from torch import Tensor

from medvl.cli import main as cli
from medvl.data import ChangeLabels, ShardSource
from medvl.errors import CheckpointError, ConfigError, EvaluationError
from medvl.eval import ChangeEval
from medvl.models import (
    ChangeClassifier,
    ChangeClassifierConfig,
    create_change_classifier,
    load,
    save,
)
from medvl.models.dual_encoders.bases.base import DualEncoder
from medvl.phantom import write_ms_cxr_t
from medvl.schema import CHANGES, Batch
from medvl.train import ChangeDataConfig, OptimConfig, TrainConfig, open_change, train

FINDINGS = ("Edema", "Pneumonia")
LABELS_BL = torch.tensor(
    [[-1.0, 0.0], [torch.nan] * 2, [1.0, torch.nan], [1.0, -1.0], [0.0, 1.0], [-1.0] * 2, [0.0] * 2]
)
BATCH: Batch = dataclasses.replace(make_batch("biovil_t"), has_image_B=None, labels_BL=LABELS_BL)


def classifier(model: DualEncoder, tmp_path: Path, **options: Any) -> ChangeClassifier:
    save(model, tmp_path)
    made = create_change_classifier(tmp_path, FINDINGS, **options)
    torch.nn.init.normal_(made.change_head.weight, generator=torch.Generator().manual_seed(1))
    return made


def encoded(model: ChangeClassifier) -> Tensor:
    """Return the vectors of the batch by the methods of the dual-encoder."""
    image, prior, has_B = BATCH.image_BCHW, BATCH.prior_BCHW, BATCH.has_prior_B
    assert prior is not None
    assert has_B is not None
    if model.dual_encoder.name == "biovil_t":
        return model.dual_encoder.embed_with_prior(image, prior, has_B).global_NE
    prior_BE = model.dual_encoder.encode_image(prior) * has_B[:, None]
    return torch.cat([model.dual_encoder.encode_image(image), prior_BE], dim=1)


@pytest.mark.parametrize("make", [biovil_t, convirt])
def test_loss_is_the_cross_entropy_of_the_known_labels(make: Any, tmp_path: Path) -> None:
    model = classifier(make(), tmp_path).eval()
    logits_BLC = model.change_head(encoded(model)).view(len(BATCH), 2, 3)
    known = [
        (row, column)
        for row in range(len(BATCH))
        for column in range(2)
        if LABELS_BL[row, column].isfinite()
    ]
    entropies = [
        F.cross_entropy(logits_BLC[row, column], (LABELS_BL[row, column] + 1).long())
        for row, column in known
    ]
    loss = model(BATCH).total
    torch.testing.assert_close(loss, torch.stack(entropies).mean())
    assert model.loss_counts(BATCH).tolist() == [len(known)] == [11]
    loss.backward()
    learns = {
        name
        for name, each in model.named_parameters()
        if each.grad is not None and each.grad.abs().sum() > 0
    }
    assert {name.split(".")[1] for name in learns} >= {
        "image_encoder",
        "image_head",
        "weight",
        "bias",
    }
    assert not any("text" in name or "word" in name for name in learns)
    if make is biovil_t:
        assert {"dual_encoder.missing_prior", "dual_encoder.patch_head.weight"} <= learns


def test_a_new_head_predicts_every_class_alike(tmp_path: Path) -> None:
    save(convirt(), tmp_path)
    model = create_change_classifier(tmp_path, FINDINGS)
    assert model(BATCH).total.item() == pytest.approx(torch.tensor(3.0).log().item())
    nothing = dataclasses.replace(BATCH, labels_BL=torch.full_like(LABELS_BL, torch.nan))
    assert model(nothing).total.item() == 0


def test_a_frozen_image_encoder_is_trained(tmp_path: Path) -> None:
    pretrained = radzero(frozen_image=True)
    assert pretrained.image_encoder.is_frozen
    model = classifier(pretrained, tmp_path).train()
    assert not model.dual_encoder.image_encoder.is_frozen
    assert all(module.training for module in model.dual_encoder.image_encoder.modules())


@pytest.mark.parametrize("make", [biovil_t, convirt])
def test_placeholders_and_rows_without_labels_do_not_enter_batch_norms(
    make: Any, tmp_path: Path
) -> None:
    model = classifier(make(), tmp_path).train()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert BATCH.has_prior_B is not None
    assert BATCH.prior_BCHW is not None
    assert not BATCH.has_prior_B.all()
    unlabelled_B = LABELS_BL.isnan().all(dim=1)
    image_BCHW, prior_BCHW = BATCH.image_BCHW.clone(), BATCH.prior_BCHW.clone()
    image_BCHW[unlabelled_B] = 255
    prior_BCHW[~BATCH.has_prior_B | unlabelled_B] = 255
    found = []
    for batch in (BATCH, dataclasses.replace(BATCH, image_BCHW=image_BCHW, prior_BCHW=prior_BCHW)):
        model.load_state_dict(start)
        torch.manual_seed(0)
        found.append(
            (model(batch).total, {name: tensor.clone() for name, tensor in model.named_buffers()})
        )
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert any(
        not torch.equal(tensor, start[name])
        for name, tensor in found[0][1].items()
        if name in start
    )


def test_a_batch_with_one_labelled_row_changes_no_statistics(tmp_path: Path) -> None:
    model = classifier(convirt(), tmp_path).train()
    before = {
        name: tensor.clone() for name, tensor in model.named_buffers() if "num_batches" not in name
    }
    labels_BL = torch.full_like(LABELS_BL, torch.nan)
    labels_BL[0, 0] = 1.0
    model(
        dataclasses.replace(BATCH, labels_BL=labels_BL, mean_counts_K=torch.ones(1))
    ).total.backward()
    assert all(
        torch.equal(tensor, before[name])
        for name, tensor in model.named_buffers()
        if name in before
    )
    trained = [
        parameter
        for parameter in model.dual_encoder.image_encoder.parameters()
        if parameter.requires_grad
    ]
    assert all(parameter.grad is not None for parameter in trained)


@pytest.mark.parametrize("make", [biovil_t, convirt])
def test_without_the_prior_image_only_the_image_is_read(make: Any, tmp_path: Path) -> None:
    model = classifier(make(), tmp_path, use_prior=False).eval()
    assert not model.inputs.prior_image
    alone = dataclasses.replace(BATCH, prior_BCHW=None, has_prior_B=None)
    torch.testing.assert_close(model.change_logits(BATCH), model.change_logits(alone))
    reading = classifier(make(), tmp_path / "..", use_prior=True)
    with raises(ConfigError, "missing", "prior_BCHW"):
        reading.change_logits(alone)


def test_checkpoints_hold_the_whole_classifier(tmp_path: Path) -> None:
    (tmp_path / "start").mkdir()
    (tmp_path / "saved").mkdir()
    model = classifier(biovil_t(), tmp_path / "start").eval()
    save(model, tmp_path / "saved")
    torch.testing.assert_close(
        load(tmp_path / "saved").change_logits(BATCH), model.change_logits(BATCH)
    )
    with raises(ConfigError, "wrong_type", "init_from"):
        create_change_classifier(tmp_path / "saved", FINDINGS)
    with pytest.raises(CheckpointError):
        create_change_classifier(tmp_path / "none", FINDINGS)
    with torch.device("meta"), raises(ConfigError, "wrong_type", "dual_encoder"):
        ChangeClassifier.build(
            ChangeClassifierConfig(dual_encoder="autoencoder", findings=FINDINGS),
            pretrained=False,
            tokenizer=None,
        )


@pytest.mark.parametrize("dual_encoder", ["a_folder", "biovil_t"])
def test_a_checkpoint_does_not_make_its_reader_open_other_files(
    dual_encoder: str, tmp_path: Path
) -> None:
    name = str(tmp_path) if dual_encoder == "a_folder" else dual_encoder
    settings = {} if dual_encoder == "a_folder" else {"init_from": str(tmp_path)}
    config = ChangeClassifierConfig(dual_encoder=name, settings=settings, findings=FINDINGS)
    with torch.device("meta"), raises(ConfigError, "unknown_name"):
        ChangeClassifier.build(config, pretrained=False, tokenizer=None)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("change")
    for name, seed in (("train", 40), ("valid", 34)):
        write_ms_cxr_t(folder / f"{name}-files", patients=12, seed=seed, size=48, workers=1)
        cli.main(["shards", "ms-cxr-t", "--root", str(folder / f"{name}-files"), "--out",
            str(folder / name),
                  "--short-side", "32", "--workers", "1"])  # fmt: skip
    return folder


def test_labels_of_change_are_numbers(shards: Path) -> None:
    source = ShardSource(shards / "train" / "test")
    view = ChangeLabels(source, ("Edema", "Pneumothorax"))
    assert view.label_names == ("Edema", "Pneumothorax")
    assert view.fingerprint != ChangeLabels(source, ("Edema",)).fingerprint
    for position in range(len(source)):
        change: Any = source.sample(position).extra.get("change", {})
        expected = {
            name: CHANGES.index(change[name]) - 1 for name in view.label_names if name in change
        }
        assert view.sample(position).labels == expected


def test_training_and_evaluation_on_shards(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ChangeDataConfig(
        train=shards / "train" / "test", valid=shards / "valid" / "test", workers=0
    )
    names = data.names()
    (tmp_path / "start").mkdir()
    save(biovil_t(), tmp_path / "start")
    model = create_change_classifier(tmp_path / "start", names)
    assert any(
        batch.has_prior_B.any() and batch.labels_BL.isfinite().any()
        for batch in open_change(data, model, batch=4).train
    )
    opened = open_change(data, model, batch=4)
    config = TrainConfig(
        run_dir=tmp_path / "run", steps=2, global_batch=4, find_unused_parameters=True
    )
    train(model, opened.train, optim=OptimConfig(lr=1e-3), config=config, valid_loader=opened.valid)
    scores = ChangeEval(opened.valid_images)(model)
    assert set(scores) == {"change/macro_accuracy", "change/accuracy"}
    command = [
        "eval",
        "change",
        "--checkpoint",
        str(tmp_path / "run" / "last"),
        "--data",
        str(data.valid),
    ]
    cli.main([*command, "--out", str(tmp_path / "out"), "--resamples", "20"])
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert set(names) < {
        row["target"] for row in results["metrics"]
    }  # not the findings without training labels
    found = {row["metric"]: row["value"] for row in results["metrics"] if row["target"] == "macro"}
    assert found == pytest.approx(
        {name.removeprefix("change/"): value for name, value in scores.items()}
    )
    assert "probabilities of the classifier" in (tmp_path / "out" / "index.html").read_text()
    with pytest.raises(SystemExit):
        cli.main([*command, "--folds", "3"])
    assert "folds" in capsys.readouterr().err
    unknown = ChangeClassifier(
        dataclasses.replace(model.config, findings=("Fracture",)), model.dual_encoder
    )
    with raises(EvaluationError, "mismatch", "checkpoint"):
        ChangeEval(opened.valid_images)(unknown)


def test_findings_without_labels_of_change_are_refused(shards: Path) -> None:
    data = ChangeDataConfig(
        train=shards / "train" / "test",
        valid=shards / "valid" / "test",
        labels=("Fracture",),
    )
    with raises(ConfigError, "unknown_name", "data.labels", names="Fracture"):
        data.names()
