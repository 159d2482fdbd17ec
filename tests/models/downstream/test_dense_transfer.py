"""Dense tasks end to end: shards with boxes and masks, training, metrics, pages and commands."""

import dataclasses
import json
import runpy
from pathlib import Path
from typing import Any, cast

import cv2
import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.eval_fakes import FakeLoader, FakeSource
from helpers.learning import seed_of, share_of
from torch import Tensor

from medvl.cli import main as cli
from medvl.data.annotations import encode_runs
from medvl.data.convert.options import ShardOptions, ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record
from medvl.data.loading.dense_targets import DenseBatch
from medvl.data.loading.sources import label_fraction
from medvl.data.privacy import Deidentifier
from medvl.data.shards.source import ShardSource
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import create_image_encoder
from medvl.errors import ConfigError, EvaluationError, SplitError
from medvl.eval import (
    DetectionEval,
    SegmentationEval,
    box_detection,
    mask_segmentation,
    read_results,
    write_detection_page,
    write_segmentation_page,
)
from medvl.eval.core.open import open_for_evaluation
from medvl.eval.core.results import PageHeader
from medvl.eval.dense.detection import detect_images
from medvl.eval.dense.metrics import match_boxes
from medvl.models import Detector, Segmenter, load, save
from medvl.schema import Sample
from medvl.train import Constant, OptimConfig, TrainConfig, train
from medvl.train.tasks.supervised import DenseDataConfig, open_dense

SIDE = 64
SQUASH = EvalTransform(size=SIDE, fit="squash")


def make_shards(folder: Path) -> Path:
    """40 patients to train, 12 to validate, 12 to test: two images in three have a bright square,
    with its box and mask, in pixels of a published image twice as large; in every seventh image
    nobody looked.
    """
    rng = np.random.default_rng(0)
    deid = Deidentifier(b"0123456789abcdef")
    records = []
    for number in range(64):
        image = rng.normal(70, 10, (SIDE, SIDE))
        y, x, side = rng.integers(2, 34), rng.integers(2, 34), rng.integers(18, 28)
        inside = np.zeros((SIDE, SIDE), bool)
        inside[y : y + side, x : x + side] = number % 3 > 0
        path = folder / f"{number}.png"
        cv2.imwrite(str(path), np.clip(image + 120 * inside, 0, 255).astype(np.uint8))
        published = inside.repeat(2, axis=0).repeat(2, axis=1)
        edges = {"x": 2.0 * x, "y": 2.0 * y, "width": 2.0 * side, "height": 2.0 * side}
        extra: dict[str, Any] = {"image_width": 2 * SIDE, "image_height": 2 * SIDE}
        if number % 7:
            extra["boxes"] = [{"label": "Mass", **edges}] if inside.any() else []
            extra["masks"] = (
                [{"label": "Mass", "runs": encode_runs(published)}] if inside.any() else []
            )
        sample = Sample(
            key=f"k-{number:03d}",
            corpus="squares",
            split="train" if number < 40 else "validate" if number < 52 else "test",
            patient=deid.patient(number),
            study=f"s{number}",
            image=path,
            labels={"Mass": int(inside.any())},
            extra=extra,
        )
        records.append(Record(sample))
    plan = Plan("squares", records, ("Mass",), RowCounts())
    write_shards(
        plan,
        deid,
        ShardRun(out=folder / "shards", workers=1),
        ShardOptions(short_side=SIDE, keep_textless=True),
    )
    return folder / "shards"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("squares"))


def data_of(shards: Path, **settings: Any) -> DenseDataConfig:
    return DenseDataConfig(
        train=shards / "train", valid=shards / "validate", workers=0, valid_batch=5, **settings
    )


def model_of(cls: Any) -> Any:
    torch.manual_seed(0)
    encoder = create_image_encoder("resnet_tiny", image_size=SIDE, patch_level=-2)
    return cls.on(encoder, ("Mass",), SQUASH, width=16, doublings=2)


def linear_of(cls: Any) -> Any:
    return cls.on(model_of(cls).image_encoder, ("Mass",), SQUASH, decoder="linear")


@pytest.fixture(scope="module")
def runs() -> dict[int, dict[str, Path]]:
    """Checkpoints of this module by their seed."""
    return {}


@pytest.fixture
def trained(
    shards: Path, runs: dict[int, dict[str, Path]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Kind -> the best checkpoint of a short run, as the recipe makes one."""
    seed = seed_of()
    if seed not in runs:
        runs[seed] = {
            "boxes": fit_squares(
                "boxes", shards, tmp_path_factory.mktemp("boxes"), DetectionEval, "detection/ap@0.4"
            ),
            "masks": fit_squares(
                "masks",
                shards,
                tmp_path_factory.mktemp("masks"),
                SegmentationEval,
                "segmentation/dice_masked",
            ),
        }
    return runs[seed]


def fit_squares(kind: Any, shards: Path, folder: Path, judge: Any, metric: str) -> Path:
    """Return the best checkpoint of a training on the squares."""
    model = model_of(Detector if kind == "boxes" else Segmenter)
    opened = open_dense(data_of(shards, seed=seed_of()), model, kind, batch=8)
    result = train(
        model,
        opened.train,
        valid_loader=opened.valid,
        evals=[judge(opened.valid_images)],
        optim=OptimConfig(lr=1e-2, schedule=Constant()),
        config=TrainConfig(
            run_dir=folder,
            epochs=share_of(12),
            global_batch=8,
            tensorboard=False,
            log_every=1000,
            best_metric=metric,
            best_mode="max",
            validate_every=12,
            checkpoint_every=1000,
        ),
        run=opened.described,
    )
    assert result.best is not None
    return result.best


# Data


def test_batches_have_boxes_and_omit_images_without_annotations(shards: Path) -> None:
    model = model_of(Detector)
    opened = open_dense(data_of(shards), model, "boxes", batch=6)
    source = ShardSource(shards / "train")
    samples = {source.sample(place).key: source.sample(place) for place in range(len(source))}
    seen = []
    for batch in opened.train:
        assert isinstance(batch, DenseBatch)
        assert batch.boxes_BN5 is not None
        for key, boxes_N5 in zip(batch.keys, batch.boxes_BN5, strict=True):
            seen.append(key)
            expected = [
                [b["x"] / 2, b["y"] / 2, (b["x"] + b["width"]) / 2, (b["y"] + b["height"]) / 2, 0]
                for b in samples[key].extra["boxes"]
            ]
            assert boxes_N5[~boxes_N5[:, 0].isnan()].tolist() == expected
    assert len(seen) == len(set(seen)) == 34 // 6 * 6
    assert opened.described["data"]["train"]["images"] == 34  # of 40
    state = opened.train.state_dict()
    opened.train.load_state_dict(state)
    assert (opened.train.global_batch, opened.train.steps_per_epoch) == (6, 5)


def test_fraction_equals_that_of_the_linear_probe(shards: Path) -> None:
    source = ShardSource(shards / "train")
    samples = [source.sample(place) for place in range(len(source))]
    opened = open_dense(
        data_of(shards, fraction=0.25, fraction_seed=3), model_of(Segmenter), "masks", batch=2
    )
    taken = label_fraction([sample.patient for sample in samples], 0.25, 3)
    wanted = {samples[place].key for place in taken if "masks" in samples[place].extra}
    assert opened.described["data"]["train"]["images"] == len(wanted)
    keys = {key for _ in range(4) for batch in opened.train for key in batch.keys}
    assert keys <= wanted


def test_smaller_fractions_are_parts_of_larger_ones(shards: Path) -> None:
    images = [
        {key for batch in opened.train for key in batch.keys}
        for fraction in (0.1, 0.5, 1.0)
        for opened in [
            open_dense(data_of(shards, fraction=fraction), linear_of(Segmenter), "masks", batch=1)
        ]
    ]
    assert images[0] < images[1] < images[2]


def test_errors_of_data(shards: Path, tmp_path: Path) -> None:
    assert data_of(shards).names("boxes") == data_of(shards).names("masks") == ("Mass",)
    with raises(ConfigError, "unknown_name", "data.labels", names="it has Mass"):
        data_of(shards, labels=("Nodule",)).names("boxes")
    with raises(ConfigError, "out_of_range", "fraction"):
        data_of(shards, fraction=1.5)
    with raises(ConfigError, "not_found", "data.train", names="\nmake it"):
        data_of(tmp_path).check("make it")
    same = dataclasses.replace(data_of(shards), valid=shards / "train")
    with pytest.raises(SplitError):
        open_dense(same, model_of(Detector), "boxes", batch=4)


# Training and evaluation


def loader_of(shards: Path, split: str, model: Any) -> Any:
    return open_for_evaluation(ShardSource(shards / split), model.transform, batch=5, workers=0)


@pytest.mark.training
def test_detector_finds_squares_and_is_evaluated_on_all_images(
    shards: Path, trained: dict[str, Path]
) -> None:
    model = load(trained["boxes"])
    assert isinstance(model, Detector)
    test, valid = loader_of(shards, "test", model), loader_of(shards, "validate", model)
    result = box_detection(
        model, test, valid_loader=valid, resamples=50, checkpoint=trained["boxes"]
    )
    assert result.results.row("ap@0.4", "Mass").value > 0.6
    blind = box_detection(model_of(Detector).eval(), test, resamples=0)
    assert blind.results.row("ap@0.4", "Mass").value < 0.2
    row = result.results.row("ap_rsna", "Mass")
    assert row.low <= row.value <= row.high
    assert row.value <= result.results.row("ap_rsna_boxed", "Mass").value
    details = result.results.details
    source = ShardSource(shards / "test")
    looked = [s for s in map(source.sample, range(len(source))) if "boxes" in s.extra]
    assert (
        (details["images"], details["not_annotated"])
        == (row.n, len(source) - len(looked))
        == (len(looked), 12 - len(looked))
    )
    assert details["images_without_box"] == {"Mass": sum(not s.extra["boxes"] for s in looked)}
    assert details["thresholds"] == result.thresholds
    assert {"challenge_score", "left_empty"} <= {row.metric for row in result.results.rows}
    assert {row.metric for row in blind.results.rows}.isdisjoint({"challenge_score", "left_empty"})
    lines = list(result.predictions())
    assert len(lines) == len(looked)
    assert all(
        0 <= box["x"] <= 2 * SIDE and box["width"] >= 0 for line in lines for box in line["boxes"]
    )
    metrics = DetectionEval(test)(model)
    assert metrics["detection/ap_rsna"] == pytest.approx(row.value)
    with raises(SplitError, "leak"):
        box_detection(model, test, valid_loader=test)


@pytest.mark.training
def test_segmenter_marks_squares_under_both_rules(shards: Path, trained: dict[str, Path]) -> None:
    model = load(trained["masks"])
    assert isinstance(model, Segmenter)
    test, valid = loader_of(shards, "test", model), loader_of(shards, "validate", model)
    result = mask_segmentation(
        model, test, valid_loader=valid, resamples=50, keep_maps=2, checkpoint=trained["masks"]
    )
    row = result.results.row("dice_masked", "Mass")
    assert row.value > 0.6
    assert row.low <= row.value <= row.high
    skipping = mask_segmentation(model, test, valid_loader=valid, empty="skip_empty", resamples=0)
    assert skipping.results.row("dice", "Mass").n == row.n < result.results.row("dice", "Mass").n
    assert (
        skipping.results.row("dice", "Mass").value
        == skipping.results.row("dice_masked", "Mass").value
    )
    details = result.results.details
    assert details["images_with_mask"] == {"Mass": row.n}
    assert details["empty_prediction_dice"]["Mass"] == pytest.approx(1 - row.n / details["images"])
    assert not details["masks_are_boxes"]
    assert 1 <= sum(image.map_LHW is not None for image in result.images) <= 4
    means = [line["dice"]["Mass"] for line in result.predictions()]
    assert np.mean(means) == pytest.approx(result.results.row("dice", "Mass").value)
    smaller = mask_segmentation(model, test, valid_loader=valid, side=SIDE, resamples=0)
    assert smaller.results.row("dice", "Mass").value == pytest.approx(np.mean(means), abs=0.05)
    fixed = mask_segmentation(model, test, empty="lvit", resamples=0)
    assert fixed.results.details["empty_prediction_dice"] == details["empty_prediction_dice"]
    assert skipping.results.details["empty_prediction_dice"] == {"Mass": 0.0}
    assert fixed.results.config["threshold_source"] == "fixed"
    assert fixed.thresholds["Mass"].threshold == 0.5
    with pytest.raises(SplitError):
        mask_segmentation(model, test, valid_loader=test)


def test_pages_show_results(shards: Path, trained: dict[str, Path], tmp_path: Path) -> None:
    detector, segmenter = load(trained["boxes"]), load(trained["masks"])
    assert isinstance(detector, Detector)
    assert isinstance(segmenter, Segmenter)
    test = loader_of(shards, "test", detector)
    for result, write in (
        (
            box_detection(
                detector, test, valid_loader=loader_of(shards, "validate", detector), resamples=20
            ),
            write_detection_page,
        ),
        (mask_segmentation(segmenter, test, resamples=20, keep_maps=2), write_segmentation_page),
    ):
        page = write(
            result,
            tmp_path / "page.html",
            PageHeader(model="ours", data="squares"),
            pixels=test.source.pixels,
        ).read_text()
        assert page.count("data:image/jpeg") >= 3
        assert "Mass" in page
        assert "Normal, " in page
        bare = write(
            result, tmp_path / "bare.html", PageHeader(model="ours", data="squares")
        ).read_text()
        assert "data:image/jpeg" not in bare


def test_commands_write_results_and_a_page(
    shards: Path, trained: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [
        "--data",
        str(shards / "test"),
        "--valid",
        str(shards / "validate"),
        "--workers",
        "0",
        "--resamples",
        "20",
    ]
    for task, kind in (("detection", "boxes"), ("segmentation", "masks")):
        out = tmp_path / task
        cli.main(["eval", task, "--checkpoint", str(trained[kind]), "--out", str(out), *common])
        assert "Mass" in capsys.readouterr().out
        results = read_results(out)
        assert results.protocol == task
        assert results.inputs["validation_manifest"] == ShardSource(shards / "validate").fingerprint
        assert (
            len((out / "predictions.jsonl").read_text().splitlines()) == results.details["images"]
        )
        assert (out / "index.html").stat().st_size > 5000
    with pytest.raises(SystemExit):
        cli.main(["eval", "detection", "--checkpoint", str(trained["masks"]), *common])
    assert "is a segmenter" in capsys.readouterr().err
    seen = ["--data", str(shards / "train"), "--workers", "0"]
    with pytest.raises(SystemExit):
        cli.main(["eval", "detection", "--checkpoint", str(trained["boxes"]), *seen])
    assert "patient" in capsys.readouterr().err


def test_several_labels_have_a_macro_mean() -> None:
    """With a model that is right for the first of two labels and predicts nothing for the
    second.
    """
    samples = [
        Sample(
            key=f"k{n}",
            corpus="c",
            split="test",
            patient=f"p{n}",
            study="s",
            extra={
                "image_width": 40,
                "image_height": 20,
                "boxes": [
                    {"label": label, "x": 4, "y": 2, "width": 12, "height": 9}
                    for label in ("A", "B")[: n % 3]
                ],
            },
        )
        for n in range(9)
    ]
    source = FakeSource(samples, [np.zeros((20, 40), np.uint8) for _ in samples], ())

    class Knows(torch.nn.Module):
        config: Any = type("Config", (), {"labels": ("A", "B")})
        device = torch.device("cpu")

        def detect(self, batch: Any, sizes: Any) -> list[Tensor]:
            assert not torch.is_grad_enabled()
            known = torch.tensor([[4.0, 2, 16, 11, 0.9], [0, 0, 1, 1, -torch.inf]])
            nothing = torch.tensor([[0.0, 0, 1, 1, -torch.inf]] * 2)
            return [torch.stack([known, nothing]) for _ in sizes]

    loader: Any = FakeLoader(source, batch=4)
    model: Any = Knows()
    images, _ = detect_images(model, loader)
    assert match_boxes([image.detections[0] for image in images]).boxes_N.tolist() == [
        n % 3 > 0 for n in range(9)
    ]
    result = box_detection(model, loader, valid_loader=None, resamples=20)
    values = {row.target: row.value for row in result.results.rows if row.metric == "ap_rsna"}
    assert values["A"] == pytest.approx(2 / 3)  # six of nine equal scores are hits
    assert values["B"] == 0
    assert values["macro"] == pytest.approx(values["A"] / 2)
    assert DetectionEval(loader)(model)["detection/ap_rsna"] == pytest.approx(values["macro"])
    voc = box_detection(model, loader, convention="voc2012", resamples=0).results
    assert (voc.config["convention"]["name"], voc.config["convention"]["recalls"]) == (
        "voc2012",
        "all",
    )
    with raises(EvaluationError, "unknown_name", "convention"):
        box_detection(model, loader, convention=cast(Any, "voc"))
    source.samples = [dataclasses.replace(sample, extra={}) for sample in source.samples]
    with raises(EvaluationError, "empty"):
        box_detection(model, loader)


# Recipe


def test_recipe_runs_both_tasks(shards: Path, tmp_path: Path) -> None:
    start = tmp_path / "start"
    start.mkdir()
    save(model_of(Segmenter), start)
    names = runpy.run_path(str(Path(__file__).parents[3] / "recipes" / "dense_transfer.py"))
    for preset, cls in (
        ("tiny", Detector),
        ("tiny-segmentation", Segmenter),
        ("lovt-linear", Segmenter),
    ):
        recipe = names["PRESETS"][preset]
        settings = dataclasses.replace(
            recipe,
            init_from=start,
            width=16,
            data=data_of(shards, fraction=0.5),
            train=dataclasses.replace(
                recipe.train,
                run_dir=tmp_path / preset,
                epochs=1,
                global_batch=8,
                precision="fp32",
                tensorboard=False,
            ),
        )
        run = names["prepare"](settings)
        assert isinstance(run.model, cls)
        assert run.model.config.labels == ("Mass",)
        result = run.train()
        assert result.best_metric in result.metrics
        run = json.loads((result.last / "config.json").read_text())["run"]
        assert run["settings"]["task"] == recipe.task
        assert run["data"]["train"]["fraction"] == 0.5
