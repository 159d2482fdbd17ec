"""JPEG images that the augmentation decodes at a reduced size (`image.decode`)."""

import dataclasses
import functools
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.errors import raises
from helpers.shard_plans import make_plan

from medvl.data.convert.options import ShardOptions, ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.images.codecs import (
    JpegImage,
    decode_image,
    encode_jpeg,
    encode_png,
    make_upright,
    open_image,
)
from medvl.data.loading.items import boxed_phrases
from medvl.data.loading.loader import open_loader
from medvl.data.loading.readers import stores_images
from medvl.data.loading.sources import FileSource, SourceView, Subset, no_text
from medvl.data.privacy import Deidentifier
from medvl.data.shards.source import ShardSource
from medvl.data.transforms.image import ConVIRTAugmentation
from medvl.data.transforms.text import WholeText
from medvl.errors import ConfigError, ImageError, ShardError
from medvl.schema import Sample

CROP = ConVIRTAugmentation.crop(32, (0.3, 1.0), "plain")


def ramps(height: int, width: int) -> np.ndarray:
    """Return RGB pixels whose red is their column and whose green is their row, up to 240."""
    image_HWC = np.full((height, width, 3), 128, np.uint8)
    image_HWC[:, :, 0] = np.arange(width) * 240 / width
    image_HWC[:, :, 1] = np.arange(height)[:, None] * 240 / height
    return image_HWC


def reduced(settings: ConVIRTAugmentation) -> ConVIRTAugmentation:
    return dataclasses.replace(settings, decode="reduced")


@pytest.mark.parametrize("sides", [(97, 131), (256, 200), (301, 300)])
@pytest.mark.parametrize("pad", [False, True])
def test_the_crop_shows_the_same_part_of_the_image(sides: tuple[int, int], pad: bool) -> None:
    """Edges are off by at most half a pixel of the output."""
    settings = dataclasses.replace(CROP, pad=pad)
    full, small = settings.build(), reduced(settings).build()
    data = encode_jpeg(ramps(*sides))
    pixels = decode_image(data, color=True)
    for seed in range(12):
        expected = full(pixels, np.random.default_rng(seed))
        found = small(JpegImage(data, color=True), np.random.default_rng(seed))
        assert found.flipped == expected.flipped
        inside = (expected.image_HWC[:, :, 2] > 120) & (found.image_HWC[:, :, 2] > 120)
        assert inside.mean() > 0.5
        apart = np.abs(found.image_HWC.astype(int) - expected.image_HWC)[inside]
        assert apart.max() <= 0.5 * 240 / 32 + 4


def test_reduced_images_are_upright_and_draws_are_the_same() -> None:
    data = encode_jpeg(ramps(123, 90))
    for orientation in (1, 3, 6):
        image = JpegImage(data, color=True, orientation=orientation)
        expected = make_upright(decode_image(data, color=True), orientation)
        assert image.shape == expected.shape
        np.testing.assert_array_equal(image.decode(), expected)
        half = image.decode(2)
        assert half.shape == (*(-(-side // 2) for side in expected.shape[:2]), 3)
        assert image.decode(2) is half
    settings = ConVIRTAugmentation(size=32, on_device=True)
    rows = [
        each.build()(image, np.random.default_rng(1)).deferred_K
        for each in (settings, reduced(settings))
    ]
    np.testing.assert_array_equal(*rows)


def test_small_crops_and_other_formats_are_decoded_in_full() -> None:
    settings = ConVIRTAugmentation(size=32)
    for data in (encode_jpeg(ramps(60, 63)), encode_png(ramps(300, 200))):
        found = reduced(settings).build()(open_image(data, color=True), np.random.default_rng(3))
        expected = settings.build()(decode_image(data, color=True), np.random.default_rng(3))
        np.testing.assert_array_equal(found.image_HWC, expected.image_HWC)
    deep = encode_png(np.full((64, 64), 4095, np.uint16))
    np.testing.assert_array_equal(open_image(deep), decode_image(deep))


@pytest.mark.parametrize("cut", [0, 2, 20, 400])
def test_damaged_files_give_the_same_error(cut: int) -> None:
    data = encode_jpeg(ramps(90, 120))[:cut]
    with pytest.raises(ImageError) as expected:
        decode_image(data)
    with pytest.raises(ImageError) as found:
        reduced(CROP).build()(open_image(data), np.random.default_rng(0))
    assert (found.value.code, str(found.value)) == (expected.value.code, str(expected.value))


def test_boxes_of_phrases_are_placed_alike() -> None:
    data = encode_jpeg(ramps(256, 200))
    box = {"label": "x", "x": 20, "y": 30, "width": 90, "height": 120}
    phrase = {"label": "x", "text": "left", "boxes": [box]}
    extra = {"phrases": [phrase], "image_height": 256, "image_width": 200}
    sample = Sample(
        key="k", corpus="c", split="train", patient="p", study="s", sections={}, extra=extra
    )

    def rngs(purpose: str) -> np.random.Generator:
        return np.random.default_rng(len(purpose))

    (expected,) = boxed_phrases(sample, decode_image(data).shape, CROP.build(), rngs)
    (found,) = boxed_phrases(sample, JpegImage(data).shape, reduced(CROP).build(), rngs)
    np.testing.assert_array_equal(found.cover_HW, expected.cover_HW)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ShardSource:
    root = tmp_path_factory.mktemp("reduced")
    plan, run = make_plan(root / "images", 8), ShardRun(out=root / "out", workers=1)
    options = ShardOptions(short_side=64, samples_per_shard=8)
    write_shards(plan, Deidentifier(b"0" * 32), run, options)
    return ShardSource(root / "out/train")


def test_batches_have_the_same_rows(source: ShardSource, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"text": WholeText(), "tokenizer": no_text, "train": True}
    opened = functools.partial(open_loader, Subset(source, range(8)), batch=4, **options)
    settings = ConVIRTAugmentation.crop(16, (0.8, 1.0))
    full, small = (next(iter(opened(image=each))) for each in (settings, reduced(settings)))
    assert small.keys == full.keys
    assert small.image_BCHW.shape == full.image_BCHW.shape
    apart = (small.image_BCHW.int() - full.image_BCHW.int()).abs().float().mean()
    assert 0 < apart < 12
    monkeypatch.setattr(ShardSource, "image_bytes", lambda *_: encode_jpeg(ramps(64, 64))[:-90])
    for each in (settings, reduced(settings)):
        loader = opened(image=each, max_skipped=8)
        with raises(ShardError, "empty"):
            next(iter(loader))
        assert loader.skipped == {"truncated": 4}


def test_files_of_a_corpus_are_refused(tmp_path: Path) -> None:
    sample = Sample(key="k", corpus="c", split="train", patient="p", study="s", sections={})
    files = FileSource([sample], ())
    with raises(ConfigError, "conflict", "image.decode"):
        open_loader(
            files, batch=1, image=reduced(CROP), text=WholeText(), tokenizer=no_text, train=True
        )


def test_pixels_of_a_batch_are_not_held_at_once(
    source: ShardSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of a batch are fetched first, and hold what is decoded of them."""
    decoded: list[weakref.ref[np.ndarray]] = []
    alive: list[int] = []

    def read(data: bytes, color: bool, sides: tuple[int, int] = (0, 0)) -> np.ndarray:
        pixels = decode_image(encode_png(np.zeros((64, 64), np.uint8)))
        decoded.append(weakref.ref(pixels))
        alive.append(sum(each() is not None for each in decoded))
        return pixels

    monkeypatch.setattr("medvl.data.images.codecs._read_jpeg", read)
    options: dict[str, Any] = {"text": WholeText(), "tokenizer": no_text, "train": True}
    next(iter(open_loader(source, batch=8, image=CROP, **options)))
    assert len(decoded) == 8
    assert max(alive) <= 2


def test_files_are_read_where_no_view_changes_the_pixels(source: ShardSource) -> None:
    """A view that changes them has the `image_bytes` of its base class, which are the others'."""

    class Negative(SourceView):
        def pixels(self, position: int, color: bool | None = None) -> np.ndarray:
            return 255 - super().pixels(position, color)

    negative = Negative(source, b"")
    subset = Subset(source, range(8))
    assert [stores_images(each) for each in (source, subset, Subset(negative, range(8)))] == [
        True,
        True,
        False,
    ]
    options: dict[str, Any] = {"text": WholeText(), "tokenizer": no_text, "train": True}
    opened = functools.partial(open_loader, batch=4, **options)
    for settings in (CROP, reduced(CROP)):
        plain, other = (next(iter(opened(each, image=settings))) for each in (subset, negative))
        assert plain.keys == other.keys
        apart = plain.image_BCHW.int() + other.image_BCHW.int() - 255
        assert apart.abs().float().mean() < 3
