"""Studies as rows of a batch: their first image, and another one beside it."""

import dataclasses
import functools
import hashlib
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from helpers.errors import raises

from medvl.data.loading.loader import open_loader
from medvl.data.loading.readers import read_pixels
from medvl.data.loading.sources import ConcatSource, no_text
from medvl.data.loading.studies import StudySource
from medvl.data.transforms.image import ConVIRTAugmentation, EvalTransform
from medvl.data.transforms.text import WholeText
from medvl.errors import ConfigError, ImageError
from medvl.schema import Inputs, Sample

IMAGES = [  # study, view, number, grey value
    ("a", "LATERAL", None, 10),
    ("b", "PA", None, 20),
    ("a", "PA", None, 30),
    ("c", None, 1, 40),
    ("c", None, 0, 50),
    ("d", "PA", None, 60),
    ("d", "AP", None, 70),
    ("d", "LATERAL", None, 80),
    ("e", "PA", None, 90),
    ("e", "AP", None, 100),
    ("f", "PA", None, 110),
    ("f", "LATERAL", None, 0),  # a sample without an image
]
PAIRS = [(30, 10), (20, None), (50, 40), (60, 80), (90, 100), (110, None)]


class Images:
    """Images of one grey value each."""

    label_names: tuple[str, ...] = ()
    fingerprint = hashlib.sha256(b"images").hexdigest()

    def __len__(self) -> int:
        return len(IMAGES)

    def sample(self, position: int) -> Sample:
        study, view, number, _ = IMAGES[position]
        extra = {} if number is None else {"image_number": number}
        return Sample(
            key=f"k{position}", corpus="c", split="train", patient=study, study=study, view=view,
            extra=extra, sections={"findings": f"left {study}"},
        )  # fmt: skip

    def pixels(self, position: int, color: bool = False) -> np.ndarray:
        if not IMAGES[position][3]:
            raise ImageError("none", "no_image")
        return np.full((40, 40), IMAGES[position][3], np.uint8)


def pairs(source: StudySource) -> set[tuple[int, int | None]]:
    values = []
    read = functools.partial(read_pixels, source.source, color=False)
    for position in range(len(source)):
        first, other = source.two_images(position, read)
        assert np.array_equal(first, source.pixels(position))
        values.append((int(first[0, 0]), None if other is None else int(other[0, 0])))
    assert len(set(values)) == len(values)
    return set(values)


def test_each_study_is_one_sample_with_its_other_projection() -> None:
    source = StudySource(Images())
    assert pairs(source) == set(PAIRS)
    assert len(source) == 6
    assert source.fingerprint != Images.fingerprint


def open_it(**changes: Any) -> Any:
    settings: dict[str, Any] = {
        "batch": 6, "image": EvalTransform(size=16), "text": WholeText(), "tokenizer": no_text,
        "train": False, "inputs": Inputs(other_view=True),
    }  # fmt: skip
    settings |= changes
    return open_loader(settings.pop("source", Images()), **settings)


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_hold_studies_and_their_other_views(workers: int) -> None:
    loader = open_it(workers=workers)
    (batch,) = list(loader)
    others = torch.where(
        batch.has_other_view_B, batch.other_view_BCHW[:, 0, 0, 0].long(), -1
    ).tolist()
    found = {(first, None if other < 0 else other) for first, other in
             zip(batch.image_BCHW[:, 0, 0, 0].tolist(), others, strict=True)}  # fmt: skip
    assert found == set(PAIRS)
    assert batch.keys == [loader.source.sample(position).key for position in range(6)]
    assert not batch.other_view_BCHW[~batch.has_other_view_B].any()
    assert batch.rows([1]).has_other_view_B.tolist() == batch.has_other_view_B[1:2].tolist()
    (plain,) = list(open_it(inputs=None, batch=12))
    assert plain.other_view_BCHW is None
    assert len(plain) == 11


def test_drawn_views_are_all_images_of_a_study_in_training_alone() -> None:
    """Two different ones in each epoch, the same on every start; a study with one image has no
    other.
    """
    loader = open_it(train=True, inputs=Inputs(drawn_view=True), seed=1)
    epochs = [batch for _ in range(40) for batch in loader]
    found = {study: set() for study in "abcdef"}
    for batch in epochs:
        first_B, other_B = batch.image_BCHW[:, 0, 0, 0], batch.other_view_BCHW[:, 0, 0, 0]
        for row, study in enumerate(batch.studies):
            found[study].add(
                (int(first_B[row]), int(other_B[row]) if batch.has_other_view_B[row] else None)
            )
    assert found["b"] == {(20, None)}
    assert found["a"] == {(10, 30), (30, 10)}
    assert found["d"] == set(itertools.permutations((60, 70, 80), 2))
    assert found["f"] == {(110, None)}  # its other sample has no image
    again = next(iter(open_it(train=True, inputs=Inputs(drawn_view=True), seed=1)))
    assert torch.equal(again.other_view_BCHW, epochs[0].other_view_BCHW)
    (fixed,) = list(open_it(inputs=Inputs(drawn_view=True)))
    (both,) = list(open_it())
    assert torch.equal(fixed.other_view_BCHW, both.other_view_BCHW)


def test_other_views_are_flipped_with_their_text() -> None:
    loader = open_it(image=ConVIRTAugmentation(size=32, flip="swap_text"), train=True, seed=3)
    pixels = np.zeros((40, 40), np.uint8)
    for key in map(str, range(20)):
        views = loader.samples.maker.views(key, pixels, 0, other=pixels)
        assert views.image.flipped == views.other.flipped
    first, again = (next(iter(open_it(train=True, seed=3))) for _ in range(2))
    assert torch.equal(first.other_view_BCHW, again.other_view_BCHW)


def test_sources_that_cannot_be_read_by_study_are_refused() -> None:
    shared = Images()
    shared.image_keys = ["a"] * len(IMAGES)
    with raises(ConfigError, "conflict", "other_view"):
        open_it(source=shared)
    weighted = ConcatSource.__new__(ConcatSource)
    weighted.weights = (1.0, 2.0)
    with raises(ConfigError, "conflict", "other_view"):
        open_it(source=weighted)
    assert {field.name for field in dataclasses.fields(Inputs)} >= {"other_view"}
