"""Studies as rows of a batch: their first image, and the other ones beside it."""

import dataclasses
import functools
import hashlib
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from helpers.errors import raises

from medvl.data.loading.collate import Collate
from medvl.data.loading.items import ItemMaker
from medvl.data.loading.loader import open_loader
from medvl.data.loading.readers import RegionReader, fetch_image
from medvl.data.loading.sources import ConcatSource, no_text
from medvl.data.loading.studies import StudySource
from medvl.data.shards.regions import Regions
from medvl.data.transforms.image import ConVIRTAugmentation, EvalTransform
from medvl.data.transforms.operations import augment_batch
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
STUDIES = {(30, 10), (20,), (50, 40), (60, 80, 70), (90, 100), (110,)}


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


def at_most(limit: int) -> set[tuple[int, ...]]:
    return {images[:limit] for images in STUDIES}


def grey_values(batch: Any) -> set[tuple[int, ...]]:
    first_B = batch.image_BCHW[:, 0, 0, 0].tolist()
    if batch.other_views_BVCHW is None:
        return {(each,) for each in first_B}
    others = [
        views_V[there_V].tolist()
        for views_V, there_V in zip(
            batch.other_views_BVCHW[:, :, 0, 0, 0], batch.has_other_view_BV, strict=True
        )
    ]
    return {(one, *rest) for one, rest in zip(first_B, others, strict=True)}


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_each_study_is_one_sample_with_its_other_projection_next(limit: int) -> None:
    source = StudySource(Images())
    read = functools.partial(fetch_image, source.source, color=False, stored=False)
    values = []
    for position in range(len(source)):
        images = source.images_of(position, read, limit)
        assert np.array_equal(images[0], source.pixels(position))
        values.append(tuple(int(image[0, 0]) for image in images))
    assert set(values) == at_most(limit)
    assert len(source) == len(values) == 6
    assert source.fingerprint != Images.fingerprint
    # The sample without an image counts as one of its study.
    assert source.beyond(limit) == {1: (5, 6), 2: (1, 1), 5: (0, 0)}[limit]


def open_it(**changes: Any) -> Any:
    settings: dict[str, Any] = {
        "batch": 6, "image": EvalTransform(size=16), "text": WholeText(), "tokenizer": no_text,
        "train": False, "inputs": Inputs(other_views=4),
    }  # fmt: skip
    settings |= changes
    return open_loader(settings.pop("source", Images()), **settings)


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_hold_studies_and_their_other_views(workers: int) -> None:
    loader = open_it(workers=workers)
    (batch,) = list(loader)
    assert grey_values(batch) == STUDIES
    assert batch.other_views_BVCHW.shape[:2] == (6, 2)  # the most of any study, not the limit
    assert batch.keys == [loader.source.sample(position).key for position in range(6)]
    assert not batch.other_views_BVCHW[~batch.has_other_view_BV].any()
    assert batch.rows([1]).has_other_view_BV.tolist() == batch.has_other_view_BV[1:2].tolist()
    by_one = list(open_it(batch=1))
    assert {study for each in by_one for study in grey_values(each)} == STUDIES
    assert sum(each.other_views_BVCHW is None for each in by_one) == 2
    (plain,) = list(open_it(inputs=None, batch=12))
    assert plain.other_views_BVCHW is None
    assert len(plain) == 11


def test_images_beyond_the_limit_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    (batch,) = list(open_it(inputs=Inputs(other_views=1)))
    assert grey_values(batch) == at_most(2)
    assert "1 of 6 studies have more than 2 images; 1 of their images are not read" in caplog.text
    caplog.clear()
    open_it(), open_it(inputs=Inputs(drawn_view=True))
    assert not caplog.text


def test_stored_features_are_of_all_images_of_a_study() -> None:
    class Stored(Images):
        def regions(self, position: int) -> Regions:
            self.pixels(position)  # raises for the sample without an image
            return Regions(np.full((3, 2), float(position)), np.zeros((3, 4), np.float32))

    source = StudySource(Stored())
    inputs = Inputs(other_views=1, regions=True)
    maker = ItemMaker(EvalTransform(size=16), WholeText(), (), 0, inputs)
    reader = RegionReader(source, maker)
    items = []
    for position in range(len(source)):
        sample = source.sample(position)
        stored = reader.read(0, position, sample.key, sample)
        items.append(maker.row(sample, reader.views(0, sample.key, sample, stored), 0))
    batch, _ = Collate(no_text, inputs)(items)
    assert batch is not None
    assert batch.other_views_BVCHW is None
    assert batch.other_regions_BVPD.shape == (6, 1, 3, 2)
    first_B, other_B = batch.regions_BPD[:, 0, 0], batch.other_regions_BVPD[:, 0, 0, 0]
    found = {
        tuple(IMAGES[int(place)][3] for place in (one, other)[: 1 + bool(there)])
        for one, other, there in zip(first_B, other_B, batch.has_other_view_BV, strict=True)
    }
    assert found == at_most(2)


def test_other_views_resume_and_are_augmented_on_the_device_alike() -> None:
    image = ConVIRTAugmentation(size=16, flip="swap_text", on_device=True)
    settings: dict[str, Any] = {"image": image, "train": True, "batch": 3, "seed": 2}
    loader, resumed = open_it(**settings), open_it(**settings)
    first, second = [augment_batch(batch) for batch in loader]
    resumed.load_state_dict({**resumed.state_dict(), "batch": 1})
    (again,) = [augment_batch(batch) for batch in resumed]
    assert torch.equal(again.other_views_BVCHW, second.other_views_BVCHW)
    assert first.augmentation_BVK is None
    (by_worker,) = list(open_it(**settings | {"image": dataclasses.replace(image, on_device=False),
                                              "batch": 6}))  # fmt: skip
    for batch in (first, second):
        rows = [by_worker.keys.index(key) for key in batch.keys]
        views = batch.other_views_BVCHW.shape[1]
        theirs = by_worker.other_views_BVCHW[rows, :views].int()
        assert (batch.other_views_BVCHW.int() - theirs).abs().max() <= 2
        assert not batch.other_views_BVCHW[~batch.has_other_view_BV].any()


def test_drawn_views_are_all_images_of_a_study_in_training_alone() -> None:
    """Two different ones in each epoch, the same on every start; a study with one image has no
    other.
    """
    loader = open_it(train=True, inputs=Inputs(drawn_view=True), seed=1)
    epochs = [batch for _ in range(40) for batch in loader]
    found = {study: set() for study in "abcdef"}
    for batch in epochs:
        for row, study in enumerate(batch.studies):
            found[study] |= grey_values(batch.rows([row]))
    assert found["b"] == {(20,)}
    assert found["a"] == {(10, 30), (30, 10)}
    assert found["d"] == set(itertools.permutations((60, 70, 80), 2))
    assert found["f"] == {(110,)}  # its other sample has no image
    again = next(iter(open_it(train=True, inputs=Inputs(drawn_view=True), seed=1)))
    assert torch.equal(again.other_views_BVCHW, epochs[0].other_views_BVCHW)
    (fixed,) = list(open_it(inputs=Inputs(drawn_view=True)))
    assert grey_values(fixed) == at_most(2)


def test_other_views_are_flipped_with_their_text() -> None:
    loader = open_it(image=ConVIRTAugmentation(size=32, flip="swap_text"), train=True, seed=3)
    pixels = np.zeros((40, 40), np.uint8)
    for key in map(str, range(20)):
        views = loader.samples.maker.views(key, pixels, 0, others=[pixels, pixels])
        assert {views.image.flipped} == {other.flipped for other in views.others}
    first, again = (next(iter(open_it(train=True, seed=3))) for _ in range(2))
    assert torch.equal(first.other_views_BVCHW, again.other_views_BVCHW)


def test_sources_that_cannot_be_read_by_study_are_refused() -> None:
    shared = Images()
    shared.image_keys = ["a"] * len(IMAGES)
    with raises(ConfigError, "conflict", "other_views"):
        open_it(source=shared)
    weighted = ConcatSource.__new__(ConcatSource)
    weighted.weights = (1.0, 2.0)
    with raises(ConfigError, "conflict", "other_views"):
        open_it(source=weighted)
