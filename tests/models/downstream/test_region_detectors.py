"""Detectors of `medvl regions`: selection, boxes in the original image, features and classes of
the regions.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from helpers.errors import raises
from helpers.region_shards import region_table
from torchvision.ops import roi_align

import medvl
from medvl.cli import main as cli
from medvl.data.shards.regions import Regions
from medvl.data.shards.source import ShardSource
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import create_image_encoder
from medvl.errors import ConfigError, WeightsError
from medvl.models.checkpoint import save
from medvl.models.downstream.detector import (
    Detector,
    RegionSelection,
    in_original,
    suppress,
    visible_part,
)
from medvl.models.downstream.regions import (
    DetectorRegions,
    FasterRCNNRegions,
    GridRegions,
    create_region_detector,
    with_background,
)

SMALLEST = "fasterrcnn_mobilenet_v3_large_320_fpn"


def overlap(one: Any, other: Any) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    shared = max(width, 0) * max(height, 0)
    return shared / (
        (one[2] - one[0]) * (one[3] - one[1])
        + (other[2] - other[0]) * (other[3] - other[1])
        - shared
    )


def naive_choice(
    boxes: Any, scores: Any, least: int, most: int, threshold: float, iou: float
) -> list[int]:
    """The loop over classes of the released code of bottom-up attention, with its ties broken by
    the score.
    """
    confidence = [max(row) - 1 for row in scores]
    for label in range(len(scores[0])):
        kept: list[int] = []
        for region in sorted(range(len(scores)), key=lambda r: -scores[r][label]):
            if all(overlap(boxes[region][label], boxes[other][label]) <= iou for other in kept):
                kept.append(region)
        for region in kept:
            confidence[region] = max(confidence[region], scores[region][label])
    order = sorted(range(len(scores)), key=lambda r: -confidence[r])
    count = max(least, sum(value >= threshold for value in confidence))
    return order[: min(count, most)]


@pytest.mark.parametrize(
    ("least", "most", "threshold"), [(12, 12, 0.2), (3, 12, 0.8), (1, 12, 0.99), (2, 5, 0.1)]
)
def test_selection_equals_bottom_up_attention(least: int, most: int, threshold: float) -> None:
    generator = torch.Generator().manual_seed(0)
    low = torch.rand(30, 3, 2, generator=generator) * 40
    boxes_PK4 = torch.cat([low, low + 5 + torch.rand(30, 3, 2, generator=generator) * 30], dim=2)
    scores_PK = torch.rand(30, 3, generator=generator)
    chosen = RegionSelection(max_regions=most, min_regions=least, confidence=threshold).choose(
        boxes_PK4, scores_PK
    )
    assert chosen.tolist() == naive_choice(
        boxes_PK4.tolist(), scores_PK.tolist(), least, most, threshold, 0.3
    )


def test_settings_of_the_selection_are_checked() -> None:
    for field, values in (
        ("max_regions", {"max_regions": 0}),
        ("min_regions", {"min_regions": 40}),
        ("confidence", {"confidence": 1.5}),
    ):
        with raises(ConfigError, "out_of_range", field):
            RegionSelection(**values)


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    """Torchvision compiles its RoIAlign where its own operators are missing, which takes longer
    than all tests.
    """
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(scope="module")
def faster_rcnn() -> FasterRCNNRegions:
    torch.manual_seed(0)
    detector = create_region_detector(
        SMALLEST, random_weights=True, selection=RegionSelection(max_regions=6)
    )
    assert isinstance(detector, FasterRCNNRegions)
    detector.net.rpn._post_nms_top_n["testing"] = 12  # pooling is slow without compiled operators
    torch.nn.init.normal_(detector.net.roi_heads.box_predictor.cls_score.weight, std=0.1)
    return detector


def test_faster_rcnn_describes_its_proposals(faster_rcnn: FasterRCNNRegions) -> None:
    image = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    (regions,) = faster_rcnn([faster_rcnn.prepare(image)])
    assert regions.features_PD.shape == (6, faster_rcnn.width) == (6, 1024)
    assert regions.classes_PK is not None
    assert regions.classes_PK.shape == (6, 91)
    assert faster_rcnn.class_names[:2] == ("__background__", "person")
    np.testing.assert_allclose(regions.classes_PK.sum(axis=1), 1, rtol=1e-5)
    assert ((regions.boxes_P4 >= 0) & (regions.boxes_P4 <= 1)).all()
    assert len(np.unique(regions.boxes_P4, axis=0)) == 6
    # features and classes belong to the boxes: pool these boxes alone, with torchvision's own parts
    net: Any = faster_rcnn.net
    with torch.no_grad():
        resized, _ = net.transform([torch.from_numpy(image.transpose(2, 0, 1)).float() / 255])
        ((height, width),) = resized.image_sizes
        boxes = [torch.from_numpy(regions.boxes_P4) * torch.tensor([width, height, width, height])]
        features = net.roi_heads.box_head(
            net.roi_heads.box_roi_pool(net.backbone(resized.tensors), boxes, resized.image_sizes)
        )
        classes = net.roi_heads.box_predictor(features)[0].softmax(dim=1)
    np.testing.assert_allclose(regions.features_PD, features.numpy(), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(regions.classes_PK, classes.numpy(), rtol=1e-3, atol=1e-5)


def test_images_of_other_sizes_do_not_change_regions(faster_rcnn: FasterRCNNRegions) -> None:
    """One image of each size: rounding in a batch of several may change the order of equally
    good proposals.
    """
    random = np.random.default_rng(0)
    shapes = [(48, 64, 3), (80, 40, 3)]
    images = [
        faster_rcnn.prepare(random.integers(0, 256, shape, dtype=np.uint8)) for shape in shapes
    ]
    for image, together in zip(images, faster_rcnn(images), strict=True):
        (alone,) = faster_rcnn([image])
        np.testing.assert_allclose(together.boxes_P4, alone.boxes_P4, atol=1e-5)
        np.testing.assert_allclose(together.features_PD, alone.features_PD, rtol=1e-3, atol=1e-4)


def test_proposals_are_torchvisions(
    faster_rcnn: FasterRCNNRegions, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision.models.detection import rpn

    monkeypatch.setattr(rpn.box_ops, "batched_nms", suppress)
    generator = torch.Generator().manual_seed(1)
    anchors = [40, 20]
    low = torch.rand(2, 60, 2, generator=generator) * 40
    boxes_BN4 = torch.cat([low, low + torch.rand(2, 60, 2, generator=generator) * 30], dim=2)
    objectness = torch.randn(2, 60, generator=generator)
    sizes = [(50, 60), (60, 50)]
    net: Any = faster_rcnn.net
    expected = rpn.RegionProposalNetwork.filter_proposals(
        net.rpn, boxes_BN4, objectness, sizes, anchors
    )
    for ours, theirs in zip(
        net.rpn.filter_proposals(boxes_BN4, objectness, sizes, anchors), expected, strict=True
    ):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)


def test_weights_of_a_faster_rcnn(faster_rcnn: FasterRCNNRegions, tmp_path: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in faster_rcnn.net.state_dict().items()}
    path = tmp_path / "weights.safetensors"
    head = "roi_heads.box_predictor"
    fewer = {name: tensor for name, tensor in tensors.items() if not name.startswith(head)}
    fewer |= {
        f"{head}.cls_score.weight": torch.zeros(3, 1024),
        f"{head}.cls_score.bias": torch.zeros(3),
        f"{head}.bbox_pred.weight": torch.zeros(12, 1024),
        f"{head}.bbox_pred.bias": torch.zeros(12),
    }
    safetensors.torch.save_file(fewer, path)
    named = create_region_detector(
        SMALLEST, weights=str(path), class_names=["none", "mass", "line"]
    )
    assert named.class_names == ("none", "mass", "line")
    assert named.sha256 != faster_rcnn.sha256
    with raises(ConfigError, "mismatch", "class_names"):
        create_region_detector(SMALLEST, weights=str(path), class_names=["none"])
    for content in ({"weight": torch.zeros(1)}, {f"{head}.cls_score.bias": torch.zeros(3)}):
        safetensors.torch.save_file(content, path)
        with raises(WeightsError, "mismatch", "weights"):
            create_region_detector(SMALLEST, weights=str(path))
    with raises(WeightsError, "not_found", "weights"):
        create_region_detector(SMALLEST, weights=str(tmp_path / "absent"))


def test_a_detector_needs_weights_and_a_known_name(tmp_path: Path) -> None:
    for name in (SMALLEST, "grid:resnet_tiny"):
        with raises(ConfigError, "missing", "weights"):
            create_region_detector(name)
        with raises(ConfigError, "conflict", "weights"):
            create_region_detector(name, weights="x", random_weights=True)
    with raises(ConfigError, "unknown_name", "detector"):
        create_region_detector("fasterrcnn_big", random_weights=True)
    with raises(ConfigError, "unknown_name", "detector"):
        create_region_detector("yolo")
    with raises(ConfigError, "conflict", "weights"):
        create_region_detector(str(tmp_path), random_weights=True)


def test_grid_cells_cover_the_image_and_nothing_else() -> None:
    detector = create_region_detector("grid:resnet_tiny", random_weights=True, image_size=128)
    assert isinstance(detector, GridRegions)
    image = np.random.default_rng(0).integers(0, 256, (40, 80), dtype=np.uint8)
    prepared = detector.prepare(image)
    (regions,) = detector([prepared])
    rows, columns = detector.encoder.grid(128, 128)
    assert rows == columns == 4
    assert (
        len(regions.boxes_P4) == 8
    )  # the two rows in the middle; the others show the border of the square
    np.testing.assert_allclose(regions.boxes_P4[0], (0, 0, 0.25, 0.5), atol=1e-6)
    np.testing.assert_allclose(regions.boxes_P4[-1], (0.75, 0.5, 1, 1), atol=1e-6)
    whole = detector.encoder(torch.from_numpy(prepared.pixels_CHW)[None]).patches_BPD[0]
    np.testing.assert_allclose(regions.features_PD, whole[4:12].numpy(), rtol=1e-5, atol=1e-6)
    area = (regions.boxes_P4[:, 2:] - regions.boxes_P4[:, :2]).prod(axis=1)
    np.testing.assert_allclose(area.sum(), 1, rtol=1e-5)


def test_all_tokens_of_a_grid_are_the_output_of_its_encoder() -> None:
    """The class token first, and the cells outside of the image too, which a model computes from
    it.
    """
    settings: Any = {"random_weights": True, "image_size": 128}
    detector = create_region_detector("grid:resnet_tiny", **settings, all_tokens=True)
    assert isinstance(detector, GridRegions)
    prepared = detector.prepare(np.random.default_rng(0).integers(0, 256, (40, 80), dtype=np.uint8))
    (regions,) = detector([prepared])
    features = detector.encoder(torch.from_numpy(prepared.pixels_CHW)[None])
    assert features.patches_BPD is not None
    np.testing.assert_array_equal(regions.features_PD[:1], features.pooled_BD.numpy())
    np.testing.assert_array_equal(regions.features_PD[1:], features.patches_BPD[0].numpy())
    np.testing.assert_array_equal(regions.boxes_P4[0], (0, 0, 1, 1))
    read = Regions.from_bytes(regions.to_bytes(), detector.width, 0)
    np.testing.assert_array_equal(read.features_PD, regions.features_PD)
    hashes = {
        create_region_detector("grid:resnet_tiny", **settings, **change).sha256
        for change in TOKEN_SETTINGS
    }
    assert len({*hashes, detector.sha256}) == 3


TOKEN_SETTINGS: list[dict[str, Any]] = [{}, {"fit": "pad"}, {"fit": "crop", "all_tokens": True}]


def test_settings_of_a_grid_are_refused_elsewhere(own: Detector, tmp_path: Path) -> None:
    save(own, tmp_path)
    for name, settings in ((SMALLEST, {"random_weights": True}), (str(tmp_path), {})):
        with raises(ConfigError, "unsupported", "all_tokens"):
            create_region_detector(name, all_tokens=True, **settings)
        with raises(ConfigError, "conflict", "fit"):
            create_region_detector(name, fit="crop", **settings)


@pytest.mark.parametrize("fit", ["crop", "pad", "squash"])
def test_boxes_come_back_to_the_original(fit: Any) -> None:
    transform = EvalTransform(size=32, fit=fit)
    left, top, right, bottom = visible_part(transform, (40, 80))
    corners = in_original(
        np.array([[left, top, right, bottom], [16, 16, 16, 16]]), transform, (40, 80)
    )
    seen = (0.25, 0, 0.75, 1) if fit == "crop" else (0, 0, 1, 1)
    np.testing.assert_allclose(corners[0], seen, atol=1e-6)
    np.testing.assert_allclose(corners[1], 0.5, atol=1e-6)


@pytest.fixture(scope="module")
def own() -> Detector:
    torch.manual_seed(0)
    encoder = create_image_encoder("resnet_tiny", image_size=128)
    model = Detector.on(
        encoder, ("Mass",), EvalTransform(size=128, fit="squash"), width=16, max_boxes=5
    )
    for parameter in (model.label_head.weight, model.place_head.weight):
        torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


def test_own_detector_gives_its_best_boxes(own: Detector) -> None:
    selection = RegionSelection(max_regions=5, nms_iou_threshold=own.config.nms_iou_threshold)
    detector = DetectorRegions(own, selection, "detector")
    image = np.random.default_rng(0).integers(0, 256, (60, 90), dtype=np.uint8)
    prepared = detector.prepare(image)
    (regions,) = detector([prepared])
    pixels_BCHW = torch.from_numpy(prepared.pixels_CHW)[None]
    batch: Any = medvl.schema.Batch(
        keys=["a"], image_BCHW=pixels_BCHW, ids_BT=torch.zeros(1, 0), mask_BT=torch.zeros(1, 0),
        labels_BL=torch.zeros(1, 0), texts=[""],
    )  # fmt: skip
    (found_LK5,) = own.detect(batch, [image.shape])
    expected = found_LK5[0, :, :4] / torch.tensor([90, 60, 90, 60])
    np.testing.assert_allclose(regions.boxes_P4, expected.numpy(), atol=1e-4)
    assert regions.classes_PK is not None
    np.testing.assert_allclose(regions.classes_PK[:, 1], found_LK5[0, :, 4].numpy(), rtol=1e-4)
    assert detector.class_names == ("background", "Mass")
    features = own.image_encoder(pixels_BCHW)
    map_1Dhw = features.patches_BPD.transpose(1, 2).unflatten(2, features.grid).detach()
    boxes = torch.from_numpy(regions.boxes_P4) * 4  # in cells
    pooled = roi_align(map_1Dhw, [boxes], 1, 1.0, 4, aligned=True)
    np.testing.assert_allclose(regions.features_PD, pooled.flatten(1).numpy(), rtol=1e-3, atol=1e-4)


def test_a_distribution_of_independent_labels() -> None:
    scores_PL = torch.tensor([[0.5, 0.5], [0.9, 0.0], [0.0, 0.0]])
    expected = torch.tensor([[0.25, 0.375, 0.375], [0.1, 0.9, 0.0], [1.0, 0.0, 0.0]])
    torch.testing.assert_close(with_background(scores_PL), expected)


def test_command_writes_all_splits_with_each_kind_of_detector(
    own: Detector, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = region_table(tmp_path)
    (tmp_path / "checkpoint").mkdir()
    patients = ShardSource(shards / "validate").manifest
    save(own, tmp_path / "checkpoint", {"train_manifest": {"patients": list(patients.patients)}})
    cli.main(
        [
            "regions",
            "--data",
            str(shards),
            "--detector",
            str(tmp_path / "checkpoint"),
            "--max-regions",
            "3",
            "--device",
            "cpu",
        ]
    )
    cli.main(
        [
            "regions",
            "--data",
            str(shards),
            "--detector",
            "grid:resnet_tiny",
            "--random-weights",
            "--name",
            "cells",
            "--device",
            "cpu",
        ]
    )
    assert "image_encoder regions:" in capsys.readouterr().out
    for split in ("train", "validate"):
        source = ShardSource(shards / split, regions="detector")
        assert source.region_manifest is not None
        assert source.region_manifest.regions == 3 * source.region_manifest.images
        assert [each["patients"] for each in source.region_manifest.trained_on] == [
            list(patients.patients)
        ]
        assert ShardSource(shards / split, regions="cells").region_manifest is not None
    cli.main(["verify", str(shards)])
    assert capsys.readouterr().out.count(": intact") == 6
    with pytest.raises(SystemExit):  # the name belongs to another detector
        cli.main(
            [
                "regions",
                "--data",
                str(shards),
                "--detector",
                "grid:resnet_tiny",
                "--random-weights",
                "--name",
                "detector",
            ]
        )
