"""Phrase grounding: metrics of a map, rules for unseen pixels, heatmaps of dual-encoders, the
page.
"""

import base64
import dataclasses
import io
import json
import math
import re
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.errors import raises
from helpers.eval_fakes import FakeLoader, FakeSource
from helpers.gloria_ranks import tiny_model, tiny_tokenizer
from helpers.grounding_fakes import OracleModel, TransformingLoader
from PIL import Image
from torch import Tensor, nn

from medvl.data.transforms.image import Box
from medvl.errors import EvaluationError, SplitError
from medvl.eval.core.metric_rows import measure
from medvl.eval.core.results import PageHeader, read_results, write_results
from medvl.eval.grounding.evaluation import draw_grounding, write_grounding_page
from medvl.eval.grounding.heatmaps import (
    MapRules,
    best_cosine,
    choose_maps,
    embed_patches,
    map_metrics,
    phrase_maps,
    region_mask,
    smooth,
    stored_boxes,
)
from medvl.eval.grounding.protocol import (
    GroundingResult,
    grounding_protocol,
    label_mean_metrics,
    phrase_grounding,
)
from medvl.models import ConVIRTConfig
from medvl.models.dual_encoders.convirt import ConVIRT
from medvl.models.heatmaps import on_image
from medvl.schema import Embeddings, ImageFeatures, Sample

RULES = MapRules()


# Metrics of one map


def corner(size: int = 8, side: int = 4) -> np.ndarray:
    inside_HW = np.zeros((size, size), bool)
    inside_HW[:side, :side] = True
    return inside_HW


@pytest.mark.parametrize("scale", ["unit", "signed"])
def test_map_metrics_match_their_formulas(scale: str) -> None:
    rng = np.random.default_rng(0)
    map_HW, inside_HW = rng.normal(size=(8, 8)), corner()
    rules = MapRules(scale=cast(Any, scale))
    values = map_metrics(map_HW, inside_HW, rules)
    within = [float(map_HW[i, j]) for i in range(8) for j in range(8) if inside_HW[i, j]]
    without = [float(map_HW[i, j]) for i in range(8) for j in range(8) if not inside_HW[i, j]]
    contrast = (np.mean(within) - np.mean(without)) / math.sqrt(np.var(within) + np.var(without))
    assert values["signed_cnr"] == pytest.approx(contrast)
    assert values["cnr"] == pytest.approx(abs(contrast))
    assert values["pointing_game"] == float(max(within) > max(without))
    scaled = (map_HW - map_HW.min()) / (map_HW.max() - map_HW.min())
    if scale == "signed":
        scaled = 2 * scaled - 1
    overlaps = []
    for threshold in rules.thresholds:
        both = sum(
            scaled[i, j] >= threshold and inside_HW[i, j] for i in range(8) for j in range(8)
        )
        either = sum(
            scaled[i, j] >= threshold or inside_HW[i, j] for i in range(8) for j in range(8)
        )
        overlaps.append(both / either)
        assert values[f"iou@{threshold:g}"] == pytest.approx(both / either)
    assert values["miou"] == pytest.approx(np.mean(overlaps))


def test_signed_cnr_is_negative_for_a_map_that_avoids_the_finding() -> None:
    rng = np.random.default_rng(1)
    dark = np.where(corner(), 0.0, 1.0) + 0.1 * rng.random((8, 8))
    values = map_metrics(dark, corner(), RULES)
    assert values["cnr"] > 5
    assert values["signed_cnr"] == -values["cnr"]
    assert values["pointing_game"] == 0


def test_constant_map_scores_like_a_random_guess() -> None:
    values = map_metrics(np.full((8, 8), 0.3, np.float32), corner(), RULES)
    assert values["pointing_game"] == corner().mean() == 0.25
    assert (values["cnr"], values["miou"]) == (0, 0)
    raw = map_metrics(
        np.full((8, 8), 0.3, np.float32), corner(), MapRules(scale="none", thresholds=(0.2, 0.4))
    )
    assert (raw["cnr"], raw["iou@0.2"], raw["iou@0.4"]) == (0, 0.25, 0)


@pytest.mark.parametrize("value", [0.1, 1 / 3, -0.77])
def test_interpolation_of_a_constant_grid_is_a_constant_map(value: float) -> None:
    box = Box(10, 0, 200, 224)
    map_HW = on_image(torch.full((1, 7, 7), value), box, 224, 224)[0].numpy()
    inside_HW = region_mask([Box(20, 30, 40, 60)], 224, 224)
    share = inside_HW[~np.isnan(map_HW)].mean()
    for scale in ("unit", "signed"):
        values = map_metrics(map_HW, inside_HW, MapRules(unseen="drop", scale=scale))
        assert (values["cnr"], values["miou"]) == (0, 0)
        assert values["pointing_game"] == pytest.approx(share)
    doubles = map_metrics(map_HW.astype(float) * 0 + value, inside_HW, MapRules(unseen="drop"))
    assert doubles["cnr"] == 0  # the means of equal numbers differ by rounding


def test_tied_maxima_count_by_their_share_despite_rounding() -> None:
    map_HW = np.zeros((8, 8))
    map_HW[3, 3], map_HW[3, 4], map_HW[7, 7], map_HW[0, 0] = 1, 1 - 1e-9, 1, 1
    assert map_metrics(map_HW, corner(), RULES)["pointing_game"] == 0.5
    map_HW[3, 3] = 1.1
    assert map_metrics(map_HW, corner(), RULES)["pointing_game"] == 1


def test_cnr_of_a_map_with_two_values_is_finite() -> None:
    values = map_metrics(corner().astype(float), corner(), RULES)
    assert 1e5 < values["signed_cnr"] < 1e7
    assert (values["pointing_game"], values["miou"]) == (1, 1)


def test_cnr_is_nan_if_the_boxes_cover_the_image() -> None:
    values = map_metrics(np.eye(8), np.ones((8, 8), bool), RULES)
    assert math.isnan(values["cnr"])
    assert values["pointing_game"] == 1


def test_pixels_outside_of_the_crop_are_background_or_dropped() -> None:
    """Two columns are outside of the crop, and half of the finding."""
    rng = np.random.default_rng(2)
    map_HW = rng.random((8, 8)) + 0.5
    map_HW[:, :2] = np.nan
    map_HW[1, 3] = 2
    filled, seen = np.nan_to_num(map_HW, nan=np.nanmin(map_HW)), slice(2, None)
    background, drop = (
        map_metrics(map_HW, corner(), MapRules(unseen=cast(Any, u))) for u in ("background", "drop")
    )
    assert background == map_metrics(filled, corner(), RULES)
    assert drop == map_metrics(map_HW[:, seen], corner()[:, seen], RULES)
    assert background["iou@0.1"] < drop["iou@0.1"]
    hidden = np.zeros((8, 8), bool)
    hidden[:, :2] = True
    missed, unknown = (
        map_metrics(map_HW, hidden, MapRules(unseen=cast(Any, u))) for u in ("background", "drop")
    )
    assert (missed["pointing_game"], missed["iou@0.1"]) == (0, 0)
    assert all(math.isnan(value) for value in unknown.values())


def test_thresholds_of_unscaled_maps_apply_to_cosines() -> None:
    map_HW = np.where(corner(), 0.45, 0.15)
    values = map_metrics(map_HW, corner(), MapRules(scale="none"))
    assert values["iou@0.1"] == 0.25
    assert values["iou@0.2"] == values["iou@0.4"] == 1
    assert values["iou@0.5"] == 0


@pytest.mark.parametrize(
    ("settings", "code", "field"),
    [
        ({"unseen": "zero"}, "unknown_name", "unseen"),
        ({"scale": "z"}, "unknown_name", "scale"),
        ({"thresholds": ()}, "out_of_range", "thresholds"),
        ({"thresholds": (0.1, 0.1)}, "out_of_range", "thresholds"),
    ],
)
def test_invalid_rules_are_refused(settings: dict, code: str, field: str) -> None:
    with raises(EvaluationError, code, field):
        MapRules(**settings)


def test_protocols_of_papers_have_their_settings_and_take_no_others() -> None:
    biovil, maco = grounding_protocol("biovil"), grounding_protocol("maco")
    assert (biovil.maps, biovil.smoothing, biovil.contrast) == ("similarity", 1.5, "cnr")
    assert (biovil.rules.scale, biovil.rules.unseen, biovil.rules.thresholds) == (
        "none",
        "drop",
        (0.1, 0.2, 0.3, 0.4, 0.5),
    )
    assert (maco.rules.scale, maco.rules.unseen, maco.contrast) == ("signed", "drop", "signed_cnr")
    assert grounding_protocol("medvl", smoothing=2.0).smoothing == 2
    with raises(EvaluationError, "conflict", "protocol"):
        grounding_protocol("biovil", rules=MapRules())
    with raises(EvaluationError, "unknown_name", "protocol"):
        grounding_protocol(cast(Any, "gloria"))


def test_region_mask_contains_pixel_centers_and_at_least_one_pixel() -> None:
    inside_HW = region_mask([Box(1.0, 2.0, 2.0, 3.0)], 6, 8)
    assert np.argwhere(inside_HW).tolist() == [[1, 2], [1, 3], [1, 4], [2, 2], [2, 3], [2, 4]]
    assert np.argwhere(region_mask([Box(1.6, 2.4, 1.0, 1.0)], 6, 8)).tolist() == [[2, 2]]
    assert np.argwhere(region_mask([Box(1.1, 2.6, 0.2, 0.2)], 6, 8)).tolist() == [[1, 2]]
    assert np.argwhere(region_mask([Box(5.9, 7.9, 0.3, 0.3)], 6, 8)).tolist() == [[5, 7]]
    both = region_mask([Box(0, 0, 2, 2), Box(4, 4, 2, 2)], 6, 8)
    assert both.sum() == 8
    assert region_mask([Box(-1, -1, 20, 20)], 6, 8).all()


# Rows


def test_macro_is_the_mean_over_the_same_findings_in_every_resample() -> None:
    values, labels = np.array([1.0, 0.0, 1.0, np.nan, 0.5]), ["b", "b", "b", "a", "a"]
    group = label_mean_metrics("x", values, labels)
    rows = {row.target: row for row in measure([group], 5, resamples=0)}
    assert list(rows) == ["overall", "macro", "a", "b"]
    assert rows["overall"].value == pytest.approx(2.5 / 4)
    assert rows["macro"].value == pytest.approx((0.5 + 2 / 3) / 2)
    assert [rows[name].n for name in rows] == [4, 4, 1, 3]
    counts = np.array([[1.0, 0, 0, 1, 0], [0, 2, 0, 0, 3]]).T
    without_a, both = group.statistic(counts)[:, 1].tolist()
    assert np.isnan(without_a)
    assert both == 0.25


# A model that knows the phrase of every gray value


PHRASES = {200: "large left effusion", 100: "the heart is enlarged"}


def make_loader(count: int = 6, *, wrong: bool = False, patients: int = 6) -> FakeLoader:
    """Images of 40 x 80 pixels, published at twice that size, with two regions and their boxes
    (swapped if `wrong`).
    """
    rng = np.random.default_rng(0)
    samples, pixels = [], []
    for number in range(count):
        image_HW = np.zeros((40, 80), np.uint8)
        cells = rng.choice(16, size=2, replace=False).tolist()
        phrases = []
        for (value, text), cell in zip(PHRASES.items(), cells, strict=True):
            row, column = divmod(cell, 4)
            image_HW[10 * row : 10 * row + 10, 20 * column : 20 * column + 20] = value
            label = "Pleural Effusion" if value == 200 else "Cardiomegaly"
            row, column = divmod(cells[int(cells[0] == cell)] if wrong else cell, 4)
            box = {"label": label, "x": 40 * column, "y": 20 * row, "width": 40, "height": 20}
            phrases.append({"label": label, "text": text, "boxes": [box]})
        extra = {"phrases": phrases, "image_height": 80, "image_width": 160}
        samples.append(
            Sample(
                key=f"k{number}",
                corpus="fake",
                split="test",
                patient=f"p{number % patients}",
                study="s",
                extra=extra,
            )
        )
        pixels.append(image_HW)
    return TransformingLoader(FakeSource(samples, pixels, ()), batch=4)


def evaluate(loader: FakeLoader, **settings: Any) -> GroundingResult:
    return phrase_grounding(
        cast(Any, OracleModel(PHRASES)), loader, **{"resamples": 50, **settings}
    )


@pytest.fixture(scope="module")
def result() -> GroundingResult:
    return evaluate(make_loader(), keep_maps=2)


def test_oracle_model_points_inside_all_boxes(result: GroundingResult) -> None:
    row = result.results.row
    assert row("pointing_game", "overall").value == 1
    assert row("pointing_game", "overall").n == 12
    assert row("pointing_game", "macro").low == 1
    assert row("cnr", "Cardiomegaly").value == row("signed_cnr", "Cardiomegaly").value > 2
    assert row("miou", "Pleural Effusion").n == 6
    assert row("iou@0.5", "overall").value > 0.6
    assert result.results.config["maps"] == "similarity"
    assert result.results.details["chance"]["overall"] == pytest.approx(1 / 16)
    assert result.results.details["unseen"] == 0


def test_a_protocol_is_recorded_with_its_settings_and_contrast(
    result: GroundingResult, tmp_path: Path
) -> None:
    maco = evaluate(make_loader(), protocol="maco")
    config = maco.results.config
    assert (config["protocol"], config["scale"], config["smoothing"]) == ("maco", "signed", 1.5)
    assert (config["contrast"], result.results.config["contrast"]) == ("signed_cnr", "cnr")
    page = write_grounding_page(
        maco, tmp_path / "page.html", PageHeader(model="oracle", data="fake")
    ).read_text()
    assert "maco; its figures are the Signed CNR" in page


def test_swapped_boxes_give_a_pointing_game_of_zero() -> None:
    swapped = evaluate(make_loader(wrong=True)).results
    assert swapped.row("pointing_game", "overall").value == 0
    assert swapped.row("signed_cnr", "overall").value < 0


def test_predictions_depend_only_on_their_own_image_and_are_json(
    result: GroundingResult, tmp_path: Path
) -> None:
    alone = evaluate(make_loader(count=1), resamples=0)
    lines = list(result.predictions())
    assert list(alone.predictions()) == lines[:2]
    assert (lines[1]["key"], lines[1]["phrase"], lines[1]["label"]) == ("k0", 1, "Cardiomegaly")
    assert "text" not in lines[1]
    write_results(result.results, tmp_path, lines)
    assert read_results(tmp_path).rows == result.results.rows
    assert json.loads((tmp_path / "predictions.jsonl").read_text().splitlines()[1]) == lines[1]


def test_intervals_resample_patients() -> None:
    one = evaluate(make_loader(patients=1)).results.row("cnr", "overall")
    many = evaluate(make_loader()).results.row("cnr", "overall")
    assert np.isfinite(one.value)
    assert np.isnan([one.low, one.high]).all()  # six images of one patient
    assert many.low < many.high


def test_images_without_phrases_and_unreadable_ones_are_counted() -> None:
    loader = make_loader()
    loader.source.samples[2] = dataclasses.replace(loader.source.samples[2], extra={})
    loader.source.damaged.add(3)
    details = evaluate(loader).results.details
    assert (details["images"], details["phrases"], details["images_without_phrase"]) == (4, 8, 1)
    assert details["unreadable"] == {"shard_damaged": 1}
    for number, sample in enumerate(loader.source.samples):
        loader.source.samples[number] = dataclasses.replace(sample, extra={})
    with raises(EvaluationError, "empty"):
        evaluate(loader)


def test_boxes_for_another_aspect_ratio_are_refused() -> None:
    loader = make_loader()
    turned = {**loader.source.samples[1].extra, "image_height": 160, "image_width": 80}
    loader.source.samples[1] = dataclasses.replace(loader.source.samples[1], extra=turned)
    with raises(EvaluationError, "mismatch", names="sample k1"):
        evaluate(loader)


def test_boxes_are_scaled_to_the_stored_image(result: GroundingResult) -> None:
    item = result.items[0]
    (box,) = stored_boxes(item.phrase, item.sample, (40, 80))
    assert (box.height, box.width) == (10, 20)
    assert region_mask([box], 40, 80).mean() == 1 / 16


def test_the_mean_place_of_other_patients_is_a_baseline(tmp_path: Path) -> None:
    """Three of four other patients have their box in one cell, and one finding has no box there."""
    others = make_loader(patients=99)
    boxes = [{"label": "Cardiomegaly", "x": x, "y": 20, "width": 40, "height": 20} for x in (0, 80)]
    for number, sample in enumerate(others.source.samples):
        phrase = {"label": "Cardiomegaly", "text": "", "boxes": [boxes[number == 0]]}
        extra = {**sample.extra, "phrases": [phrase]}
        others.source.samples[number] = dataclasses.replace(
            sample, patient=f"other {number}", extra=extra
        )
    tested = make_loader()
    shifted = [  # the cell of most boxes, half of it, and another cell
        {**boxes[0]}, {**boxes[0], "x": 20}, {**boxes[1]},
    ]  # fmt: skip
    for number, box in enumerate(shifted):
        phrases = [{"label": "Edema", "text": PHRASES[200], "boxes": [box]}]
        sample = tested.source.samples[number]
        tested.source.samples[number] = dataclasses.replace(
            sample, extra={**sample.extra, "phrases": phrases}
        )
    result = evaluate(tested, valid=others.source)
    edema = [item.metrics for item in result.items if item.phrase.label == "Edema"]
    assert [metrics["mean_place"] for metrics in edema] == [1, 0.5, 0]
    for metrics in edema:
        gain = metrics["pointing_game"] - metrics["mean_place"]
        assert metrics["gain_over_mean_place"] == gain
    assert result.results.row("mean_place", "Edema").value == 0.5
    assert "validation_manifest" in result.results.inputs
    header = PageHeader(model="oracle", data="fake")
    assert "Mean place" in write_grounding_page(result, tmp_path / "a.html", header).read_text()
    with raises(SplitError, "leak"):
        evaluate(tested, valid=tested.source)
    with raises(EvaluationError, "empty", "valid"):
        evaluate(tested, valid=FakeSource([], [], ()))


# Maps of real models


def test_similarity_map_is_the_cosine_with_each_projected_patch() -> None:
    tokenizer = tiny_tokenizer()
    config = ConVIRTConfig(
        image_encoder="resnet_tiny", text_encoder="tiny_bert", image_size=64, fit="crop",
        frozen_text_layers=0, projection_dim=8,
    )  # fmt: skip
    model = ConVIRT.build(config, pretrained=False, tokenizer=tokenizer).eval()
    image_BCHW = torch.randint(0, 256, (2, 1, 64, 64), dtype=torch.uint8)
    texts, sizes = ["left effusion", "edema"], [(90, 128), (64, 64)]
    assert choose_maps(model, None) == "similarity"
    maps = phrase_maps(model, image_BCHW, texts, sizes, maps="similarity")
    with torch.no_grad():
        features = model.image_encoder(image_BCHW)
        assert features.patches_BPD is not None
        patches_BPE, grid = embed_patches(model, image_BCHW)
        torch.testing.assert_close(patches_BPE[1, 3], model.image_head(features.patches_BPD[1, 3]))
        cosines = F.cosine_similarity(patches_BPE[1], model.encode_text(texts)[1:], dim=1)
    assert maps[0].shape == (90, 128)
    assert maps[0][:, :18].isnan().all()
    assert not maps[0][:, 20:100].isnan().any()
    side = 64 // grid[0]
    centers = (
        maps[1]
        .unfold(0, side, side)
        .unfold(1, side, side)[:, :, side // 2 - 1 : side // 2 + 1, side // 2]
    )
    torch.testing.assert_close(centers.mean(dim=2).flatten(), cosines, atol=0.15, rtol=0)
    with raises(EvaluationError, "unsupported", "maps", names="convirt"):
        choose_maps(model, "attention")


def test_gloria_uses_its_attention_maps_by_default() -> None:
    model = tiny_model(tiny_tokenizer()).eval()
    size = model.config.image_size
    image_BCHW = torch.randint(0, 256, (1, 1, size, size), dtype=torch.uint8)
    texts = ["small left pleural effusion"]
    assert choose_maps(model, None) == "attention"
    (attention,) = phrase_maps(model, image_BCHW, texts, [(50, 70)], maps="attention")
    torch.testing.assert_close(
        attention, model.attention_maps(image_BCHW, texts, [(50, 70)])[0], equal_nan=True
    )
    (similarity,) = phrase_maps(model, image_BCHW, texts, [(50, 70)], maps="similarity")
    assert similarity.shape == attention.shape
    assert torch.equal(similarity.isnan(), attention.isnan())
    with raises(EvaluationError, "unknown_name", "maps", names="gradients"):
        choose_maps(model, cast(Any, "gradients"))


def test_similarity_of_a_region_is_that_of_its_best_word() -> None:
    model = tiny_model(tiny_tokenizer()).eval()
    texts = model.embed_texts(["small left pleural effusion", "edema"])
    assert texts.local_NPE is not None
    assert texts.mask_NP is not None
    patches_BPE, _ = embed_patches(model, torch.randint(0, 256, (2, 1, 64, 64), dtype=torch.uint8))
    cosine_BP = best_cosine(patches_BPE, texts)
    for row in range(2):
        words_WE = texts.local_NPE[row][texts.mask_NP[row]]
        cosines_WP = F.cosine_similarity(words_WE[:, None], patches_BPE[row][None], dim=2)
        torch.testing.assert_close(cosine_BP[row], cosines_WP.amax(dim=0))
    whole_BP = F.cosine_similarity(patches_BPE, texts.global_NE[:, None], dim=2)
    wordless = dataclasses.replace(texts, mask_NP=torch.zeros_like(texts.mask_NP))
    torch.testing.assert_close(best_cosine(patches_BPE, wordless), whole_BP)
    torch.testing.assert_close(best_cosine(patches_BPE, Embeddings(texts.global_NE)), whole_BP)


class WidePatchEncoder(nn.Module):
    """An encoder whose patches are wider than its pooled vector, as open_clip's are before their
    projection.
    """

    name, patch_dim, feature_dim = "wide_patch", 6, 4

    def __init__(self, *, projects: bool) -> None:
        super().__init__()
        self.backbone = nn.Module()
        self.backbone.register_parameter(
            "proj", nn.Parameter(torch.randn(6, 4)) if projects else None
        )

    def forward(self, image_BCHW: Tensor) -> ImageFeatures:
        return ImageFeatures(
            torch.zeros(len(image_BCHW), 4), torch.ones(len(image_BCHW), 9, 6), (3, 3)
        )


class WidePatchModel(nn.Module):
    def __init__(self, *, projects: bool) -> None:
        super().__init__()
        self.image_encoder, self.image_head = WidePatchEncoder(projects=projects), nn.Linear(4, 4)

    def embed_images(self, image_BCHW: Tensor) -> Embeddings:
        return Embeddings(torch.zeros(len(image_BCHW), 4))


def test_patches_and_texts_of_different_spaces_are_refused() -> None:
    with raises(EvaluationError, "unsupported", "maps"):
        best_cosine(torch.ones(1, 4, 3), Embeddings(torch.ones(1, 5)))


def test_patches_use_the_projection_of_the_encoder() -> None:
    model, image_BCHW = WidePatchModel(projects=True), torch.zeros(2, 1, 6, 6)
    patches_BPE, grid = embed_patches(cast(Any, model), image_BCHW)
    expected = model.image_head(
        torch.ones(2, 9, 6) @ cast(Tensor, model.image_encoder.backbone.proj)
    )
    torch.testing.assert_close(patches_BPE, expected)
    assert grid == (3, 3)
    with raises(EvaluationError, "unsupported", names="wide_patch"):
        embed_patches(cast(Any, WidePatchModel(projects=False)), image_BCHW)


def test_smoothing_equals_scipy() -> None:
    ndimage = pytest.importorskip("scipy.ndimage")
    map_Bhw = torch.rand(2, 9, 7, generator=torch.Generator().manual_seed(0))
    for sigma in (0.6, 1.5, 3.1):  # the last reaches over the whole map more than once
        expected = np.stack([ndimage.gaussian_filter(each, sigma) for each in map_Bhw.numpy()])
        np.testing.assert_allclose(smooth(map_Bhw, sigma).numpy(), expected, atol=1e-5)
    assert smooth(map_Bhw, 0) is map_Bhw
    torch.testing.assert_close(smooth(torch.full((1, 3, 3), 0.7), 2.0), torch.full((1, 3, 3), 0.7))
    with raises(EvaluationError, "out_of_range", "smoothing"):
        smooth(map_Bhw, -1)


# The page


def test_picture_has_heat_boxes_and_a_darkened_border() -> None:
    map_HW = np.zeros((20, 40), np.float32)
    map_HW[5:10, 25:30] = 1
    map_HW[:, :10] = np.nan
    drawn = draw_grounding(
        np.full((20, 40), 100, np.uint8), map_HW, [Box(4, 24, 8, 8)], side=80
    ).astype(int)
    assert drawn.shape == (40, 80, 3)
    assert drawn[18, 58, 0] > drawn[18, 58, 2] + 60  # heat
    assert (drawn[11, 51 - 4 : 51 + 5] > 200).all(axis=1).any()  # the ring around the peak
    assert (drawn[20, 5] < 50).all()  # outside of the crop
    assert (drawn[8:10, 48:64] == (34, 211, 238)).all(axis=2).any()  # the upper edge of the box
    assert (drawn[30, 30] == 100).all()


def test_page_shows_every_finding_and_the_kept_maps(
    result: GroundingResult, tmp_path: Path
) -> None:
    source = make_loader().source
    path = write_grounding_page(
        result,
        tmp_path / "p" / "index.html",
        PageHeader(model="oracle", data="fake <b>", date="2026-01-01"),
        pixels=source.pixels,
    )
    html = path.read_text(encoding="utf-8")
    assert len(result.maps) == 4
    pictures = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', html)
    assert len(pictures) == 4
    assert max(Image.open(io.BytesIO(base64.b64decode(pictures[0]))).size) == 384
    for word in (
        "fake &lt;b&gt;",
        "Pleural Effusion",
        "large left effusion",
        "Mean IoU",
        "Signed CNR",
        "2026-01-01",
    ):
        assert word in html
    assert "<script" not in html
    assert (
        "<img"
        not in write_grounding_page(
            result, tmp_path / "q.html", PageHeader(model="m", data="d")
        ).read_text()
    )
