"""Training from phrases with boxes: losses of maps against the formula, the terms of four systems,
and boxes that move with the augmented image.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import gloria_ranks
from helpers.errors import raises

import medvl
from medvl import losses
from medvl.data import ConVIRTAugmentation, WholeText
from medvl.data.loading.collate import Collate
from medvl.data.loading.items import MOST_PHRASES, PHRASE_CELLS, ItemMaker
from medvl.data.loading.loader import open_loader
from medvl.data.loading.readers import RegionReader
from medvl.data.shards.regions import Regions
from medvl.data.transforms.image import EvalTransform
from medvl.errors import ConfigError
from medvl.models import GLoRIAConfig
from medvl.schema import Batch, Inputs, Sample

TOKENIZER = gloria_ranks.tiny_tokenizer()
PHRASES = [["left pneumothorax", "Edema"], [], ["a large effusion"], ["Edema"]]
"""Of four images; the second phrase of the first one has no box."""


# Losses of maps


@pytest.mark.parametrize("kind", ["divergence", "entropy"])
def test_losses_of_maps_are_their_formulas(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits_NP = torch.randn(3, 5, generator=generator, requires_grad=True)
    cover_NP = torch.tensor([[1.0, 0.5, 0, 0, 0], [0] * 5, [0, 0, 1, 1, 1]])
    expected = []
    for logits_P, cover_P in zip(logits_NP, cover_NP, strict=True):
        if kind == "entropy":
            p = logits_P.sigmoid()
            terms = [
                -(float(c) * p[i].log() + (1 - float(c)) * (1 - p[i]).log())
                for i, c in enumerate(cover_P)
            ]
            expected.append(torch.stack(terms).mean())
        else:
            share = cover_P / cover_P.sum() if cover_P.any() else torch.full((5,), 0.2)
            attention = logits_P.softmax(0)
            terms = [t * (t / attention[i]).log() for i, t in enumerate(share) if t > 0]
            expected.append(torch.stack(terms).sum())
    wanted = torch.stack(expected)
    actual = (
        losses.place_entropy(logits_NP, cover_NP)
        if kind == "entropy"
        else losses.place_divergence(logits_NP.softmax(1), cover_NP)
    )
    torch.testing.assert_close(actual, wanted)
    gradients = [
        torch.autograd.grad(each.sum(), logits_NP, retain_graph=True)[0]
        for each in (actual, wanted)
    ]
    torch.testing.assert_close(*gradients)
    with pytest.raises(ValueError, match="two of"):
        losses.place_entropy(logits_NP, cover_NP[:2])


def test_divergence_is_zero_at_its_target_and_finite_without_attention() -> None:
    cover_NP = torch.tensor([[1.0, 1, 0, 0], [0, 0, 0, 0]])
    target_NP = torch.tensor([[0.5, 0.5, 0, 0], [0.25] * 4])
    torch.testing.assert_close(losses.place_divergence(target_NP, cover_NP), torch.zeros(2))
    nothing = torch.zeros(2, 4, requires_grad=True)
    losses.place_divergence(nothing, cover_NP).sum().backward()
    assert nothing.grad is not None
    assert nothing.grad.isfinite().all()


# The terms of systems


def create(name: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"image_encoder": "resnet_tiny", "image_size": 64}
    sizes |= {"text_encoder": "tiny_bert", "text_arguments": {"num_hidden_layers": 1}}
    if name == "gloria":
        return gloria_ranks.tiny_model(TOKENIZER, **settings)
    if name == "radzero":
        sizes |= {"frozen_image": False}
    else:
        sizes |= {"image_arguments": {}, "projection_dim": 16, "entities": ("Edema", "Mass")}
        sizes |= {"decoder_layers": 2, "decoder_heads": 2, "decoder_hidden": 24}
    return medvl.create_model(name, tokenizer=TOKENIZER, **sizes, **settings)


def boxed_batch(**fields: Any) -> Batch:
    batch = gloria_ranks.make_batch(TOKENIZER, [0, 1, 2, 3])
    cover = torch.zeros(4, 2, PHRASE_CELLS, PHRASE_CELLS, dtype=torch.uint8)
    cover[0, 0, :16, 8:20] = 255
    cover[2, 0, 20:, :8] = 255
    cover[3, 0, :, 16:] = 255
    batch = dataclasses.replace(
        batch,
        phrases=PHRASES,
        phrase_cover_BSHW=cover,
        labels_BL=torch.tensor([[1.0, 0], [0, 1], [1, 1], [0, 0]]),
        position_BL=torch.tensor([[3, -1], [-1, 8], [2, 1], [-1, -1]]),
        statement_ids_BST=batch.ids_BT[:, None],
        statement_mask_BST=batch.mask_BT[:, None],
    )
    return dataclasses.replace(batch, **fields)


@pytest.mark.parametrize("name", ["gloria", "radzero", "medklip", "mavl"])
def test_term_is_the_loss_of_each_phrases_heat_map(name: str) -> None:
    model = create(name, box_weight=0.5).eval()
    without = create(name).eval()
    assert model.inputs == dataclasses.replace(without.inputs, boxed_phrases=True)
    batch = boxed_batch()
    torch.manual_seed(1)
    result = model(batch)
    rows = [0, 0, 2, 3]
    texts = [text for phrases in PHRASES for text in phrases]
    maps_NP = model.cell_maps(batch.image_BCHW[rows], texts)
    grid = model.image_encoder.grid(64, 64)
    assert batch.phrase_cover_BSHW is not None
    cover_NHW = batch.phrase_cover_BSHW[rows, [0, 1, 0, 0]].float() / 255
    cells_NP = F.adaptive_avg_pool2d(cover_NHW[:, None], grid).flatten(1)
    loss = losses.place_entropy if name == "radzero" else losses.place_divergence
    expected = loss(maps_NP, cells_NP).mean()
    torch.testing.assert_close(result.terms["boxes"], expected, rtol=1e-4, atol=1e-5)
    torch.manual_seed(1)
    torch.testing.assert_close(result.total, without(batch).total + 0.5 * expected)
    parameters = [each for each in model.parameters() if each.requires_grad]
    gradients = [
        torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
        for value in (result.terms["boxes"], expected)
    ]
    pairs = list(zip(*gradients, strict=True))
    assert sum(one is not None and bool(one.any()) for one, _ in pairs) > 5
    for one, other in pairs:
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["gloria", "radzero", "medklip"])
def test_batches_without_phrases_have_a_term_of_zero(name: str) -> None:
    model = create(name, box_weight=1.0).train()
    result = model(boxed_batch(phrases=[[], [], [], []]))
    assert result.terms["boxes"].item() == 0
    result.total.backward()
    with raises(ConfigError, "missing", "phrases"):
        model(boxed_batch(phrases=None))


def test_wrong_weights_are_refused() -> None:
    with raises(ConfigError, "out_of_range", "box_weight"):
        GLoRIAConfig(box_weight=-1.0)


# Boxes of augmented images


def sample(phrases: list[dict[str, Any]]) -> Sample:
    extra = {"phrases": phrases, "image_height": 240, "image_width": 160}
    parts: dict[str, Any] = {"corpus": "c", "split": "s", "patient": "p", "study": "s"}
    return Sample(key="k", sections={"impression": "Left mass."}, extra=extra, **parts)


BOX = {"label": "Mass", "x": 96, "y": 100, "width": 40, "height": 60}


@pytest.mark.parametrize("channels", [1, 3])
def test_boxes_move_with_the_augmented_image(channels: int) -> None:
    """The image shows the box itself, so that the augmented image is its own truth."""
    pixels = np.full((120, 80, channels), 40, np.uint8)
    pixels[50:80, 48:68] = 220
    pixels = pixels[:, :, 0] if channels == 1 else pixels
    phrases = [
        {"label": "Mass", "text": "left mass", "boxes": [BOX]},
        {"label": "Edema", "text": "edema", "boxes": []},
    ]
    maker = ItemMaker(
        ConVIRTAugmentation(size=64, flip="swap_text", blur_sigma=(0.1, 0.5)),
        WholeText(sections=("impression",)),
        (),
        0,
        Inputs(boxed_phrases=True),
    )
    sides = set()
    for epoch in range(8):
        item = maker(sample(phrases), pixels, epoch)
        boxed, bare = item.phrases
        assert not bare.cover_HW.any()
        sides.add(boxed.text)
        grey_HW = item.image_HWC[:, :, 0].astype(float)
        shown_HW = grey_HW > (grey_HW.max() + np.median(grey_HW)) / 2
        shown = shown_HW.reshape(PHRASE_CELLS, 2, PHRASE_CELLS, 2).mean(axis=(1, 3))
        cover = boxed.cover_HW / 255
        assert np.minimum(shown, cover).sum() / np.maximum(shown, cover).sum() > 0.75
    assert sides == {"left mass", "right mass"}


def test_hidden_boxes_are_left_out_and_many_phrases_are_drawn() -> None:
    pixels = np.zeros((120, 80), np.uint8)
    below = BOX | {"y": 225, "height": 10}  # outside of the centre square
    phrases = [
        {"label": "Mass", "text": "hidden", "boxes": [below]},
        {"label": "Mass", "text": "seen", "boxes": [below, BOX]},
    ]
    inputs = Inputs(boxed_phrases=True)
    maker = ItemMaker(EvalTransform(size=64), WholeText(), (), 0, inputs)
    items = [maker(sample(phrases), pixels, 0)]
    assert [each.text for each in items[0].phrases] == ["seen"]
    many = [{"label": "Mass", "text": str(number), "boxes": [BOX]} for number in range(9)]
    items.append(maker(sample(many), pixels, 0))
    drawn = {tuple(each.text for each in maker(sample(many), pixels, n).phrases) for n in range(5)}
    assert len(drawn) > 1
    assert {len(each) for each in drawn} == {MOST_PHRASES}
    batch, _ = Collate(TOKENIZER, inputs)(items)
    assert batch is not None
    assert batch.phrases is not None
    assert [len(each) for each in batch.phrases] == [1, MOST_PHRASES]
    assert batch.phrase_cover_BSHW is not None
    assert batch.phrase_cover_BSHW.shape == (2, MOST_PHRASES, PHRASE_CELLS, PHRASE_CELLS)
    assert batch.rows([1]).phrases == batch.phrases[1:]
    with raises(ConfigError, "conflict", "image.on_device"):
        ItemMaker(ConVIRTAugmentation(size=64, on_device=True), WholeText(), (), 0, inputs)


@pytest.mark.parametrize("fit", ["crop", "pad", "squash"])
def test_stored_features_have_the_boxes_of_their_image(fit: Any) -> None:
    phrases = [
        {"label": "Mass", "text": "left mass", "boxes": [BOX]},
        {"label": "Edema", "text": "edema", "boxes": []},
    ]
    inputs = Inputs(boxed_phrases=True, regions=True)
    maker = ItemMaker(EvalTransform(size=64, fit=fit), WholeText(), (), 0, inputs)
    found = sample(phrases)
    expected = maker(found, np.zeros((120, 80), np.uint8), 0).phrases
    reader = RegionReader(None, maker)
    stored = [Regions(np.zeros((3, 2), np.float32), np.zeros((3, 4), np.float32))]
    actual = maker.row(found, reader.views(0, "k", found, stored), 0).phrases
    assert [each.text for each in actual] == [each.text for each in expected]
    for one, other in zip(actual, expected, strict=True):
        # edges between pixels of 64 may be rounded differently
        difference_HW = np.abs(one.cover_HW.astype(int) - other.cover_HW.astype(int))
        assert difference_HW.sum() <= 0.02 * other.cover_HW.sum()
    assert expected[0].cover_HW.any()
    assert not reader.views(0, "k", found, []).phrases  # a sample without an image


@pytest.mark.parametrize("boxed", [True, False])
def test_training_needs_a_sample_with_boxes(boxed: bool) -> None:
    phrases = [{"label": "Mass", "text": "left mass", "boxes": [BOX]}]
    bare = dataclasses.replace(sample(phrases), extra={})
    samples = [bare, sample(phrases) if boxed else bare]
    source: Any = Samples(samples)
    options: dict[str, Any] = {"image": EvalTransform(size=64), "text": WholeText()}
    options |= {"tokenizer": TOKENIZER, "batch": 2, "inputs": Inputs(boxed_phrases=True)}
    open_loader(source, train=False, **options)
    if boxed:
        open_loader(source, train=True, **options)
    else:
        with raises(ConfigError, "missing", "box_weight"):
            open_loader(source, train=True, **options)


class Samples:
    """Source of samples that are not read."""

    label_names, fingerprint = (), "samples"

    def __init__(self, samples: list[Sample]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def sample(self, position: int) -> Sample:
        return self._samples[position]
