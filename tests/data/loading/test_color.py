"""Loaders read shards in the colour that they are stored in, and evaluations as the model was
trained.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.mimic_files import textured
from helpers.shard_plans import make_plan

from medvl.data.convert.options import ShardOptions, ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.images.codecs import encode_png
from medvl.data.loading.loader import open_loader
from medvl.data.loading.sources import (
    ConcatSource,
    FileSource,
    OtherTexts,
    Subset,
    UnpairedSource,
    color_for,
    has_color,
    no_text,
)
from medvl.data.privacy import Deidentifier
from medvl.data.shards.source import ShardSource
from medvl.data.transforms.image import ConVIRTAugmentation, EvalTransform, OriginalTransform
from medvl.data.transforms.text import WholeText
from medvl.encoders import create_image_encoder
from medvl.eval.core.open import open_for_evaluation
from medvl.models.downstream.regions import GridRegions
from medvl.schema import Inputs

COUNT, SIZE = 8, 32


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with images in colour, and shards of them in colour and in grey."""
    home = tmp_path_factory.mktemp("color")
    (home / "images").mkdir()
    for number in range(COUNT):
        channels = [textured(10 * number + channel, 60, 50) for channel in range(3)]
        (home / f"images/{number}.png").write_bytes(encode_png(np.stack(channels, axis=2)))
    for name in ("color", "grey"):
        plan = make_plan(home / "images", COUNT)
        for place, record in enumerate(plan.records):
            sample = dataclasses.replace(record.sample, key=f"{name}{place}", corpus=name)
            plan.records[place] = dataclasses.replace(record, sample=sample)
        options = ShardOptions(short_side=40, image_format="png", color=name == "color")
        write_shards(plan, Deidentifier(b"0" * 32), ShardRun(out=home / name, workers=1), options)
    return home


def shards(home: Path, name: str) -> ShardSource:
    return ShardSource(home / name / "train")


def first_batch(source: Any, train: bool, **options: Any) -> torch.Tensor:
    image = ConVIRTAugmentation(size=SIZE) if train else EvalTransform(size=SIZE)
    settings: dict[str, Any] = {
        "batch": 4,
        "image": image,
        "text": WholeText(),
        "tokenizer": no_text,
        "train": train,
    }
    return next(iter(open_loader(source, **settings | options))).image_BCHW


@pytest.mark.parametrize("train", [True, False])
def test_batches_have_the_channels_of_the_shards(home: Path, train: bool) -> None:
    color, grey = shards(home, "color"), shards(home, "grey")
    assert first_batch(grey, train).shape == (4, 1, SIZE, SIZE)
    assert first_batch(grey, train, color=True).shape == (4, 3, SIZE, SIZE)
    assert first_batch(color, train, color=False).shape == (4, 1, SIZE, SIZE)
    assert first_batch(color, train, inputs=Inputs(other_views=1)).shape == (4, 3, SIZE, SIZE)
    views = [
        color,
        Subset(color, range(5)),
        OtherTexts(Subset(color, range(5)), "none"),
        UnpairedSource(color, 1.0),
    ]
    for view in views:
        image_BCHW = first_batch(view, train)
        assert image_BCHW.shape == (4, 3, SIZE, SIZE)
        assert not torch.equal(image_BCHW[:, 0], image_BCHW[:, 1])


def test_one_folder_in_color_is_enough(home: Path) -> None:
    """All rows of a batch have the same channels, and the merged manifest, which a checkpoint
    stores, is in colour.
    """
    source = ConcatSource([shards(home, "grey"), shards(home, "color")])
    assert source.manifest.color
    assert not ConcatSource([shards(home, "grey")]).manifest.color
    image_BCHW = first_batch(source, False, batch=2 * COUNT)
    assert image_BCHW.shape == (2 * COUNT, 3, SIZE, SIZE)
    assert torch.equal(image_BCHW[:COUNT, 0], image_BCHW[:COUNT, 1])
    assert not torch.equal(image_BCHW[COUNT:, 0], image_BCHW[COUNT:, 1])


def test_pixels_are_those_of_the_shards_unless_asked(home: Path) -> None:
    color, grey = shards(home, "color"), shards(home, "grey")
    assert (color.pixels(0).ndim, grey.pixels(0).ndim) == (3, 2)
    assert (color.pixels(0, False).ndim, grey.pixels(0, True).ndim) == (2, 3)
    files = FileSource([color.sample(0)], ())
    assert not has_color(files)
    assert has_color(Subset(color, [0]))
    assert not has_color(grey)


@pytest.mark.parametrize("name", ["color", "grey"])
@pytest.mark.parametrize("trained", [True, False, None])
def test_evaluations_read_the_pixels_of_the_original_files(
    home: Path, name: str, trained: bool | None
) -> None:
    """A model trained in grey gets grey images of colour shards too, as of colour files."""
    source, transform = shards(home, name), EvalTransform(size=SIZE)
    if trained is not None:
        stored = {"short_side": 40, "image_format": "png", "quality": 95, "color": trained}
        transform = OriginalTransform(**transform.settings(), **stored)
    image_BCHW = next(
        iter(open_for_evaluation(source, transform, batch=COUNT, workers=0))
    ).image_BCHW
    expected_BCHW = transform([home / f"images/{number}.png" for number in range(COUNT)])
    if trained is None:  # the files have colour, whatever the shards were made with
        assert image_BCHW.shape[1] == (3 if name == "color" else 1)
        assert color_for(source, transform) == (name == "color")
        return
    assert image_BCHW.shape[1] == expected_BCHW.shape[1] == (3 if trained else 1)
    if (name, trained) == ("grey", True):
        assert torch.equal(image_BCHW[:, 0], image_BCHW[:, 1])  # grey shards have lost the colours
        return
    difference = (image_BCHW.int() - expected_BCHW.int()).abs().max()
    assert difference <= (
        1 if name == "color" and not trained else 0
    )  # luma before or after shrinking


def test_regions_are_found_in_the_colors_of_the_shards(home: Path) -> None:
    """`medvl regions` reads what a loader gives to the same encoder."""
    encoder = create_image_encoder("timm:resnet10t", pretrained=False, image_size=64)
    grid, source = GridRegions(encoder, EvalTransform(size=64), "grid"), shards(home, "color")
    image_B3HW = next(
        iter(open_for_evaluation(source, grid.transform, batch=2, workers=0))
    ).image_BCHW
    prepared = [
        grid.prepare(source.pixels(position, grid.color)).pixels_CHW for position in range(2)
    ]
    np.testing.assert_array_equal(np.stack(prepared), image_B3HW.numpy())
    stored = {"short_side": 40, "image_format": "png", "quality": 95, "color": False}
    trained = OriginalTransform(**grid.transform.settings(), **stored)
    assert GridRegions(encoder, trained, "grid").color is False


@pytest.mark.parametrize("in_channels", [1, 3])
def test_encoders_with_grey_statistics_read_color(in_channels: int) -> None:
    """One mean for all channels; an encoder of grey images converts RGB to luma before."""
    settings = {"image_size": 64, "in_channels": in_channels, "mean": (0.5,), "std": (0.25,)}
    encoder = create_image_encoder("timm:resnet10t", pretrained=False, **settings).eval()
    grey_B1HW = torch.randint(0, 256, (2, 1, 64, 64), dtype=torch.uint8)
    rgb_B3HW = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    same = encoder.normalize(grey_B1HW.expand(-1, 3, -1, -1))
    torch.testing.assert_close(same, encoder.normalize(grey_B1HW).expand_as(same))
    assert encoder(rgb_B3HW).pooled_BD.isfinite().all()
    unit_B3HW = rgb_B3HW / 255
    luma_B1HW = (unit_B3HW * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(
        dim=1, keepdim=True
    )
    expected = ((unit_B3HW if in_channels == 3 else luma_B1HW) - 0.5) / 0.25
    torch.testing.assert_close(encoder.normalize(rgb_B3HW), expected)
