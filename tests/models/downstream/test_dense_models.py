"""A detector and a segmenter on a frozen encoder: geometry there and back, targets written out, what is trained."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import medvl
from medvl.data.annotations.mask_rle import encode_runs
from medvl.data.loading.dense_targets import (
    DenseBatch,
    DenseTargets,
    annotated_labels,
    boxes_of,
    is_annotated,
    mask_at,
    mask_of,
)
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import create_image_encoder
from medvl.errors import ConfigError, CorpusError
from medvl.models import Detector, DetectorConfig, Segmenter, create_dense, load, save
from medvl.models.downstream.dense_base import PRIOR
from medvl.models.downstream.detector import suppress
from medvl.schema import Sample

LABELS = ("Mass", "Opacity")
SIZE = 64
SQUASH = EvalTransform(size=SIZE, fit="squash")
FITS: tuple[Any, ...] = ("crop", "pad", "squash")


def sample_of(extra: dict[str, Any], height: int = 120, width: int = 200) -> Sample:
    sized = {**extra, "image_height": height, "image_width": width}
    return Sample(key="k", corpus="c", split="test", patient="p", study="s", extra=sized)


def box(label: str, x: float, y: float, width: float, height: float) -> dict[str, Any]:
    return {"label": label, "x": x, "y": y, "width": width, "height": height}


def detector(transform: EvalTransform = SQUASH, encoder: str = "resnet_tiny", **settings: Any) -> Detector:
    torch.manual_seed(0)
    image_encoder = create_image_encoder(encoder, image_size=transform.size)
    return Detector.on(image_encoder, LABELS, transform, width=16, **settings)


def segmenter(transform: EvalTransform = SQUASH, encoder: str = "resnet_tiny") -> Segmenter:
    torch.manual_seed(0)
    return Segmenter.on(create_image_encoder(encoder, image_size=transform.size), LABELS, transform, width=16)


def batch_of(model: Detector | Segmenter, samples: list[Sample]) -> DenseBatch:
    kind: Any = "boxes" if isinstance(model, Detector) else "masks"
    marker = DenseTargets(kind, LABELS, model.transform, model.grid)
    fields: dict[str, Any] = {}
    if kind == "boxes":
        found = [marker.boxes(sample) for sample in samples]
        fields["boxes_BN5"] = torch.full((len(samples), max(map(len, found)), 5), torch.nan)
        for row, boxes_N5 in zip(fields["boxes_BN5"], found, strict=True):
            row[: len(boxes_N5)] = torch.from_numpy(boxes_N5)
    else:
        fields["masks_BLhw"] = torch.from_numpy(np.stack([marker.masks(sample) for sample in samples]))
    count = len(samples)
    return DenseBatch(
        keys=[str(number) for number in range(count)],
        image_BCHW=torch.randint(0, 256, (count, 1, SIZE, SIZE), dtype=torch.uint8),
        ids_BT=torch.zeros(count, 0, dtype=torch.int64),
        mask_BT=torch.zeros(count, 0, dtype=torch.bool),
        labels_BL=torch.zeros(count, 0),
        texts=[""] * count,
        **fields,
    )


# Boxes and masks of a sample


def test_labels_boxes_and_masks_of_a_sample() -> None:
    runs = np.zeros((120, 200), bool)
    runs[30:60, 50:80] = True
    boxed = sample_of({"boxes": [box("Mass", 10, 20, 30, 40), box("Other", 0, 0, 5, 5)]})
    masked = sample_of({"masks": [{"label": "Mass", "runs": encode_runs(runs)}], "boxes": []})
    assert annotated_labels([boxed, masked], "boxes") == ("Mass", "Other")
    assert annotated_labels([masked], "masks") == ("Mass",)
    np.testing.assert_array_equal(boxes_of(boxed, LABELS, (60, 100)), [[5, 10, 20, 30, 0]])
    np.testing.assert_array_equal(mask_of(masked, "Mass"), runs)
    assert not mask_of(masked, "Opacity").any()
    assert mask_of(boxed, "Mass").sum() == 30 * 40  # where there are no masks, boxes are
    np.testing.assert_array_equal(mask_at(masked, "Mass", (60, 100)), runs[::2, ::2])
    looked_at = [is_annotated(sample_of(extra), kind) for extra in ({"masks": []}, {}) for kind in ("boxes", "masks")]
    assert looked_at == [False, True, False, False]
    assert is_annotated(sample_of({"boxes": []}), "masks")
    for broken in ({"boxes": [{"label": "Mass", "x": 1}]}, {"boxes": "none"}, {"boxes": [{"x": 1}]}):
        with pytest.raises(CorpusError, match="sample k: malformed boxes"):
            boxes_of(sample_of(broken), LABELS, (60, 100))


@pytest.mark.parametrize("fit", FITS)
def test_a_box_goes_to_the_models_pixels_and_back(fit: Any) -> None:
    """What the detector says in its input's pixels comes out in those of the image."""
    model = detector(EvalTransform(size=SIZE, fit=fit)).eval()
    sample = sample_of({"boxes": [box("Opacity", 80, 30, 40, 60)]})
    (edges,) = DenseTargets("boxes", LABELS, model.transform, model.grid).boxes(sample)
    assert edges[4] == 1

    def cells(image_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.full((1, 3, 2), -9.0)
        logits[0, 1, 1] = 2.0
        return logits, torch.from_numpy(edges[:4]).expand(1, 3, 4)

    model.cells = cells  # type: Any
    (found_LK5,) = model.detect(torch.zeros(1, 1, SIZE, SIZE, dtype=torch.uint8), [(120, 200)])
    best = found_LK5[1, 0]
    torch.testing.assert_close(best[:4], torch.tensor([80.0, 30, 120, 90]), atol=1e-3, rtol=0)
    assert best[4] == pytest.approx(torch.tensor(2.0).sigmoid())


def test_boxes_are_cut_where_the_image_was() -> None:
    crop = DenseTargets("boxes", LABELS, EvalTransform(size=SIZE, fit="crop"), (4, 4))  # columns 40 to 160 of 200
    assert len(crop.boxes(sample_of({"boxes": [box("Mass", 0, 0, 30, 30)]}))) == 0
    (edges,) = crop.boxes(sample_of({"boxes": [box("Mass", 20, 0, 60, 60)]}))
    np.testing.assert_allclose(edges[:4], [0, 0, 40 * SIZE / 120, 60 * SIZE / 120], atol=0.5)


@pytest.mark.parametrize("fit", FITS)
def test_a_mask_goes_to_the_models_grid_as_the_image_does(fit: Any) -> None:
    """The mask drawn as an image and taken through the transform, averaged over cells."""
    runs = np.zeros((120, 200), bool)
    runs[31:77, 63:140] = True
    transform = EvalTransform(size=SIZE, fit=fit)
    found = DenseTargets("masks", LABELS, transform, (16, 16)).masks(
        sample_of({"masks": [{"label": "Mass", "runs": encode_runs(runs)}]})
    )
    drawn = transform.build()((runs * 255).astype(np.uint8), np.random.default_rng(0)).image_HWC[:, :, 0]
    np.testing.assert_allclose(found[0], drawn.reshape(16, 4, 16, 4).mean(axis=(1, 3)), atol=1)
    assert found[0].max() == 255
    assert not found[1].any()


@pytest.mark.parametrize("fit", FITS)
def test_a_map_lies_over_the_image_where_the_mask_does(fit: Any) -> None:
    """The true mask given as the model's answer comes back as the true mask, but for its edge and what was cut off."""
    model = segmenter(EvalTransform(size=SIZE, fit=fit)).eval()
    runs = np.zeros((120, 200), bool)
    runs[30:78, 60:140] = True
    sample = sample_of({"masks": [{"label": "Mass", "runs": encode_runs(runs)}]})
    share_Lhw = torch.from_numpy(DenseTargets("masks", LABELS, model.transform, model.grid).masks(sample)) / 255
    model.mask_logits = lambda image_BCHW: torch.logit(share_Lhw.clamp(1e-4, 1 - 1e-4))[None]  # type: Any
    (map_LHW,) = model.maps(torch.zeros(1, 1, SIZE, SIZE, dtype=torch.uint8), [(120, 200)])
    marked = (map_LHW[0].nan_to_num(0) >= 0.5).numpy()
    assert (marked & runs).sum() / (marked | runs).sum() > 0.75  # cells of 4 pixels
    assert bool(map_LHW.isnan().any()) == (fit == "crop")


# What cells learn


def test_targets_are_those_of_their_definition() -> None:
    model = detector(inner_share=0.5)
    boxes_BN5 = torch.tensor(
        [
            [[4.0, 4, 44, 36, 0], [8, 8, 30, 30, 1], [50, 50, 51, 51, 1]],
            [[0, 0, 64, 64, 1], [torch.nan] * 5, [torch.nan] * 5],
        ]
    )
    found = model.targets(boxes_BN5)
    rows, columns = model.grid
    cell = SIZE / rows
    for b in range(2):
        for p in range(rows * columns):
            x, y = (p % columns + 0.5) * cell, (p // columns + 0.5) * cell
            matches = []
            for x0, y0, x1, y1, label in boxes_BN5[b].tolist():
                reach_x, reach_y = max(0.5 * (x1 - x0), cell) / 2, max(0.5 * (y1 - y0), cell) / 2
                if abs(x - (x0 + x1) / 2) <= reach_x and abs(y - (y0 + y1) / 2) <= reach_y:
                    matches.append(((x1 - x0) * (y1 - y0), [x0, y0, x1, y1], int(label)))
            assert bool(found.inner_BP[b, p]) == bool(matches)
            assert found.label_BPL[b, p].tolist() == [float(any(m[2] == n for m in matches)) for n in range(2)]
            if matches:
                assert found.box_BP4[b, p].tolist() == min(matches)[1]
    assert found.label_BPL[0].sum() > 2
    nothing = model.targets(torch.zeros(2, 0, 5))
    assert not nothing.inner_BP.any()
    assert nothing.box_BP4.shape == found.box_BP4.shape


def test_every_box_has_a_cell_however_small() -> None:
    model = detector()
    torch.manual_seed(1)
    corner = torch.rand(200, 1, 2) * 60
    boxes_BN5 = torch.cat([corner, corner + 0.5, torch.zeros(200, 1, 1)], dim=2)
    assert model.targets(boxes_BN5).inner_BP.any(dim=1).all()


def test_suppression_is_the_greedy_one() -> None:
    torch.manual_seed(2)
    corner = torch.rand(3, 40, 2) * 20
    boxes = torch.cat([corner, corner + 4 + torch.rand(3, 40, 2) * 10], dim=2)
    scores = torch.rand(3, 40)
    found = suppress(boxes, scores, overlap=0.3, keep=50)
    for b in range(3):
        kept: list[int] = []
        for index in scores[b].argsort(descending=True).tolist():
            overlaps = [float(_iou(boxes[b, index], boxes[b, other])) for other in kept]
            if max(overlaps, default=0) <= 0.3:
                kept.append(index)
        assert found[b, : len(kept), 4].tolist() == scores[b, kept].tolist()
        assert (found[b, len(kept) :, 4] == -torch.inf).all()
    assert suppress(boxes, scores, overlap=0.3, keep=4).shape == (3, 4, 5)


def _iou(a: Tensor, b: Tensor) -> Tensor:
    shared = (torch.minimum(a[2:], b[2:]) - torch.maximum(a[:2], b[:2])).clamp(min=0).prod()
    return shared / ((a[2:] - a[:2]).prod() + (b[2:] - b[:2]).prod() - shared)


@pytest.mark.parametrize("encoder", ["resnet_tiny", "timm:vit_tiny_patch16_224"])
@pytest.mark.parametrize("make", [detector, segmenter])
def test_the_decoder_alone_learns_on_grids_of_every_kind(make: Any, encoder: str) -> None:
    model = make(encoder=encoder).train()
    runs = np.zeros((120, 200), bool)
    runs[30:78, 60:140] = True
    extra = {"boxes": [box("Mass", 60, 30, 80, 48)], "masks": [{"label": "Mass", "runs": encode_runs(runs)}]}
    batch = batch_of(model, [sample_of(extra), sample_of({"boxes": [], "masks": []})])
    before = {name: tensor.clone() for name, tensor in model.image_encoder.state_dict().items()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=1e-2)
    values = []
    for _ in range(30):
        losses = model(batch.to("cpu"))
        optimizer.zero_grad()
        losses.total.backward()
        assert all(parameter.grad is not None for parameter in trained)
        optimizer.step()
        values.append(losses.total.item())
    assert values[-1] < 0.7 * values[0]
    assert not model.image_encoder.training
    for name, tensor in model.image_encoder.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)  # weights and the statistics of batch norms


@pytest.mark.parametrize("make", [detector, segmenter])
def test_it_begins_near_the_prior(make: Any) -> None:
    model = make().eval()
    image = torch.randint(0, 256, (2, 1, SIZE, SIZE), dtype=torch.uint8)
    logits = model.cells(image)[0] if isinstance(model, Detector) else model.mask_logits(image)
    assert logits.detach().sigmoid().mean() == pytest.approx(PRIOR, rel=0.3)


def test_a_batch_keeps_its_marks_wherever_it_goes() -> None:
    model = segmenter()
    batch = batch_of(model, [sample_of({"boxes": [box("Mass", 60, 30, 80, 48)]})])
    moved = dataclasses.replace(batch.to("meta"), texts=["x"])
    assert isinstance(moved, DenseBatch)
    assert moved.masks_BLhw is not None
    assert moved.masks_BLhw.device.type == moved.image_BCHW.device.type == "meta"
    assert moved.boxes_BN5 is None


# As systems


@pytest.mark.parametrize("make", [detector, segmenter])
def test_it_is_saved_and_loaded_whole(make: Any, tmp_path: Path) -> None:
    model = make().eval()
    save(model, tmp_path)
    again = load(tmp_path)
    assert type(again) is type(model)
    assert again.config == dataclasses.replace(model.config, encoder=again.config.encoder)
    encoders = [json.dumps(one.config.encoder, sort_keys=True) for one in (again, model)]
    assert encoders[0] == encoders[1]
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, rtol=0, atol=0)
    assert not any(parameter.requires_grad for parameter in again.image_encoder.parameters())


def test_it_starts_on_the_encoder_of_any_system_at_any_size_and_grid(tmp_path: Path) -> None:
    settings = {"image_encoder": "resnet_tiny", "text_encoder": "tiny_bert", "image_size": 64, "vocab_size": 50}
    convirt = medvl.create_model("convirt", projection_dim=8, frozen_text_layers=0, **settings).eval()
    save(convirt, tmp_path)
    plain = create_dense(Segmenter, tmp_path, LABELS, width=16)
    finer = create_dense(Detector, tmp_path, LABELS, width=16, size=128, patch_level=-2)
    for name, tensor in convirt.image_encoder.state_dict().items():
        for model in (plain, finer):
            torch.testing.assert_close(model.image_encoder.state_dict()[name], tensor, rtol=0, atol=0)
    assert plain.transform == convirt.transform
    assert finer.transform == dataclasses.replace(convirt.transform, size=128)
    assert finer.grid == tuple(4 * side for side in plain.grid)
    assert finer.decoder.enter[1].in_features < plain.decoder.enter[1].in_features
    again = tmp_path / "again"
    again.mkdir()
    save(finer, again)
    torch.testing.assert_close(load(again).state_dict(), finer.state_dict())


def test_learnt_positions_take_no_other_size(tmp_path: Path) -> None:
    save(segmenter(encoder="timm:vit_tiny_patch16_224"), tmp_path)
    with pytest.raises(ConfigError, match=".* has learnt positions for .* pixels: leave size unset"):
        create_dense(Detector, tmp_path, LABELS, size=128)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"labels": ()}, "labels must be one or more"),
        ({"width": 12}, "width must be a multiple of 8"),
        ({"doublings": 6}, "doublings must be between 0 and 5"),
        ({"encoder": {}}, "encoder must name the image encoder"),
        ({"inner_share": 0.0}, "inner_share must be above 0"),
        ({"nms_iou_threshold": 1.5}, "nms_iou_threshold must be above 0"),
        ({"max_boxes": 0}, "max_boxes must be 1 or more"),
    ],
)
def test_settings_that_make_no_sense_are_named(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        DetectorConfig(**{"encoder": {"name": "resnet_tiny"}, "labels": LABELS, **settings})


def test_they_are_made_by_name_like_every_system() -> None:
    for name, cls in (("detector", Detector), ("segmenter", Segmenter)):
        assert isinstance(
            medvl.create_model(name, encoder={"name": "resnet_tiny", "image_size": 32}, labels=LABELS), cls
        )
