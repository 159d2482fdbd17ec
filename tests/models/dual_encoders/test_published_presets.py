"""Presets `paper` of recipes: augmentation and optimiser of the released code, where it is
public.
"""

import dataclasses
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from medvl.data import ConVIRTAugmentation, RandomSentence, SwappedSentences, WholeText
from medvl.models import KADConfig

RECIPES = Path(__file__).parents[3] / "recipes"


def preset(name: str, kind: str = "paper") -> Any:
    return runpy.run_path(str(RECIPES / f"{name}_mimic.py"))["PRESETS"][kind]


@pytest.mark.parametrize(
    ("name", "lr", "weight_decay", "batch", "epochs", "patience"),
    [
        ("medclip", 2e-5, 1e-4, 100, 10, None),
        ("mgca", 2e-5, 0.05, 144, 50, 5),
        ("lovt", 1e-4, 1e-6, 32, 100, 10),
        ("mutual_info", 5e-4, 0.1, 8, 100, None),
    ],
)
def test_optimiser_batch_and_length_are_the_published_ones(
    name: str, lr: float, weight_decay: float, batch: int, epochs: int, patience: int | None
) -> None:
    """LoVT's 16 micro-batches of 32 pairs are compared apart."""
    paper = preset(name)
    assert (paper.optim.lr, paper.optim.weight_decay) == (lr, weight_decay)
    assert (paper.train.global_batch / paper.train.accumulate, paper.train.epochs) == (
        batch,
        epochs,
    )
    assert paper.train.early_stop_patience == patience


@pytest.mark.parametrize(
    ("name", "pairs", "share"),
    [("medclip", 370_000, 0.1), ("mgca", 187_147, 0.4), ("mutual_info", 240_000, 0.1)],
)
def test_warm_ups_have_the_published_share_of_the_steps(
    name: str, pairs: int, share: float
) -> None:
    paper = preset(name)
    steps = paper.train.epochs * pairs / paper.train.global_batch
    assert paper.optim.schedule.warmup_steps == pytest.approx(share * steps, rel=0.001)


def test_texts_of_mgca_medclip_and_lovt_are_the_published_ones() -> None:
    assert preset("mgca").data.text == WholeText(sections=("impression", "findings"), min_tokens=3)
    assert preset("medclip").data.text == RandomSentence(min_tokens=5)
    assert preset("lovt").data.text == SwappedSentences(min_tokens=2, swap_probability=0.6)


def test_carzero_has_the_optimiser_and_flips_of_its_configuration() -> None:
    paper = preset("carzero")
    assert paper.optim.betas == (0.5, 0.999)
    assert paper.data.image.flip_rate == 0.3


@pytest.mark.parametrize("name", ["medclip", "carzero"])
def test_crops_are_squares_of_the_padded_image_as_in_evaluation(name: str) -> None:
    """Of an image of 700 x 1000 pixels, crops of any aspect were stretched by up to a third, and
    never had borders.
    """
    paper = preset(name)
    image = paper.data.image
    assert (image.pad, image.aspect, image.area) == (True, (1, 1), (0.7656, 0.7656))
    assert paper.model.fit == "pad"


@pytest.mark.parametrize("name", ["cxrclip", "kad", "medklip", "mavl", "mrm", "medclip", "carzero"])
def test_images_are_not_blurred(name: str) -> None:
    """ConVIRT blurs with a deviation of up to three pixels; none of these does."""
    assert preset(name).data.image.blur_sigma == (0.1, 0.1)
    assert ConVIRTAugmentation().blur_sigma == (0.1, 3.0)


@pytest.mark.parametrize(
    ("name", "flip"),
    [
        ("cxrclip", "off"),
        *((name, "swap_text") for name in ("kad", "medklip", "mavl", "mrm", "carzero")),
    ],
)
def test_images_are_mirrored_where_they_are_published_to_be(name: str, flip: str) -> None:
    assert preset(name).data.image.flip == flip


def test_cxrclip_has_the_published_jitter() -> None:
    image = preset("cxrclip").data.image
    assert (image.brightness, image.contrast, image.rotation, image.translation) == (0.1, 0.2, 0, 0)


def test_reports_of_kad_have_256_tokens() -> None:
    assert KADConfig().max_tokens == 256


def test_siglip_continued_warms_up_and_validates_within_its_run() -> None:
    """On MIMIC-CXR alone; its warm-up of 500 steps was half of the run, which ended before the
    first validation.
    """
    continued = preset("siglip", "continued")
    steps = continued.train.epochs * 368_960 // continued.train.global_batch
    assert continued.optim.schedule.warmup_steps == round(0.03 * steps)
    assert continued.train.validate_every < steps / 5
    assert continued.train.checkpoint_every == continued.train.validate_every
    assert continued.optim.lr * continued.model.scalar_lr_mult == pytest.approx(1e-4)
    assert (continued.model.positives, continued.optim.weight_decay) == ("either", 1e-4)


def test_clip_is_continued_as_siglip_is() -> None:
    sigmoid, softmax = preset("siglip", "continued"), preset("siglip", "continued-clip")
    assert (softmax.model.system, softmax.model.positives) == ("clip", "either")
    assert softmax.data.image == dataclasses.replace(
        sigmoid.data.image, size=softmax.model.image_size
    )
    assert (softmax.data.text, softmax.optim, softmax.prompts) == (
        sigmoid.data.text,
        sigmoid.optim,
        sigmoid.prompts,
    )
    assert softmax.train == dataclasses.replace(sigmoid.train, run_dir=softmax.train.run_dir)


def test_mutual_info_takes_the_central_square() -> None:
    """The whole image was squeezed into a square, of other proportions than the central square
    of evaluation.
    """
    paper = preset("mutual_info")
    upright_HW = np.repeat(np.linspace(0, 255, 1000).astype(np.uint8)[:, None], 700, axis=1)
    still = dataclasses.replace(
        paper.data.image, rotation=0, translation=0, brightness=0, contrast=0
    )
    crop_HW = still.build()(upright_HW, np.random.default_rng(0)).image_HWC.squeeze()
    assert paper.model.fit == "crop"
    assert abs(int(crop_HW.min()) - 0.15 * 255) < 2
    assert abs(int(crop_HW.max()) - 0.85 * 255) < 2


def test_lovt_pads_in_evaluation() -> None:
    assert preset("lovt").model.fit == "pad"
