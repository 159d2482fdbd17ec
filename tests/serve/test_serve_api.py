"""What the server answers: the same numbers as the models and readers behind it."""

import base64
import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.label_shards import make_shards
from helpers.served import checkpoint_of, client, dicom, png, post, served, tiny_convirt, tiny_vqa
from starlette.testclient import TestClient

import medvl
from medvl.data.images.codecs import decode_image
from medvl.data.shards.source import ShardSource
from medvl.errors import ConfigError, EvaluationError
from medvl.eval.core.results import checkpoint_sha256
from medvl.eval.grounding.heatmaps import phrase_maps
from medvl.eval.zero_shot_classification.calibration import (
    Calibration,
    FindingCalibration,
    calibration_path,
    write_calibration,
)
from medvl.eval.zero_shot_classification.prompts import load_prompts
from medvl.eval.zero_shot_classification.protocol import PromptScorer
from medvl.inference import infer
from medvl.models import DualEncoder
from medvl.phantom import draw_example
from medvl.serve import Gallery, ServeConfig, ServedModel, open_models
from medvl.serve.app import _STATIC as STATIC

MODEL = tiny_convirt()
assert isinstance(MODEL, DualEncoder)
FITTED = FindingCalibration(
    slope=2.0,
    intercept=-1.0,
    images=80,
    positives=20,
    brier_before=0.2,
    brier_after=0.1,
    ece_before=0.2,
    ece_after=0.1,
)
CALIBRATION = Calibration(
    prompts="chexpert_pairs",
    prompts_sha256="p",
    checkpoint_sha256="c",
    data={"corpus": "ours"},
    findings={"Edema": FITTED},
    left_out={},
)


@pytest.fixture(scope="module")
def one() -> TestClient:
    return client([served(MODEL, calibration=CALIBRATION)])


@pytest.fixture(scope="module")
def two() -> TestClient:
    return client([served(MODEL, "left"), served(tiny_vqa(), "right")])


def results(response) -> list:
    assert response.status_code == 200, response.text
    return response.json()["models"]


def test_page_loads_nothing_from_elsewhere_and_has_no_inline_code(one: TestClient) -> None:
    for name, kind in STATIC.items():
        response = one.get("/" if name == "index.html" else f"/{name}")
        assert response.headers["content-type"] == kind
        assert (
            "default-src 'none'; script-src 'self'" in response.headers["content-security-policy"]
        )
        assert not re.search(r"https?://|\bon[a-z]+=|style=\"|<style|<script>", response.text), name


def test_models_are_described(two: TestClient) -> None:
    described = two.get("/api/models").json()
    left, right = (model["abilities"] for model in described["models"])
    assert left == {
        "scores": True,
        "heatmap": True,
        "answer": False,
        "report": False,
        "neighbors": True,
    }
    assert right == {
        "scores": False,
        "heatmap": True,
        "answer": True,
        "report": False,
        "neighbors": False,
    }
    assert described["findings"] == list(load_prompts("chexpert_pairs").classes)
    assert described["gallery"] is None


def test_scores_are_those_of_the_evaluator_and_calibrated(one: TestClient) -> None:
    prompts = load_prompts("chexpert_pairs")
    image_BCHW = MODEL.transform(decode_image(png()))
    with torch.no_grad():
        expected = dict(
            zip(
                prompts.classes,
                PromptScorer(MODEL, prompts)(MODEL.embed_images(image_BCHW))[0].tolist(),
                strict=True,
            )
        )
    (model,) = results(post(one, "scores", png()))
    assert {row["text"]: row["score"] for row in model["result"]} == pytest.approx(expected)
    for row in model["result"]:
        odds = expected[row["text"]] / (1 - expected[row["text"]])
        probability = 1 / (1 + np.exp(1.0 - 2 * np.log(odds))) if row["text"] == "Edema" else None
        assert row["probability"] == pytest.approx(probability)


def test_names_of_findings_take_the_prompts_and_other_texts_their_negation(one: TestClient) -> None:
    (model,) = results(post(one, "scores", png(), ["edema", "Large left effusion"]))
    assert {row["text"]: row["score"] for row in model["result"]} == pytest.approx(
        {"Edema": infer(MODEL, png(), ["Edema"], prompts="chexpert_pairs")["Edema"]}
        | infer(MODEL, png(), ["Large left effusion"], prompts="chexpert_pairs")
    )
    known, typed = model["result"]
    assert known["text"] == "Edema"
    assert known["positive"] == list(load_prompts("chexpert_pairs").classes["Edema"].positive)
    assert (typed["positive"], typed["negative"]) == (
        ["There is large left effusion."],
        ["There is no large left effusion."],
    )
    assert typed["probability"] is None


def test_classes_that_compete_are_calibrated_all_together_or_not_at_all() -> None:
    """A softmax over some of the classes is another number than the one that the calibration was
    fitted to.
    """
    prompts = load_prompts("chexpert_classes")
    names = list(prompts.classes)
    calibration = dataclasses.replace(
        CALIBRATION, prompts=prompts.name, findings=dict.fromkeys(names, FITTED)
    )
    to = client([ServedModel("tiny", MODEL, prompts, calibration)])
    for texts in ([], names[::-1], [name.upper() for name in names]):
        (model,) = results(post(to, "scores", png(), texts))
        expected = infer(MODEL, png(), prompts=prompts)
        for row in model["result"]:
            assert row["score"] == pytest.approx(expected[row["text"]])
            assert row["probability"] == pytest.approx(FITTED.probability(row["score"]))
            assert row["positive"] == list(prompts.classes[row["text"]].positive)
            assert row["negative"] == []
    (model,) = results(post(to, "scores", png(), [names[1].lower(), names[0]]))
    assert [row["text"] for row in model["result"]] == [names[1], names[0]]
    assert {row["text"]: row["score"] for row in model["result"]} == pytest.approx(
        infer(MODEL, png(), names[:2], prompts=prompts)
    )
    assert [row["probability"] for row in model["result"]] == [None, None]
    for texts in (names[:1], ["Large left effusion", *names]):
        (model,) = results(post(to, "scores", png(), texts))
        assert model["error"]["code"] in ("empty", "unknown_name")


def test_view_is_the_rendering_of_the_file_and_its_values(one: TestClient) -> None:
    view = post(one, "view", dicom(PhotometricInterpretation="MONOCHROME1")).json()
    assert (view["height"], view["width"], view["format"]) == (48, 64, "DICOM")
    shown_HW = np.frombuffer(base64.b64decode(view["pixels"]), np.uint8).reshape(48, 64)
    window = view["window"]
    assert (window["center"], window["width"], window["inverted"]) == (1500, 2000, True)
    codes_HW = np.frombuffer(base64.b64decode(window["values"]), "<u2").reshape(48, 64)
    values_HW = window["low"] + (codes_HW.astype(float) - 1) / 65534 * (
        window["high"] - window["low"]
    )
    np.testing.assert_allclose(
        values_HW, np.add.outer(np.arange(48), np.arange(64)) * 36, atol=0.05
    )
    shades_HW = 1 - np.clip((values_HW - 1500) / 2000 + 0.5, 0, 1)
    assert np.abs(255 * shades_HW - shown_HW).max() <= 1  # as viewer.js computes it


def test_padding_is_black_under_every_window(one: TestClient) -> None:
    pixels = np.full((32, 32), 700, np.uint16)
    pixels[:8] = 4095
    window = post(one, "view", dicom(pixels, PixelPaddingValue=4095)).json()["window"]
    codes_HW = np.frombuffer(base64.b64decode(window["values"]), "<u2").reshape(32, 32)
    assert (codes_HW[:8] == 0).all()
    assert (codes_HW[8:] > 0).all()
    assert window["high"] == 700


def test_models_get_the_window_of_the_request(one: TestClient) -> None:
    plain, own, other = (
        results(post(one, "scores", dicom(), ["Edema"], **window))[0]["result"][0]["score"]
        for window in ({}, {"center": 1500, "width": 2000}, {"center": 300, "width": 200})
    )
    assert own == pytest.approx(plain, abs=1e-3)
    assert abs(other - plain) > 1e-4


def test_frames_are_selected(one: TestClient) -> None:
    frames = np.stack([np.full((32, 32), 10, np.uint8), np.full((32, 32), 200, np.uint8)])
    data = dicom(
        frames, NumberOfFrames=2, BitsStored=8, HighBit=7, WindowCenter=None, WindowWidth=None
    )
    views = [post(one, "view", data, frame=frame).json() for frame in (0, 1)]
    assert views[0]["frames"] == 2
    assert [base64.b64decode(view["pixels"])[0] for view in views] == [10, 200]
    assert post(one, "view", data, frame=2).json()["error"]["code"] == "multi_frame"


def test_heatmap_is_that_of_grounding(one: TestClient) -> None:
    (model,) = results(post(one, "heatmap", png(), ["Edema"]))
    shown = model["result"]
    image_BCHW = MODEL.transform(decode_image(png()))
    map_HW = (
        phrase_maps(MODEL, image_BCHW, ["Edema"], [(80, 80)], maps="similarity")[0].double().numpy()
    )
    assert (shown["low"], shown["high"]) == pytest.approx((map_HW.min(), map_HW.max()))
    codes_HW = np.frombuffer(base64.b64decode(shown["map"]), np.uint8).reshape(80, 80)
    heat_HW = np.clip((map_HW - map_HW.mean()) / (map_HW.max() - map_HW.mean()), 0, 1)
    assert np.abs(1 + 254 * heat_HW - codes_HW).max() <= 0.51
    assert codes_HW[int(80 * shown["peak"][1]), int(80 * shown["peak"][0])] == 255


def test_each_model_answers_or_says_why_not(two: TestClient) -> None:
    left, right = results(post(two, "answer", png(), ["Is there an effusion?"]))
    assert left["error"]["code"] == "unsupported"
    assert right["result"]["answer"] in ("yes", "no")
    assert 0 <= right["result"]["score"] <= 1
    left, right = results(post(two, "scores", png(), ["Edema"]))
    assert "result" in left
    assert right["error"]["code"] == "unsupported"
    assert all("error" in model for model in results(post(two, "report", png())))


def test_reports_are_written() -> None:
    tokenizer = tiny_convirt().tokenizer
    writer = medvl.create_model(
        "r2gen",
        tokenizer=tokenizer,
        image_encoder="resnet_tiny",
        image_size=64,
        max_tokens=12,
        width=32,
        heads=2,
    ).eval()
    app = client([served(writer)])
    assert app.get("/api/models").json()["models"][0]["abilities"]["report"]
    (model,) = results(post(app, "report", png()))
    assert isinstance(model["result"]["report"], str)


def test_the_demo_offers_its_example_and_other_models_do_not(
    two: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    app = client(open_models(["demo"], prompts="chexpert_ensemble"))
    described = app.get("/api/models").json()
    (model,) = described["models"]
    assert described["example"]
    assert (model["title"], model["calibrated"]) == ("demo", True)
    image = app.get("/api/example")
    assert image.headers["content-type"] == "image/png"
    assert image.content == draw_example(".png")[0]
    (scored,) = results(post(app, "scores", image.content))
    best = max(scored["result"], key=lambda each: each["probability"] or 0)
    assert best["text"] == "Pleural Effusion"
    assert not two.get("/api/models").json()["example"]
    assert two.get("/api/example").status_code == 404


def test_neighbors_are_the_nearest_images_of_the_gallery(tmp_path: Path) -> None:
    shards = make_shards(tmp_path) / "train"
    models = [served(MODEL), served(tiny_vqa(), "other")]
    gallery = Gallery.build(shards, models, limit=10)
    assert len(gallery) == 10
    source = ShardSource(shards)
    app = client(models, gallery)
    position = int(gallery.positions[3])
    first, other = results(post(app, "neighbors", source.image_bytes(position)))
    assert first["result"][0]["position"] == position
    assert first["result"][0]["cosine"] == pytest.approx(1, abs=1e-5)
    assert [card["cosine"] for card in first["result"]] == sorted(
        (card["cosine"] for card in first["result"]), reverse=True
    )
    assert first["result"][0]["image"].startswith("data:image/jpeg;base64,")
    assert other["error"]["code"] == "unsupported"
    with raises(ConfigError, "unsupported", "gallery"):
        Gallery.build(shards, [served(tiny_vqa())], limit=10)


def test_neighbors_need_a_gallery(one: TestClient) -> None:
    assert post(one, "neighbors", png()).status_code == 404


def test_checkpoints_are_opened_with_the_calibration_beside_them(tmp_path: Path) -> None:
    run = checkpoint_of(MODEL, tmp_path / "run")
    prompts = load_prompts("chexpert_pairs")
    assert (
        "no calibration was made" in ServedModel.open(run, prompts, "cpu").describe()["calibration"]
    )
    path = calibration_path(run / "best", prompts.name)
    write_calibration(CALIBRATION, path)
    assert "another checkpoint" in ServedModel.open(run, prompts, "cpu").describe()["calibration"]
    ours = {"checkpoint_sha256": checkpoint_sha256(run / "best"), "prompts_sha256": prompts.sha256}
    write_calibration(dataclasses.replace(CALIBRATION, **ours), path, replace=True)
    opened = ServedModel.open(run, prompts, "cpu")
    assert opened.calibration is not None
    assert opened.title == "run"
    path.write_text("{}")
    with raises(EvaluationError, "malformed"):
        ServedModel.open(run, prompts, "cpu")
    path.unlink()
    assert [
        model.title for model in open_models([run, run], prompts="chexpert_pairs", device="cpu")
    ] == [
        "run (1)",
        "run (2)",
    ]
    with raises(ConfigError, "out_of_range", "checkpoint"):
        open_models([run] * 3, prompts="chexpert_pairs")


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"token": "short"}, "token"),
        ({"port": 70000}, "port"),
        ({"waiting": 0}, "waiting"),
        ({"max_megabytes": 0}, "max_megabytes"),
    ],
)
def test_settings_are_checked(settings: dict, field: str) -> None:
    with raises(ConfigError, "out_of_range", field):
        ServeConfig(**settings)


def test_other_machines_need_a_token() -> None:
    assert ServeConfig().with_token().token is None
    assert ServeConfig(host="::1").with_token().token is None
    drawn = {ServeConfig(host="0.0.0.0").with_token().token for _ in range(2)}
    assert len(drawn) == 2
    assert min(len(token or "") for token in drawn) >= 32


ASSUMED = (
    "The header says MR, BRAIN; models for chest radiographs give meaningless results here. "
    "Assumed, because the "
    "checkpoint does not record its training images: tiny."
)


def test_images_that_are_no_chest_radiographs_have_a_warning(one: TestClient) -> None:
    for fields, expected in (
        (
            {"Modality": "MR", "BodyPartExamined": "BRAIN"},
            {"modality": "MR", "body_part": "BRAIN", "warning": ASSUMED},
        ),
        (
            {"Modality": "DX", "BodyPartExamined": "CHEST"},
            {"modality": "DX", "body_part": "CHEST", "warning": None},
        ),
    ):
        assert post(one, "scores", dicom(**fields), ["Edema"]).json()["image"] == expected
        assert post(one, "view", dicom(**fields)).json()["warning"] == expected["warning"]
    assert 'id="other"' in one.get("/").text
