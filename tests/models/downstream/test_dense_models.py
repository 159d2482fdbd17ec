"""Detector and segmenter: geometry, targets, training with a frozen or trainable encoder,
checkpoints.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.contrastive_systems import gloria
from helpers.errors import raises
from helpers.learning import fit
from torch import Tensor

import medvl
from medvl.data.annotations import encode_runs
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
from medvl.models.downstream.dense import PRIOR
from medvl.models.downstream.detector import non_maximum_suppression
from medvl.schema import Batch, ImageFeatures, Sample

LABELS = ("Mass", "Opacity")
SIZE = 64
SQUASH = EvalTransform(size=SIZE, fit="squash")
FITS: tuple[Any, ...] = ("crop", "pad", "squash")


def sample_of(extra: dict[str, Any], height: int = 120, width: int = 200) -> Sample:
    sized = {**extra, "image_height": height, "image_width": width}
    return Sample(key="k", corpus="c", split="test", patient="p", study="s", extra=sized)


def box(label: str, x: float, y: float, width: float, height: float) -> dict[str, Any]:
    return {"label": label, "x": x, "y": y, "width": width, "height": height}


def detector(
    transform: EvalTransform = SQUASH, encoder: str = "resnet_tiny", **settings: Any
) -> Detector:
    torch.manual_seed(0)
    image_encoder = create_image_encoder(encoder, image_size=transform.size)
    return Detector.on(image_encoder, LABELS, transform, width=16, **settings)


def segmenter(
    transform: EvalTransform = SQUASH, encoder: str = "resnet_tiny", **settings: Any
) -> Segmenter:
    torch.manual_seed(0)
    image_encoder = create_image_encoder(encoder, image_size=transform.size)
    return Segmenter.on(image_encoder, LABELS, transform, width=16, **settings)


def batch_of(model: Detector | Segmenter, samples: list[Sample]) -> DenseBatch:
    kind: Any = "boxes" if isinstance(model, Detector) else "masks"
    targets = DenseTargets(kind, LABELS, model.transform, model.grid)
    fields: dict[str, Any] = {}
    if kind == "boxes":
        boxes = [targets.boxes(sample) for sample in samples]
        fields["boxes_BN5"] = torch.full((len(samples), max(map(len, boxes)), 5), torch.nan)
        for row, boxes_N5 in zip(fields["boxes_BN5"], boxes, strict=True):
            row[: len(boxes_N5)] = torch.from_numpy(boxes_N5)
    else:
        fields["masks_BLhw"] = torch.from_numpy(
            np.stack([targets.masks(sample) for sample in samples])
        )
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
    assert mask_of(boxed, "Mass").sum() == 30 * 40  # boxes serve as masks if there are none
    np.testing.assert_array_equal(mask_at(masked, "Mass", (60, 100)), runs[::2, ::2])
    annotated = [
        is_annotated(sample_of(extra), kind)
        for extra in ({"masks": []}, {})
        for kind in ("boxes", "masks")
    ]
    assert annotated == [False, True, False, False]
    assert is_annotated(sample_of({"boxes": []}), "masks")
    for broken in (
        {"boxes": [{"label": "Mass", "x": 1}]},
        {"boxes": "none"},
        {"boxes": [{"x": 1}]},
    ):
        with pytest.raises(CorpusError, match="sample k"):
            boxes_of(sample_of(broken), LABELS, (60, 100))


@pytest.mark.parametrize("fit", FITS)
def test_boxes_survive_the_transform_and_its_inverse(fit: Any) -> None:
    """Boxes in pixels of the input come out in pixels of the original image."""
    model = detector(EvalTransform(size=SIZE, fit=fit)).eval()
    sample = sample_of({"boxes": [box("Opacity", 80, 30, 40, 60)]})
    (edges,) = DenseTargets("boxes", LABELS, model.transform, model.grid).boxes(sample)
    assert edges[4] == 1

    def cells(batch: Any) -> tuple[Tensor, Tensor]:
        logits = torch.full((1, 3, 2), -9.0)
        logits[0, 1, 1] = 2.0
        return logits, torch.from_numpy(edges[:4]).expand(1, 3, 4)

    model.cells = cells  # type: Any
    (boxes_LK5,) = model.detect(batch_of(model, [sample]), [(120, 200)])
    best = boxes_LK5[1, 0]
    torch.testing.assert_close(best[:4], torch.tensor([80.0, 30, 120, 90]), atol=1e-3, rtol=0)
    assert best[4] == pytest.approx(torch.tensor(2.0).sigmoid())


@pytest.mark.parametrize("fit", FITS)
def test_detected_boxes_lie_in_the_image(fit: Any) -> None:
    """Predictions reach beyond the image, into the border of a padded one."""
    model = detector(EvalTransform(size=SIZE, fit=fit)).eval()
    boxes_14 = torch.tensor([[-9.0, -9, 80, 80], [-9, -9, -1, 5]])

    def cells(batch: Any) -> tuple[Tensor, Tensor]:
        return torch.full((1, 2, 2), 2.0), boxes_14[None]

    model.cells = cells  # type: Any
    (boxes_LK5,) = model.detect(batch_of(model, [sample_of({"boxes": []})]), [(120, 200)])
    shown = [40.0, 0, 160, 120] if fit == "crop" else [0.0, 0, 200, 120]
    torch.testing.assert_close(
        boxes_LK5[0, 0, :4], torch.tensor(shown), atol=1.5, rtol=0
    )  # crops end at whole pixels
    assert boxes_LK5[:, 1, 4].tolist() == [-torch.inf, -torch.inf]


def test_boxes_are_cropped_with_the_image() -> None:
    crop = DenseTargets(
        "boxes", LABELS, EvalTransform(size=SIZE, fit="crop"), (4, 4)
    )  # columns 40 to 160 of 200
    assert len(crop.boxes(sample_of({"boxes": [box("Mass", 0, 0, 30, 30)]}))) == 0
    (edges,) = crop.boxes(sample_of({"boxes": [box("Mass", 20, 0, 60, 60)]}))
    np.testing.assert_allclose(edges[:4], [0, 0, 40 * SIZE / 120, 60 * SIZE / 120], atol=0.5)


@pytest.mark.parametrize("fit", FITS)
def test_masks_are_transformed_like_images(fit: Any) -> None:
    """A mask equals its picture after the transform, averaged over cells."""
    runs = np.zeros((120, 200), bool)
    runs[31:77, 63:140] = True
    transform = EvalTransform(size=SIZE, fit=fit)
    masks = DenseTargets("masks", LABELS, transform, (16, 16)).masks(
        sample_of({"masks": [{"label": "Mass", "runs": encode_runs(runs)}]})
    )
    picture = transform.build()((runs * 255).astype(np.uint8), np.random.default_rng(0)).image_HWC[
        :, :, 0
    ]
    np.testing.assert_allclose(masks[0], picture.reshape(16, 4, 16, 4).mean(axis=(1, 3)), atol=1)
    assert masks[0].max() == 255
    assert not masks[1].any()


@pytest.mark.parametrize("fit", FITS)
def test_maps_align_with_the_original_image(fit: Any) -> None:
    """A model that predicts the true mask gives the true mask, except for its edge and cropped
    parts.
    """
    model = segmenter(EvalTransform(size=SIZE, fit=fit)).eval()
    runs = np.zeros((120, 200), bool)
    runs[30:78, 60:140] = True
    sample = sample_of({"masks": [{"label": "Mass", "runs": encode_runs(runs)}]})
    share_Lhw = (
        torch.from_numpy(DenseTargets("masks", LABELS, model.transform, model.grid).masks(sample))
        / 255
    )
    model.mask_logits = lambda batch: torch.logit(share_Lhw.clamp(1e-4, 1 - 1e-4))[None]  # type: Any
    (map_LHW,) = model.maps(batch_of(model, [sample]), [(120, 200)])
    predicted = (map_LHW[0].nan_to_num(0) >= 0.5).numpy()
    assert (predicted & runs).sum() / (predicted | runs).sum() > 0.75  # cells of 4 pixels
    assert bool(map_LHW.isnan().any()) == (fit == "crop")


# Targets and training


def test_targets_equal_their_definition() -> None:
    model = detector(inner_share=0.5)
    boxes_BN5 = torch.tensor(
        [
            [[4.0, 4, 44, 36, 0], [8, 8, 30, 30, 1], [50, 50, 51, 51, 1]],
            [[0, 0, 64, 64, 1], [torch.nan] * 5, [torch.nan] * 5],
        ]
    )
    targets = model.targets(boxes_BN5)
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
            assert bool(targets.inner_BP[b, p]) == bool(matches)
            assert targets.label_BPL[b, p].tolist() == [
                float(any(m[2] == n for m in matches)) for n in range(2)
            ]
            if matches:
                assert targets.box_BP4[b, p].tolist() == min(matches)[1]
    assert targets.label_BPL[0].sum() > 2
    nothing = model.targets(torch.zeros(2, 0, 5))
    assert not nothing.inner_BP.any()
    assert nothing.box_BP4.shape == targets.box_BP4.shape


def test_every_small_box_has_a_cell() -> None:
    model = detector()
    torch.manual_seed(1)
    corner = torch.rand(200, 1, 2) * 60
    boxes_BN5 = torch.cat([corner, corner + 0.5, torch.zeros(200, 1, 1)], dim=2)
    assert model.targets(boxes_BN5).inner_BP.any(dim=1).all()


def test_non_maximum_suppression_equals_the_greedy_loop() -> None:
    torch.manual_seed(2)
    corner = torch.rand(3, 40, 2) * 20
    boxes = torch.cat([corner, corner + 4 + torch.rand(3, 40, 2) * 10], dim=2)
    scores = torch.rand(3, 40)
    result = non_maximum_suppression(boxes, scores, iou_threshold=0.3, max_boxes=50)
    for b in range(3):
        kept: list[int] = []
        for index in scores[b].argsort(descending=True).tolist():
            overlaps = [float(_iou(boxes[b, index], boxes[b, other])) for other in kept]
            if max(overlaps, default=0) <= 0.3:
                kept.append(index)
        assert result[b, : len(kept), 4].tolist() == scores[b, kept].tolist()
        assert (result[b, len(kept) :, 4] == -torch.inf).all()
    assert non_maximum_suppression(boxes, scores, iou_threshold=0.3, max_boxes=4).shape == (3, 4, 5)


def _iou(a: Tensor, b: Tensor) -> Tensor:
    shared = (torch.minimum(a[2:], b[2:]) - torch.maximum(a[:2], b[:2])).clamp(min=0).prod()
    return shared / ((a[2:] - a[:2]).prod() + (b[2:] - b[:2]).prod() - shared)


@pytest.mark.training
@pytest.mark.parametrize("encoder", ["resnet_tiny", "timm:vit_tiny_patch16_224"])
@pytest.mark.parametrize("make", [detector, segmenter])
def test_decoder_learns_on_a_frozen_encoder(make: Any, encoder: str) -> None:
    model = make(encoder=encoder).train()
    runs = np.zeros((120, 200), bool)
    runs[30:78, 60:140] = True
    extra = {
        "boxes": [box("Mass", 60, 30, 80, 48)],
        "masks": [{"label": "Mass", "runs": encode_runs(runs)}],
    }
    batch = batch_of(model, [sample_of(extra), sample_of({"boxes": [], "masks": []})])
    before = {name: tensor.clone() for name, tensor in model.image_encoder.state_dict().items()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=1e-2)
    seen = fit(model, batch.to("cpu"), optimizer, 30)
    assert all(parameter.grad is not None for parameter in trained)
    assert seen[-1]["total"] < 0.7 * seen[0]["total"]
    assert not model.image_encoder.training
    for name, tensor in model.image_encoder.state_dict().items():
        torch.testing.assert_close(
            tensor, before[name], rtol=0, atol=0
        )  # including batch-norm statistics


@pytest.mark.parametrize("make", [detector, segmenter])
def test_initial_probability_is_the_prior(make: Any) -> None:
    model = make().eval()
    batch = batch_of(model, [sample_of({"boxes": []})] * 2)
    logits = model.cells(batch)[0] if isinstance(model, Detector) else model.mask_logits(batch)
    assert logits.detach().sigmoid().mean() == pytest.approx(PRIOR, rel=0.3)


def test_batch_moves_its_targets() -> None:
    model = segmenter()
    batch = batch_of(model, [sample_of({"boxes": [box("Mass", 60, 30, 80, 48)]})])
    moved = dataclasses.replace(batch.to("meta"), texts=["x"])
    assert isinstance(moved, DenseBatch)
    assert moved.masks_BLhw is not None
    assert moved.masks_BLhw.device.type == moved.image_BCHW.device.type == "meta"
    assert moved.boxes_BN5 is None


@pytest.mark.parametrize("make", [detector, segmenter])
def test_trainable_encoder_learns_at_its_own_rate(make: Any) -> None:
    model = make(frozen_encoder=False, head_lr_mult=5.0).train()
    groups = model.parameter_groups(lr=1e-3, weight_decay=0.1)
    rates = {group["name"].split(":")[0]: group["lr"] for group in groups}
    assert rates["image_encoder"] == pytest.approx(1e-3)
    assert all(
        rate == pytest.approx(5e-3) for name, rate in rates.items() if name != "image_encoder"
    )
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    model(
        batch_of(model, [sample_of({"boxes": [box("Mass", 60, 30, 80, 48)]})] * 2)
    ).total.backward()
    assert model.image_encoder.training
    assert any(parameter.grad.abs().sum() > 0 for parameter in model.image_encoder.parameters())


def test_text_can_change_the_patches() -> None:
    """A system that reads text overrides `patch_features`."""

    class Guided(Segmenter):
        reads_text = True

        def patch_features(self, batch: Batch) -> ImageFeatures:
            features = super().patch_features(batch)
            assert features.patches_BPD is not None
            scale_B11 = batch.mask_BT.sum(dim=1).add(1)[:, None, None]
            return dataclasses.replace(
                features, patches_BPD=features.patches_BPD + scale_B11 * torch.randn(1)
            )

    torch.manual_seed(0)
    model = Guided.on(
        create_image_encoder("resnet_tiny", image_size=SIZE), LABELS, SQUASH, width=16
    ).eval()
    batch = batch_of(model, [sample_of({"boxes": []})])
    longer = dataclasses.replace(
        batch, ids_BT=torch.ones(1, 5, dtype=torch.int64), mask_BT=torch.ones(1, 5) > 0
    )
    maps = []
    for some in (batch, longer):
        torch.manual_seed(1)
        maps += model.maps(some, [(120, 200)])
    assert not torch.equal(maps[0], maps[1])


# Systems


@pytest.mark.parametrize("make", [detector, segmenter])
def test_loaded_checkpoint_equals_the_saved_model(make: Any, tmp_path: Path) -> None:
    model = make().eval()
    save(model, tmp_path)
    loaded = load(tmp_path)
    assert type(loaded) is type(model)
    assert loaded.config == dataclasses.replace(model.config, encoder=loaded.config.encoder)
    encoders = [json.dumps(one.config.encoder, sort_keys=True) for one in (loaded, model)]
    assert encoders[0] == encoders[1]
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, rtol=0, atol=0)
    assert not any(parameter.requires_grad for parameter in loaded.image_encoder.parameters())


def test_create_dense_uses_any_system_size_and_grid(tmp_path: Path) -> None:
    settings = {
        "image_encoder": "resnet_tiny",
        "text_encoder": "tiny_bert",
        "image_size": 64,
        "vocab_size": 50,
    }
    convirt = medvl.create_model(
        "convirt", projection_dim=8, frozen_text_layers=0, **settings
    ).eval()
    save(convirt, tmp_path)
    plain = create_dense(Segmenter, tmp_path, LABELS, width=16)
    finer = create_dense(Detector, tmp_path, LABELS, width=16, size=128, patch_level=-2)
    for name, tensor in convirt.image_encoder.state_dict().items():
        for model in (plain, finer):
            torch.testing.assert_close(
                model.image_encoder.state_dict()[name], tensor, rtol=0, atol=0
            )
    assert plain.transform == convirt.transform
    assert finer.transform == dataclasses.replace(convirt.transform, size=128)
    assert finer.grid == tuple(4 * side for side in plain.grid)
    assert finer.decoder.enter[1].in_features < plain.decoder.enter[1].in_features
    again = tmp_path / "again"
    again.mkdir()
    save(finer, again)
    torch.testing.assert_close(load(again).state_dict(), finer.state_dict())


def test_learned_positions_reject_another_size(tmp_path: Path) -> None:
    save(segmenter(encoder="timm:vit_tiny_patch16_224"), tmp_path)
    with raises(ConfigError, "unsupported", "size"):
        create_dense(Detector, tmp_path, LABELS, size=128)


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("labels", (), "out_of_range"),
        ("width", 12, "out_of_range"),
        ("doublings", 6, "out_of_range"),
        ("encoder", {}, "missing"),
        ("inner_share", 0.0, "out_of_range"),
        ("nms_iou_threshold", 1.5, "out_of_range"),
        ("max_boxes", 0, "out_of_range"),
        ("head_lr_mult", 0.0, "out_of_range"),
    ],
)
def test_config_rejects_invalid_values(field: str, value: Any, code: str) -> None:
    with raises(ConfigError, code, field):
        DetectorConfig(**{"encoder": {"name": "resnet_tiny"}, "labels": LABELS, field: value})


def test_linear_decoder_is_one_layer_on_the_patches(tmp_path: Path) -> None:
    """The formula written out: logits of each patch, enlarged bilinearly to the pixels of the
    input.
    """
    model = segmenter(decoder="linear").eval()
    assert model.grid == (SIZE, SIZE)
    trained = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    weight_LD11, bias_L = trained["mask_head.weight"], trained["mask_head.bias"]
    assert len(trained) == 2
    assert weight_LD11.shape == (len(LABELS), model.image_encoder.patch_dim, 1, 1)
    batch = batch_of(model, [sample_of({"masks": []})] * 3)
    features = model.image_encoder(batch.image_BCHW)
    patches_BPD, (height, width) = features.patches_BPD, features.grid
    logits_BPL = patches_BPD @ weight_LD11[:, :, 0, 0].T + bias_L
    small_BLhw = logits_BPL.permute(0, 2, 1).reshape(3, len(LABELS), height, width)
    expected_BLhw = torch.nn.functional.interpolate(
        small_BLhw, scale_factor=2.0**5, mode="bilinear"
    )
    assert torch.allclose(model.mask_logits(batch), expected_BLhw, atol=1e-5)
    model(batch).total.backward()
    assert all(
        parameter.grad is not None and parameter.grad.any() for parameter in trained.values()
    )
    assert not any(parameter.grad is not None for parameter in model.image_encoder.parameters())
    save(model, tmp_path)
    assert torch.equal(load(tmp_path).mask_logits(batch), model.mask_logits(batch))
    with raises(ConfigError, "unknown_name", "decoder"):
        segmenter(decoder="quadratic")


@pytest.mark.parametrize(
    ("encoder", "arguments"),
    [("timm:vit_tiny_patch16_224", {"depth": 1}), ("resnet_tiny", {"patch_level": -2})],
)
def test_logits_of_the_linear_decoder_are_at_the_inputs_pixels(
    encoder: str, arguments: dict[str, Any]
) -> None:
    """Whatever the encoder's stride is: a fixed number of doublings fits a last map of stride 32
    alone.
    """
    image_encoder = create_image_encoder(encoder, image_size=SIZE, **arguments)
    model = Segmenter.on(image_encoder, LABELS, SQUASH, decoder="linear", doublings=1)
    batch = batch_of(model, [sample_of({"masks": []})] * 2)
    assert batch.masks_BLhw is not None
    assert (
        model.grid
        == model.mask_logits(batch).shape[2:]
        == batch.masks_BLhw.shape[2:]
        == (SIZE, SIZE)
    )


def test_dense_models_stretch_images_unless_they_have_a_size_of_their_own(tmp_path: Path) -> None:
    save(gloria(), tmp_path)  # 64 pixels, stretched to 96
    plain, larger = (
        create_dense(Segmenter, tmp_path, LABELS),
        create_dense(Segmenter, tmp_path, LABELS, size=128),
    )
    assert plain.grid == (24, 24)
    assert plain.transform.size == SIZE
    batch = batch_of(plain, [sample_of({"boxes": [box("Mass", 60, 30, 80, 48)]})] * 2)
    assert plain.mask_logits(batch).shape == (2, 2, 24, 24)
    assert plain(batch).total.isfinite()
    assert larger.grid == (32, 32)
    assert "stretch" not in larger.image_encoder.config
    cells_BP4 = create_dense(Detector, tmp_path, LABELS).cells(batch)[1]
    assert (cells_BP4[..., :2] > -20).all()
    assert (cells_BP4[..., 2:] < SIZE + 20).all()


def test_create_model_creates_dense_models() -> None:
    for name, cls in (("detector", Detector), ("segmenter", Segmenter)):
        assert isinstance(
            medvl.create_model(
                name, encoder={"name": "resnet_tiny", "image_size": 32}, labels=LABELS
            ),
            cls,
        )
