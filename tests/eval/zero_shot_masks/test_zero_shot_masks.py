"""Masks from the maps of a dual-encoder, and the AUROC of their pixels."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.contrastive_systems import convirt
from helpers.errors import raises
from helpers.eval_fakes import FakeSource
from helpers.gloria_ranks import tiny_tokenizer
from sklearn.metrics import roc_auc_score

from medvl.data import EvalTransform, WholeText
from medvl.data.loading.loader import Loader, open_loader
from medvl.data.transforms.image import Box
from medvl.errors import EvaluationError, SplitError
from medvl.eval import evaluate_zero_shot_masks
from medvl.eval.dense.metrics import pixel_auroc
from medvl.eval.zero_shot_masks import MaskLabels, PhraseSegmenter
from medvl.models.heatmaps import on_image
from medvl.schema import Sample

SIDE = 32


def loader(model: Any, patients: range) -> Loader:
    """Images with a bright square at one of four places, which is the boxed effusion; every
    fourth has none.
    """
    samples, images = [], []
    for number in patients:
        pixels = np.random.default_rng(number).integers(0, 40, (SIDE, SIDE)).astype(np.uint8)
        boxes = []
        if number % 4:
            top, left = (16 * (number % 2), 16 * (number // 2 % 2))
            pixels[top : top + 16, left : left + 16] = 250
            boxes = [{"label": "Pleural Effusion", "x": left, "y": top, "width": 16, "height": 16}]
        extra = {"boxes": boxes, "image_height": SIDE, "image_width": SIDE}
        samples.append(
            Sample(
                key=f"k{number}",
                corpus="c",
                split="test",
                patient=f"p{number}",
                study="s",
                extra=extra,
            )
        )
        images.append(pixels)
    source = FakeSource(samples, images, ())
    options = {
        "image": EvalTransform(size=SIDE),
        "text": WholeText(),
        "tokenizer": model.tokenizer,
        "train": False,
    }
    return open_loader(source, batch=4, **options)


@pytest.mark.parametrize("constant", [False, True])
def test_pixel_auroc_is_that_of_scikit_learn(constant: bool) -> None:
    rng = np.random.default_rng(0)
    truth_HW = rng.random((40, 30)) < 0.2
    map_HW = (
        np.full((40, 30), 0.3) if constant else np.round(rng.random((40, 30)) + 0.5 * truth_HW, 3)
    )
    assert pixel_auroc(map_HW, truth_HW) == pytest.approx(
        roc_auc_score(truth_HW.ravel(), map_HW.ravel()), abs=1e-9
    )
    map_HW[:, :3] = np.nan
    filled = np.nan_to_num(map_HW, nan=-1.0)
    assert pixel_auroc(map_HW, truth_HW) == pytest.approx(
        roc_auc_score(truth_HW.ravel(), filled.ravel()), abs=1e-9
    )
    assert math.isnan(pixel_auroc(map_HW, np.zeros_like(truth_HW)))


def test_pixel_auroc_tells_small_probabilities_apart() -> None:
    rng = np.random.default_rng(0)
    truth_HW = np.zeros((96, 96), np.bool_)
    truth_HW[20:40, 20:40] = True
    logits_HW = rng.normal(-9, 1.5, truth_HW.shape) + 3 * truth_HW
    logits_HW[80:84, 80:84] = 4  # sure of a few pixels outside, so that all others are near 0
    map_HW = (1 / (1 + np.exp(-logits_HW))).astype(np.float32)
    assert pixel_auroc(map_HW, truth_HW) == pytest.approx(
        roc_auc_score(truth_HW.ravel(), map_HW.ravel()), abs=1e-9
    )


class BrightModel(torch.nn.Module):
    """A dual-encoder whose map of any phrase is the image."""

    name = "bright"
    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer, self.phrases = tiny_tokenizer(), set[str]()

    def attention_maps(
        self, image_BCHW: torch.Tensor, texts: Any, original_sizes: Any = None
    ) -> list[torch.Tensor]:
        self.phrases |= set(texts)
        return list(image_BCHW[:, 0].float())


def test_thresholds_come_from_other_patients() -> None:
    model = BrightModel()
    test, valid = loader(model, range(8)), loader(model, range(8, 16))
    result = evaluate_zero_shot_masks(
        model, test, valid_loader=valid, empty="skip_empty", resamples=20
    )
    assert model.phrases == {"There is pleural effusion."}
    rows = {row.metric: row.value for row in result.results.rows}
    assert rows["pixel_auroc"] == pytest.approx(1)
    assert rows["dice"] == pytest.approx(1)
    assert result.results.protocol == "zero_shot_masks"
    assert result.results.config["threshold_source"] == "chosen on validation images"
    with raises(SplitError, "leak"):
        evaluate_zero_shot_masks(model, test, valid_loader=loader(model, range(4, 12)))
    with raises(EvaluationError, "unknown_name", "labels"):
        evaluate_zero_shot_masks(model, test, labels=["Edema"])
    with raises(EvaluationError, "unknown_name", "scale"):
        evaluate_zero_shot_masks(model, test, scale="both")


def test_maps_of_a_dual_encoder_are_scaled_within_their_image() -> None:
    model = convirt(tokenizer=tiny_tokenizer(), vocab_size=None).eval()
    batch = next(iter(loader(model, range(4))))
    made = {
        "model": model,
        "config": MaskLabels(labels=("A", "B")),
        "phrases": ("effusion", "edema"),
    }
    sizes = [(SIDE, SIDE)] * 3 + [(40, 60)]
    maps = PhraseSegmenter(**made, kind="similarity").maps(batch, sizes)
    assert [tuple(map_LHW.shape) for map_LHW in maps] == [(2, *size) for size in sizes]
    for map_LHW in maps:
        seen = map_LHW[0][~map_LHW[0].isnan()]
        assert seen.min() == 0 or seen.max() == seen.min()
        assert seen.max() <= 1
    assert maps[3].isnan().any()
    assert (
        PhraseSegmenter(**made, kind="similarity", scale="none").maps(batch, sizes)[0].abs().max()
        <= 1
    )


def test_a_constant_map_has_an_empty_mask() -> None:
    class Constant(BrightModel):
        def attention_maps(
            self, image_BCHW: Any, texts: Any, original_sizes: Any = None
        ) -> list[torch.Tensor]:
            return [
                on_image(torch.full((1, 7, 7), 0.1), Box(0, 0, *size), *size)[0]
                for size in original_sizes
            ]

    model = Constant()
    result = evaluate_zero_shot_masks(model, loader(model, range(8)), resamples=0)
    rows = {row.metric: row.value for row in result.results.rows}
    assert (rows["dice_masked"], rows["left_empty"], rows["pixel_auroc"]) == (0, 1, 0.5)
