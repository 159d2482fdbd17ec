"""Heat maps of findings in volumes: boxes as voxels, metrics, and the command."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.contrastive_systems import convirt
from helpers.errors import raises
from helpers.volume_shards import SHAPE, volume_shards
from torch import Tensor

import medvl
from medvl.cli import main as cli
from medvl.data.shards.source import ShardSource
from medvl.data.tokenizer.tokenizer import train_wordpiece
from medvl.data.volumes.options import VolumeOptions
from medvl.data.volumes.transform import VolumeTransform
from medvl.errors import EvaluationError
from medvl.eval import read_results
from medvl.eval.grounding.heatmaps import VolumeMaps
from medvl.eval.grounding.volumes import box_mask, read_volume_boxes, voxel_auroc
from medvl.models.checkpoint import save
from medvl.models.dual_encoders.bases.base import DualEncoder
from medvl.phantom.population.volumes import sample_chest_ct
from medvl.phantom.rendering.volumes import finding_masks
from medvl.schema import Sample


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("volumes")
    return volume_shards(root, 4, reconstructions=1, split="test")


@pytest.fixture(scope="module")
def model(folder: Path) -> DualEncoder:
    torch.manual_seed(0)
    source = ShardSource(folder)
    texts = [text for row in range(len(source)) for text in source.sample(row).sections.values()]
    created: DualEncoder = medvl.create_model(
        "ct_clip",
        volume_size=SHAPE,
        image_arguments={"patch_size": (4, 8, 8), "embed_dim": 16, "depth": 1, "num_heads": 2},
        text_encoder="tiny_bert",
        text_arguments={"num_hidden_layers": 1},
        tokenizer=train_wordpiece(texts),
        projection_dim=16,
    )
    return created


def around(mask_DHW: np.ndarray) -> np.ndarray:
    """Return the box around a mask."""
    box_DHW = np.zeros_like(mask_DHW)
    box_DHW[tuple(slice(each.min(), each.max() + 1) for each in np.nonzero(mask_DHW))] = True
    return box_DHW


@pytest.mark.parametrize("stored", [None, (12, 40, 28)])
def test_boxes_of_shards_are_those_around_the_masks(
    tmp_path: Path, stored: tuple[int, int, int] | None
) -> None:
    folder = volume_shards(
        tmp_path, 3, reconstructions=1, options=VolumeOptions(size=stored), seed=5
    )
    source = ShardSource(folder)
    compared = 0
    for row in range(len(source)):
        sample = source.sample(row)
        patient = int(sample.study.rpartition("s")[2])
        masks = finding_masks(sample_chest_ct((5, patient)), SHAPE)
        cut = VolumeTransform(size=stored or SHAPE)
        for box in read_volume_boxes(sample):
            if masks[box.label].any():
                whole = around(masks[box.label])
                expected = cut.fill(whole.astype(np.int16), cut.cut(SHAPE)) == 1
                found = box_mask([box], sample, VolumeTransform(size=SHAPE))
                back = VolumeTransform(size=SHAPE)
                again = back.fill(expected.astype(np.int16), back.cut(expected.shape)) == 1
                np.testing.assert_array_equal(found, again)
                compared += 1
    assert compared >= 3


def test_a_box_between_voxel_centres_is_the_voxel_around_its_centre() -> None:
    extra = {"shape": [2, 4, 4], "spacing_mm": [1.0, 1.0, 1.0]}
    box = {"label": "Nodule", "center": [0.9, -1.8, 1.9], "size": [0.1, 0.1, 0.1]}
    sample = Sample(
        key="k", corpus="lab", split="test", patient="p", study="s", image=None, sections={},
        labels={}, extra={**extra, "boxes_mm": [box, {**box, "center": [9, 0, 0]}]},
    )  # fmt: skip
    boxes = read_volume_boxes(sample)
    inside = box_mask(boxes[:1], sample, VolumeTransform(size=(2, 4, 4)))
    assert np.argwhere(inside).tolist() == [[1, 0, 3]]
    assert not box_mask(boxes[1:], sample, VolumeTransform(size=(2, 4, 4))).any()


@pytest.mark.parametrize("boxes", ['[{"label": "a"}]', "{", "[1]", [{"label": "a", "center": 1}]])
def test_other_boxes_are_refused(boxes: object) -> None:
    sample = Sample(
        key="k", corpus="lab", split="test", patient="p", study="s", image=None, sections={},
        labels={}, extra={"boxes_mm": boxes},
    )  # fmt: skip
    with raises(EvaluationError, "malformed", "boxes_mm"):
        read_volume_boxes(sample)


def test_the_auroc_of_voxels_is_the_share_of_pairs() -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 5, (3, 4, 5)).astype(np.float32)
    inside = rng.random((3, 4, 5)) < 0.3
    pairs = values[inside][:, None] - values[~inside]
    expected = np.mean((pairs > 0) + 0.5 * (pairs == 0))
    assert voxel_auroc(values, inside) == pytest.approx(expected)


def test_maps_of_the_boxes_themselves_are_inside(
    folder: Path, model: DualEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ShardSource(folder)
    samples = [source.sample(row) for row in range(len(source))]
    label = "Cardiomegaly"
    masks = [
        box_mask([box for box in read_volume_boxes(each) if box.label == label], each,
        VolumeTransform(size=SHAPE)) for each in samples
    ]  # fmt: skip
    text_E = model.embed_texts([f"There is {label.lower()}."]).global_NE[0]
    share_Bdhw = torch.nn.functional.avg_pool3d(
        torch.from_numpy(np.stack(masks)).float()[:, None], (4, 8, 8)
    )

    def regions(self: DualEncoder, image_BCDHW: Tensor) -> Tensor:
        return share_Bdhw.flatten(1)[: len(image_BCDHW), :, None] * text_E

    (tmp_path / "model").mkdir()
    save(model, tmp_path / "model")
    monkeypatch.setattr(type(model), "embed_regions", regions)
    arguments = ["--checkpoint", str(tmp_path / "model"), "--data", str(folder)]
    cli.main(["eval", "volume-grounding", *arguments, "--resamples", "10"])
    (file,) = (tmp_path / "model").rglob("results.json")
    results = read_results(file)
    assert results.row("voxel_auroc", label).value > 0.9
    assert results.row("pointing_game", label).value == 1
    lines = [
        json.loads(line) for line in (file.parent / "predictions.jsonl").read_text().splitlines()
    ]
    assert {line["label"] for line in lines} == {
        name for each in samples for name, value in each.labels.items() if value
    }
    assert results.details["chance"][label] == pytest.approx(
        np.mean([mask.mean() for mask in masks if mask.any()])
    )


def test_models_without_patches_of_volumes_are_refused() -> None:
    with raises(EvaluationError, "unsupported", "model"):
        VolumeMaps(convirt(), {})


def test_boxes_follow_the_cut_around_the_organs() -> None:
    extra = {"shape": [4, 16, 16], "spacing_mm": [1.0, 1.0, 1.0]}
    extra["organs"] = {"box": [[0, 4], [10, 14], [2, 6]]}  # the cut: 0 to 4, 8 to 16, 0 to 8
    box = {"label": "Nodule", "center": [0.0, 1.0, -4.0], "size": [2.0, 2.0, 2.0]}
    sample = Sample(
        key="k", corpus="lab", split="test", patient="p", study="s", image=None, sections={},
        labels={}, extra={**extra, "boxes_mm": [box]},
    )  # fmt: skip
    transform = VolumeTransform(size=(4, 8, 8), organs=True)
    inside = np.argwhere(box_mask(read_volume_boxes(sample), sample, transform))
    assert inside.min(0).tolist() == [1, 0, 3]
    assert inside.max(0).tolist() == [2, 1, 4]
