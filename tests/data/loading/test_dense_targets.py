"""Targets made in the workers: image, masks, boxes and text are augmented together."""

from typing import Any, cast

import cv2
import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.eval_fakes import FakeSource

from medvl.data import (
    DenseTargets,
    EvalTransform,
    LViTAugmentation,
    WholeText,
    encode_runs,
    open_loader,
)
from medvl.data.loading.dense_targets import DenseBatch
from medvl.data.reports.cleaning import names_place, names_side
from medvl.errors import BudgetError, ConfigError
from medvl.schema import Sample

SIZE, HEIGHT, WIDTH = 32, 64, 96
TEXTS = ("upper left lung", "lower right lung", "one nucleus", "")


def source_of(**extra: Any) -> FakeSource:
    """Images that are white where their mask is, with a text each."""
    samples, pixels = [], []
    rng = np.random.default_rng(0)
    for number in range(16):
        mask_HW = np.zeros((HEIGHT, WIDTH), np.bool_)
        y, x = rng.integers(8, 30), rng.integers(8, 60)
        mask_HW[y : y + 20, x : x + 24] = True
        box = {"label": "A", "x": int(x), "y": int(y), "width": 24, "height": 20}
        fields = {"masks": [{"label": "A", "runs": encode_runs(mask_HW)}], "boxes": [box]} | extra
        samples.append(
            Sample(
                key=f"k{number}",
                corpus="c",
                split="train",
                patient=f"p{number}",
                study="s",
                sections={"findings": TEXTS[number % 4]},
                extra={**fields, "image_width": WIDTH, "image_height": HEIGHT},
            )
        )
        pixels.append((mask_HW * 255).astype(np.uint8))
    return FakeSource(samples, pixels, ())


def batch_of(kind: Any = "masks", source: FakeSource | None = None, **settings: Any) -> DenseBatch:
    image = LViTAugmentation(size=SIZE, **settings)
    targets = DenseTargets(kind, ("A",), image.base(), (SIZE, SIZE))
    empty = torch.zeros(16, 0, dtype=torch.int64)
    loader = open_loader(
        source or source_of(),
        batch=16,
        image=image,
        text=WholeText(),
        train=True,
        targets=targets,
        tokenizer=lambda texts: (empty, empty.bool()),
    )
    batch = next(iter(loader))
    assert isinstance(batch, DenseBatch)
    return batch


@pytest.mark.parametrize("flip", ["swap_text", "plain", "sideless", "off"])
def test_masks_are_turned_with_their_images(flip: Any) -> None:
    batch = batch_of(flip=flip)
    assert batch.masks_BLhw is not None
    assert batch.turn_B22 is not None
    difference = (batch.masks_BLhw.int() - batch.image_BCHW.int()).abs()
    assert difference.max() <= 2  # the image is interpolated like its mask
    assert (batch.masks_BLhw > 127).flatten(1).any(dim=1).all()
    identity = torch.eye(2).expand(16, 2, 2)
    torch.testing.assert_close(batch.turn_B22 @ batch.turn_B22.mT, identity)
    turned = (batch.turn_B22 != identity).any(dim=(1, 2))
    assert turned.any()
    assert not turned.all()


def test_boxes_are_turned_with_their_images() -> None:
    batch = batch_of("boxes", flip="plain", rotation=0)
    assert batch.boxes_BN5 is not None
    for image_HW, (left, top, right, bottom, label) in zip(
        batch.image_BCHW[:, 0], batch.boxes_BN5[:, 0], strict=True
    ):
        x, y, width, height = cv2.boundingRect((image_HW.numpy() > 127).astype(np.uint8))
        np.testing.assert_allclose(
            [left, top, right, bottom], [x, y, x + width, y + height], atol=1
        )
        assert label == 0
    rotated = batch_of("boxes", flip="off", turns=False)
    assert rotated.boxes_BN5 is not None
    for image_HW, box_5 in zip(rotated.image_BCHW[:, 0], rotated.boxes_BN5[:, 0], strict=True):
        x, y, width, height = cv2.boundingRect((image_HW.numpy() > 127).astype(np.uint8))
        assert (box_5[:2] <= torch.tensor([x, y]) + 1).all()
        assert (box_5[2:4] >= torch.tensor([x + width, y + height]) - 1).all()


def test_texts_agree_with_turned_images() -> None:
    mirror, upright = torch.tensor([[-1.0, 0], [0, 1]]), torch.eye(2)

    def kinds(**settings: Any) -> list[tuple[str, str, str]]:
        """Return (text of the sample, text of the batch, kind of turn) of each row."""
        batch = batch_of(rotation=0, **settings)
        assert batch.turn_B22 is not None
        names = []
        for key, text, turn_22 in zip(batch.keys, batch.texts, batch.turn_B22, strict=True):
            kind = (
                "mirrored"
                if torch.equal(turn_22, mirror)
                else "none"
                if torch.equal(turn_22, upright)
                else "turned"
            )
            names.append((TEXTS[int(key[1:]) % 4], text, kind))
        return names

    swapped = {"upper left lung": "upper right lung", "lower right lung": "lower left lung"}
    rows = kinds(flip="swap_text")
    assert all(
        text == (swapped.get(own, own) if kind == "mirrored" else own) for own, text, kind in rows
    )
    assert all(kind != "turned" for own, _, kind in rows if own in swapped)
    assert {kind for own, _, kind in rows if own in swapped} == {"mirrored", "none"}
    assert any(kind == "turned" for own, _, kind in rows if own not in swapped)
    rows = kinds(flip="sideless")
    assert all(text == own for own, text, _ in rows)
    assert {kind for own, _, kind in rows if own in swapped} == {"none"}
    assert any(kind != "none" for own, _, kind in rows if own not in swapped)
    rows = kinds(flip="plain")
    assert all(text == own for own, text, _ in rows)
    assert any(kind == "turned" for own, _, kind in rows if own in swapped)


def test_sides_and_places_of_texts() -> None:
    assert [
        names_side(text) for text in ("left lung", "R > L", "upper lobe", "left ventricle")
    ] == [
        True,
        True,
        False,
        False,
    ]
    assert [names_place(text) for text in ("right lung", "upper lobe", "nuclei", "basal")] == [
        True,
        True,
        False,
        True,
    ]


def test_malformed_masks_count_as_unreadable() -> None:
    with raises(BudgetError, "budget", "max_skipped"):
        batch_of(source=source_of(masks=[{"label": "A", "runs": "1 2 3"}]))


def test_unlabelled_images_have_no_mask_and_a_number() -> None:
    targets = DenseTargets(
        "masks", ("A",), EvalTransform(size=SIZE, fit="squash"), (8, 8), {"k1": 0, "k3": 1}
    )
    source = source_of()
    views = LViTAugmentation(size=SIZE).build()(source.pixels(1), np.random.default_rng(0))
    made = [targets(source.sample(number), views) for number in range(3)]
    assert [target.unlabelled for target in made] == [-1, 0, -1]
    assert [bool(target.values.any()) for target in made] == [True, False, True]


def test_errors_of_the_augmentation() -> None:
    with raises(ConfigError, "unknown_name", "flip"):
        LViTAugmentation(flip=cast(Any, "some"))
    with raises(ConfigError, "out_of_range", "rotation"):
        LViTAugmentation(rotation=200)
    with raises(ConfigError, "out_of_range", "size"):
        LViTAugmentation(size=2)
