"""Augmentation and decoding on the device: the parameters of the workers, and their images to a
grey level.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import cv2
import numpy as np
import pytest
import torch
from helpers import train_fakes as fakes
from helpers.errors import raises
from helpers.shard_plans import make_plan
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from medvl.data.convert.options import ShardOptions, ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.images.codecs import JpegImage, encode_jpeg
from medvl.data.loading.collate import Collate
from medvl.data.loading.dense_targets import DenseTargets
from medvl.data.loading.items import ItemMaker
from medvl.data.loading.loader import Loader, open_loader
from medvl.data.loading.sources import no_text
from medvl.data.privacy import Deidentifier
from medvl.data.shards.source import ShardSource
from medvl.data.transforms import operations
from medvl.data.transforms.image import (
    BuiltTransform,
    ConVIRTAugmentation,
    EvalTransform,
    Transformed,
)
from medvl.data.transforms.operations import (
    Crop,
    Decode,
    augment_batch,
    augment_images,
    crop_and_resize,
    crop_files,
    with_channels,
)
from medvl.data.transforms.text import WholeText
from medvl.errors import ConfigError, ImageError, ShardError
from medvl.schema import Batch, Inputs, Sample
from medvl.train.parallel.distributed import BatchStream, SideStream, place

NOTHING: dict[str, Any] = {
    "rotation": 0, "translation": 0, "scale": (1.0, 1.0), "brightness": 0, "contrast": 0,
    "blur_sigma": (0.1, 0.1),
}  # fmt: skip
AFFINE: dict[str, Any] = {"rotation": 20, "translation": 0.1, "scale": (0.95, 1.05)}
COLORS: dict[str, Any] = {"brightness": 0.4, "contrast": 0.4}
ALL: dict[str, Any] = {**AFFINE, **COLORS, "blur_sigma": (0.1, 3.0)}
CHAINS: dict[str, tuple[dict[str, Any], float, int]] = {
    "crop": ({}, 0.0, 0),
    "affine": (AFFINE, 0.1, 1),
    "brightness": ({"brightness": 0.4}, 0.0, 0),
    "contrast": ({"contrast": 0.4}, 0.1, 1),
    "brightness and contrast": (COLORS, 0.1, 2),
    "blur": ({"blur_sigma": (0.1, 3.0)}, 0.1, 1),
    "all": (ALL, 0.1, 2),
    "all, padded": ({**ALL, "pad": True}, 0.1, 2),
}
"""Operations, and the tolerated differences in grey levels: mean of an image, and of any pixel."""
SHAPES = [(101, 140), (141, 99, 3), (64, 64), (333, 57, 3), (57, 333)]


@functools.cache
def photo(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Return an image with smooth shades and noise, from black to white."""
    rng = np.random.default_rng(seed)
    smooth = cv2.GaussianBlur(rng.normal(size=shape), (0, 0), 5).reshape(shape)
    smooth = (smooth - smooth.min()) / np.ptp(smooth) * 290 - 20
    return np.clip(smooth + 6 * rng.normal(size=shape), 0, 255).astype(np.uint8)


def stacked(images: Sequence[np.ndarray], device: torch.device) -> Tensor:
    return torch.from_numpy(np.stack([image.transpose(2, 0, 1) for image in images])).to(device)


@pytest.mark.parametrize("size", [64, 95])
@pytest.mark.parametrize("color", [False, True])
@pytest.mark.parametrize("name", CHAINS)
def test_images_are_those_of_the_workers(
    name: str, color: bool, size: int, device: torch.device
) -> None:
    """Each operation alone and all of them, for odd and even sizes, grey and colour, as one
    batch.
    """
    changes, mean, most = CHAINS[name]
    config = ConVIRTAugmentation(size=size, flip="plain", **{**NOTHING, **changes})
    apply, defer = config.build(), dataclasses.replace(config, on_device=True).build()
    expected, left, parameters = [], [], []
    for seed, shape in enumerate(shape for shape in SHAPES * 3 if (len(shape) == 3) == color):
        ours, theirs = (
            each(photo(shape, seed), np.random.default_rng(seed)) for each in (defer, apply)
        )
        assert ours.flipped == theirs.flipped
        assert theirs.deferred_K is None
        assert ours.deferred_K is not None
        expected.append(theirs.image_HWC)
        left.append(ours.image_HWC)
        parameters.append(ours.deferred_K)
    found_BCHW = augment_images(
        stacked(left, device), torch.from_numpy(np.stack(parameters)).to(device)
    )
    assert found_BCHW.dtype == torch.uint8
    apart_BCHW = (found_BCHW.cpu().int() - stacked(expected, torch.device("cpu")).int()).abs()
    assert apart_BCHW.float().mean(dim=(1, 2, 3)).max() <= mean
    assert apart_BCHW.max() <= most
    if name != "crop":
        assert not torch.equal(found_BCHW.cpu(), stacked(left, torch.device("cpu")))


def with_draws(
    transform: BuiltTransform, pixels: np.ndarray, seed: int
) -> tuple[Transformed, dict[str, dict[str, Any]]]:
    """Return a transformed image, and the parameters that each of albumentations' operations drew,
    by its name.
    """
    drawn: dict[str, dict[str, Any]] = {}
    draw = operations.draw

    def noted(operation: Any, shape: tuple[int, ...]) -> dict[str, Any]:
        return drawn.setdefault(type(operation).__name__, draw(operation, shape))

    with (
        mock.patch("medvl.data.transforms.image.draw", noted),
        mock.patch("medvl.data.transforms.operations.draw", noted),
    ):
        return transform(pixels, np.random.default_rng(seed)), drawn


def test_parameters_are_those_of_the_workers() -> None:
    """Those that albumentations draws for its operations."""
    apply, defer = (ConVIRTAugmentation(size=64, on_device=on).build() for on in (False, True))
    for seed in range(20):
        _, drawn = with_draws(apply, photo((90, 120)), seed)
        affine, color, blur = (drawn[name] for name in ("Affine", "ColorJitter", "GaussianBlur"))
        deferred, others = with_draws(defer, photo((90, 120)), seed)
        parameters_K = deferred.deferred_K
        assert parameters_K is not None
        crops = (each["RandomResizedCrop"]["crop_coords"] for each in (drawn, others))
        assert next(crops) == next(crops)
        matrix_23 = cv2.invertAffineTransform(parameters_K[:6].reshape(2, 3).astype(np.float64))
        np.testing.assert_allclose(matrix_23, affine["matrix"][:2], rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(
            parameters_K[6:8], [color["brightness"], color["contrast"]], rtol=1e-6
        )
        assert parameters_K[8] == (color["order"].index(0) < color["order"].index(1))
        half_R = blur["kernel"][len(blur["kernel"]) // 2 :]
        np.testing.assert_allclose(
            parameters_K[9:], np.pad(half_R, (0, 11 - len(half_R))), rtol=1e-6
        )


def test_operations_are_drawn_independently() -> None:
    """Seeded alike, they had a correlation of 0.99 between brightness and blur, and of 0.5 with
    the area of the crop.
    """
    defer = ConVIRTAugmentation(size=64, on_device=True).build()
    rows, pixels = [], photo((90, 120))
    for seed in range(400):
        cropped, drawn = with_draws(defer, pixels, seed)
        assert cropped.deferred_K is not None
        left, top, right, bottom = drawn["RandomResizedCrop"]["crop_coords"]
        scale = np.linalg.det(cropped.deferred_K[:6].reshape(2, 3)[:, :2])
        rows.append(
            [(right - left) * (bottom - top), cropped.flipped, scale, *cropped.deferred_K[6:10]]
        )
    apart = np.corrcoef(np.array(rows, np.float64).T) - np.eye(7)
    assert np.abs(apart).max() < 0.25  # five standard deviations of 400 independent draws


class Operations(TorchDispatchMode):
    """Counts operations on tensors."""

    count = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return operation(*args, **(kwargs or {}))


def test_number_of_operations_does_not_depend_on_the_batch() -> None:
    left = ConVIRTAugmentation(size=32, on_device=True).build()(
        photo((40, 50)), np.random.default_rng(0)
    )
    assert left.deferred_K is not None
    counts = []
    for batch in (2, 9):
        images_BCHW = stacked([left.image_HWC] * batch, torch.device("cpu"))
        parameters_BK = torch.from_numpy(np.stack([left.deferred_K] * batch))
        with Operations() as operations:
            augment_images(images_BCHW, parameters_BK)
        counts.append(operations.count)
    assert counts[0] == counts[1] > 0


def write_source(root: Path, **options: Any) -> ShardSource:
    write_shards(
        make_plan(root / "images", 16),
        Deidentifier(b"0" * 32),
        ShardRun(out=root / "out", workers=1),
        ShardOptions(short_side=40, samples_per_shard=8, **options),
    )
    return ShardSource(root / "out/train")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ShardSource:
    return write_source(tmp_path_factory.mktemp("device"), image_format="png")


@pytest.fixture(scope="module")
def jpeg_source(tmp_path_factory: pytest.TempPathFactory) -> ShardSource:
    return write_source(tmp_path_factory.mktemp("jpeg"))


def open_train(
    source: ShardSource, *, on_device: bool = True, decode: Decode = "full", **options: Any
) -> Loader:
    image = ConVIRTAugmentation(size=32, flip="plain", on_device=on_device, decode=decode)
    return open_loader(
        source, batch=4, image=image, text=WholeText(), tokenizer=no_text, train=True, **options
    )


def test_batches_on_the_device_are_those_of_the_workers(
    source: ShardSource, device: torch.device
) -> None:
    """Second views too, in the order of the loader, through the side stream, for two epochs."""
    inputs = Inputs(second_image=True)
    plain = BatchStream(open_train(source, on_device=False, inputs=inputs), 1)
    ahead = BatchStream(
        open_train(source, inputs=inputs), 1, SideStream(device, channels_last=True)
    )
    for step in range(2 * plain.steps_per_epoch):
        (expected,), (found,) = (
            list(plain.take(step)),
            [place(batch, device, False) for batch in ahead.take(step)],
        )
        assert found.keys == expected.keys
        assert expected.augmentation_BVK is found.augmentation_BVK is None
        for name in ("image_BCHW", "second_image_BCHW"):
            ours, theirs = getattr(found, name).cpu().int(), getattr(expected, name).int()
            assert (ours - theirs).abs().max() <= 2
        assert not torch.equal(found.image_BCHW, found.second_image_BCHW)


def keys_and_parameters(batches: Sequence[Batch]) -> list[tuple[list[str], list[float]]]:
    found = []
    for batch in batches:
        assert batch.augmentation_BVK is not None
        found.append((batch.keys, batch.augmentation_BVK.flatten().tolist()))
    return found


@pytest.mark.fault("F7")
def test_parameters_depend_on_seed_epoch_and_key_alone(source: ShardSource) -> None:
    """With any number of workers, and after a resume in the middle of an epoch."""
    alone, loader, resumed = open_train(source), open_train(source, workers=2), open_train(source)
    epochs = [keys_and_parameters(list(alone)) for _ in range(2)]
    assert [keys_and_parameters(list(loader)) for _ in range(2)] == epochs
    assert {tuple(parameters) for _, parameters in epochs[0]}.isdisjoint(
        tuple(some) for _, some in epochs[1]
    )
    resumed.load_state_dict({**open_train(source).state_dict(), "epoch": 1, "batch": 1})
    assert keys_and_parameters(list(resumed)) == epochs[1][1:]
    assert keys_and_parameters(list(open_train(source, seed=1))) != epochs[0]


def test_training_augments_on_the_device(source: ShardSource, tmp_path: Path) -> None:
    """The model sees images of the workers' augmentation, to a grey level; so the losses are
    near.
    """

    class Watching(fakes.Regression):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(32 * 32, 1)
            self.seen: list[Tensor] = []

        def forward(self, batch: Batch) -> Any:
            self.seen.append(batch.image_BCHW)
            return super().forward(dataclasses.replace(batch, ids_BT=torch.zeros(len(batch), 1)))

    models = []
    for on_device in (True, False):
        models.append(Watching())
        config = fakes.config(tmp_path / str(on_device), steps=4)
        with fakes.fake_files():
            fakes.train(
                models[-1],
                open_train(source, on_device=on_device),
                optim=fakes.optim(),
                config=config,
            )
    for ours, theirs in zip(models[0].seen, models[1].seen, strict=True):
        assert (ours.int() - theirs.int()).abs().max() <= 2


def test_shared_images_have_one_row_of_parameters() -> None:
    maker = ItemMaker(
        ConVIRTAugmentation(size=32, flip="plain", on_device=True), WholeText(), (), 0
    )
    items = []
    for number, image in enumerate("abbac"):
        sample = Sample(key=f"k{number}", corpus="c", split="train", patient="p", study="s")
        items.append(maker.row(sample, maker.views(image, photo((40, 50)), 0), 0, image_key=image))
    batch, _ = Collate(no_text)(items)
    assert batch is not None
    assert batch.image_of_B is not None
    assert batch.augmentation_BVK is not None
    assert batch.image_of_B.tolist() == [0, 1, 1, 0, 2]
    for row, item in zip(batch.image_of_B.tolist(), items, strict=True):
        assert item.augmentation_VK is not None
        assert batch.augmentation_BVK[row].tolist() == item.augmentation_VK.tolist()
    assert len(augment_batch(batch).image_BCHW) == 3


def test_samples_without_an_image_stay_black() -> None:
    maker = ItemMaker(
        ConVIRTAugmentation(size=32, on_device=True), WholeText(), (), 0, Inputs(second_image=True)
    )
    views = maker.placeholder(color=False)
    sample = Sample(key="k", corpus="c", split="train", patient="p", study="s")
    item = maker.row(sample, views, 0)
    assert item.augmentation_VK is not None
    found = augment_images(
        stacked([item.image_HWC], torch.device("cpu")), torch.from_numpy(item.augmentation_VK[:1])
    )
    assert not found.any()


def test_a_batch_without_deferred_augmentation_is_unchanged() -> None:
    batch = fakes.make_batch([0, 1])
    assert augment_batch(batch) is batch


def test_on_device_refuses_targets_and_wide_kernels(source: ShardSource) -> None:
    targets = DenseTargets("boxes", ("Edema",), EvalTransform(size=32), (4, 4))
    with raises(ConfigError, "conflict", "image.on_device"):
        open_train(source, targets=targets)
    with raises(ConfigError, "out_of_range", "blur_sigma"):
        ConVIRTAugmentation(size=32, blur_sigma=(0.1, 10.0), on_device=True)


# Decoding on the device.


@pytest.mark.parametrize("size", [24, 70, 110])
@pytest.mark.parametrize("color", [False, True])
@pytest.mark.parametrize("mirror", [False, True])
def test_crops_on_the_device_are_those_of_the_workers(
    size: int, color: bool, mirror: bool, device: torch.device
) -> None:
    """Crops that shrink, grow and do both, within images of unequal sizes and beyond them."""
    images = [photo(shape[:2] + (3,) * color, seed) for seed, shape in enumerate(SHAPES)]
    rng = np.random.default_rng(size)
    crops, files = [], []
    for number in range(60):
        height, width = images[number % len(images)].shape[:2]
        left, top = rng.integers(-15, (width - 8, height - 8))
        right, bottom = rng.integers((left + 8, top + 8), (width + 15, height + 15))
        crops.append(Crop(*map(int, (left, top, right, bottom))))
        files.append(number % len(images))
    parts_Q8 = torch.tensor(
        [(file, 0, 0, *crop, mirror) for file, crop in zip(files, crops, strict=True)]
    )
    decoded = [stacked([with_channels(image)], device)[0] for image in images]
    found_QCSS = crop_files(decoded, parts_Q8, size).cpu()
    for file, crop, found_CSS in zip(files, crops, found_QCSS, strict=True):
        expected_HWC = with_channels(crop_and_resize(images[file], crop, size, mirror=mirror))
        apart_CSS = found_CSS.int() - torch.from_numpy(expected_HWC.transpose(2, 0, 1)).int()
        assert apart_CSS.abs().max() <= 1
        assert apart_CSS.float().abs().mean() <= 0.2


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_decoded_on_the_device_are_those_of_the_workers(
    jpeg_source: ShardSource, device: torch.device, workers: int
) -> None:
    """The same draws for the image and a second view of it, through the side stream."""
    inputs = Inputs(second_image=True)
    plain = BatchStream(open_train(jpeg_source, inputs=inputs), 1)
    loader = open_train(jpeg_source, decode="device", inputs=inputs, workers=workers)
    ahead = BatchStream(loader, 1, SideStream(device, channels_last=True))
    cpu = torch.device("cpu")
    for step in range(plain.steps_per_epoch + 1):
        (expected,) = [place(batch, cpu, False) for batch in plain.take(step)]
        (found,) = [place(batch, device, False) for batch in ahead.take(step)]
        assert found.keys == expected.keys
        assert found.encoded is found.augmentation_BVK is None
        for name in ("image_BCHW", "second_image_BCHW"):
            ours, theirs = getattr(found, name).cpu().int(), getattr(expected, name).int()
            apart = (ours - theirs).abs().float()
            assert apart.mean() < 1.5
            assert device.type == "cuda" or apart.max() <= 2
            assert theirs.float().std() > 10


def test_the_files_of_a_batch_are_sent_once(jpeg_source: ShardSource) -> None:
    """Second views share the file of the first, other images have their own, and the pixels of
    other formats come as before.
    """
    image = ConVIRTAugmentation(size=32, flip="plain", on_device=True, decode="device")
    inputs = Inputs(second_image=True, prior_image=True, other_views=2)
    maker = ItemMaker(image, WholeText(), (), 0, inputs)
    plain = ItemMaker(dataclasses.replace(image, decode="full"), WholeText(), (), 0, inputs)
    files = [encode_jpeg(photo((50, 60), seed)) for seed in range(5)]
    batches = []
    for make, open_file in ((maker, JpegImage), (plain, lambda data: JpegImage(data).decode())):
        items = []
        for key, prior in (("a", 1), ("b", None)):
            sample = Sample(key=key, corpus="c", split="train", patient="p", study=key)
            first = open_file(files[0]) if key == "a" else photo((40, 70))
            others = map(open_file, files[2:3] if key == "a" else files[3:])
            before = None if prior is None else open_file(files[prior])
            views = make.views(key, first, 0, before, sample, list(others))
            items.append(make.row(sample, views, 0))
        batch, _ = Collate(no_text, inputs)(items)
        assert batch is not None
        batches.append(batch)
    encoded = batches[0].encoded
    assert encoded is not None
    assert batches[1].encoded is None
    assert encoded.keys == ["a", "a", "a", "b", "b"]
    assert encoded.part_Q8[:, :3].tolist() == [
        [0, 0, 0], [0, 0, 1], [1, 0, 2], [2, 0, 3], [3, 1, 3], [4, 1, 4],
    ]  # fmt: skip
    assert len(encoded.file_N) == sum(map(len, files))
    with pytest.raises(ValueError, match="augment_batch"):
        batches[0].rows([0])
    found, expected = map(augment_batch, batches)
    for name in ("image_BCHW", "second_image_BCHW", "prior_BCHW", "other_views_BVCHW"):
        apart = getattr(found, name).int() - getattr(expected, name).int()
        assert apart.abs().max() <= 2, name
        assert getattr(expected, name).float().std() > 10


def progressive(image: np.ndarray) -> bytes:
    return cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_PROGRESSIVE, 1])[1].tobytes()


def as_rgb(data: bytes) -> bytes:
    """Return a colour JPEG that claims to store red, green and blue."""
    adobe = b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0\0"
    start = data.index(b"\xff\xdb")
    return data[:2] + adobe + data[start:]


GREY, COLOR = encode_jpeg(photo((40, 50))), encode_jpeg(photo((40, 50, 3)))
THUMBNAIL = b"\xff\xe1" + (len(GREY) + 2).to_bytes(2) + GREY


@pytest.mark.parametrize(
    ("image", "suits"),
    [
        (JpegImage(GREY), True),
        (JpegImage(COLOR), True),
        (JpegImage(GREY + b"\0\0"), True),
        (JpegImage(GREY, orientation=6), False),
        (JpegImage(progressive(photo((40, 50)))), False),
        (JpegImage(as_rgb(COLOR)), False),
        (JpegImage(GREY[:-2]), False),
        (JpegImage(GREY[:2] + THUMBNAIL + GREY[2:-40]), False),
    ],
    ids=["grey", "color", "trailing", "turned", "progressive", "rgb", "open", "thumbnail"],
)
def test_files_that_the_device_decodes(image: JpegImage, suits: bool) -> None:
    assert image.suits_device() is suits


def test_other_files_are_decoded_by_the_workers() -> None:
    settings = ConVIRTAugmentation(size=32, on_device=True)
    image = JpegImage(GREY, orientation=6)
    found, expected = (
        each.build()(image, np.random.default_rng(5))
        for each in (dataclasses.replace(settings, decode="device"), settings)
    )
    assert found.encoded is None
    np.testing.assert_array_equal(found.image_HWC, expected.image_HWC)


def test_damaged_files_are_skipped_or_named(
    jpeg_source: ShardSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A truncated one by the worker; damage that only decoding shows stops the step."""
    monkeypatch.setattr(ShardSource, "image_bytes", lambda *_: GREY[:-90])
    loader = open_train(jpeg_source, decode="device", max_skipped=16)
    with raises(ShardError, "empty"):
        next(iter(loader))
    assert loader.skipped == {"truncated": 4}
    broken = GREY[:-90] + GREY[-2:]
    monkeypatch.setattr(ShardSource, "image_bytes", lambda *_: broken)
    batch = next(iter(open_train(jpeg_source, decode="device")))
    with pytest.raises(ImageError, match=f"sample {batch.keys[0]} cannot be decoded on cpu"):
        augment_batch(batch)


def test_large_images_are_cropped_a_few_at_a_time(
    jpeg_source: ShardSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = next(iter(open_train(jpeg_source, decode="device")))
    expected = augment_batch(batch)
    monkeypatch.setattr(operations, "_VALUES_AT_ONCE", 1)
    with mock.patch.object(operations, "crop_files", wraps=crop_files) as cropped:
        found = augment_batch(batch)
    assert cropped.call_count == len(batch)
    torch.testing.assert_close(found.image_BCHW, expected.image_BCHW, atol=1, rtol=0)


def test_decoding_on_the_device_needs_augmentation_there() -> None:
    with raises(ConfigError, "conflict", "decode"):
        ConVIRTAugmentation(size=32, decode="device")
