"""Names of labels, boxes and masks that have a side, in mirrored images."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers.eval_fakes import FakeSource

from medvl.data import (
    ConVIRTAugmentation,
    DenseTargets,
    LViTAugmentation,
    WholeText,
    encode_runs,
    open_loader,
)
from medvl.data.loading.dense_targets import DenseBatch
from medvl.data.loading.sources import no_text
from medvl.data.transforms.turning import mirror_labels, texts_and_names
from medvl.schema import Batch, Sample

LABELS = ("left_effusion", "right_effusion", "Cardiomegaly", "side=left")
SIZE = 32


def make_sample(number: int = 0, **fields: Any) -> Sample:
    return Sample(
        key=f"k{number}", corpus="c", split="train", patient=f"p{number}", study="s", **fields
    )


def half_mask(side: str) -> np.ndarray:
    mask_HW = np.zeros((SIZE, SIZE), np.bool_)
    mask_HW[:, SIZE // 2 :] = True
    return mask_HW if side == "left" else ~mask_HW  # the left lung is on the right of the image


def source_of() -> FakeSource:
    """Images that are bright on the patient's left, which labels, boxes and masks name."""
    masks = [
        {"label": f"{side} lung", "runs": encode_runs(half_mask(side))}
        for side in ("left", "right")
    ]
    boxes = [{"label": "left lung", "x": SIZE // 2, "y": 0, "width": SIZE // 2, "height": SIZE}]
    extra = {"masks": masks, "boxes": boxes, "image_width": SIZE, "image_height": SIZE}
    labels = {"left_effusion": 1, "right_effusion": 0, "Cardiomegaly": 1, "side=left": 1}
    samples = [
        Sample(
            key=f"k{number}",
            corpus="c",
            split="train",
            patient=f"p{number}",
            study="s",
            labels=labels,
            extra=extra,
        )
        for number in range(16)
    ]
    return FakeSource(samples, [half_mask("left").astype(np.uint8) * 255] * 16, LABELS)


def batch_of(image: Any, targets: Any = None) -> Batch:
    options: dict[str, Any] = {"text": WholeText(), "tokenizer": no_text, "targets": targets}
    return next(iter(open_loader(source_of(), batch=16, image=image, train=True, **options)))


def is_mirrored(batch: Batch) -> torch.Tensor:
    image_BHW = batch.image_BCHW[:, 0].float()
    return image_BHW[:, :, : SIZE // 4].mean(dim=(1, 2)) > image_BHW[:, :, -SIZE // 4 :].mean(
        dim=(1, 2)
    )


@pytest.mark.parametrize("flip", ["swap_text", "plain", "sideless", "off"])
def test_labels_agree_with_mirrored_images(flip: Any) -> None:
    image = ConVIRTAugmentation(size=SIZE, flip=flip, area=(0.9, 1.0), rotation=0, translation=0)
    batch = batch_of(image)
    mirrored_B = is_mirrored(batch)
    assert bool(mirrored_B.any()) == (flip in ("swap_text", "plain"))
    assert not mirrored_B.all()
    own, other = torch.tensor([1.0, 0, 1, 1]), torch.tensor([0.0, 1, 1, torch.nan])
    for row, mirrored in zip(batch.labels_BL, mirrored_B, strict=True):
        expected = other if mirrored and flip == "swap_text" else own
        torch.testing.assert_close(row, expected, equal_nan=True)


@pytest.mark.parametrize("kind", ["masks", "boxes"])
def test_masks_and_boxes_keep_the_name_of_their_side(kind: Any) -> None:
    image = LViTAugmentation(size=SIZE, rotation=0)
    batch = batch_of(
        image, DenseTargets(kind, ("left lung", "right lung"), image.base(), (SIZE, SIZE))
    )
    assert isinstance(batch, DenseBatch)
    mirrored_B = is_mirrored(batch)
    assert mirrored_B.any()
    assert not mirrored_B.all()
    for row, mirrored in enumerate(mirrored_B.tolist()):
        if (
            batch.masks_BLhw is not None
        ):  # in the image, the brighter lung is the left one, and the right one if mirrored
            bright_hw = batch.masks_BLhw[row, int(mirrored)]
            assert torch.equal(bright_hw > 127, batch.image_BCHW[row, 0] > 127)
        if batch.boxes_BN5 is not None:
            assert batch.boxes_BN5[row, 0, 4] == int(mirrored)


def test_names_are_exchanged_as_texts_are() -> None:
    names = (
        "left_lung",
        "Right Upper Lobe",
        "RLL",
        "left ventricle",
        "lung opacity_x",
        "L_effusion",
    )
    sample = make_sample(
        labels=dict.fromkeys(names, 1),
        extra={"boxes": [{"label": "left hilum", "x": 1}, "damaged"]},
    )
    mirrored = mirror_labels(sample)
    assert list(mirrored.labels) == [
        "right_lung", "Left Upper Lobe", "LLL", "left ventricle", "lung opacity_x", "R_effusion",
    ]  # fmt: skip
    assert mirrored.extra == {"boxes": [{"label": "right hilum", "x": 1}, "damaged"]}
    assert mirror_labels(mirrored) == sample
    sample = make_sample(sections={"findings": "a"}, labels={"left_lung": 0})
    assert list(texts_and_names(sample)) == ["a", "left lung"]
