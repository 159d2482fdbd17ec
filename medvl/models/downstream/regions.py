"""Detectors of `medvl regions`, opened by name."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.common.seeding import seeded
from medvl.data.convert.regions import RegionDetector
from medvl.data.shards.regions import Regions
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import ImageEncoder, create_image_encoder, read_tensors
from medvl.encoders.pretrained import Pretrained, check_values, split_set, weights_sha256
from medvl.encoders.regions import relative_boxes
from medvl.errors import ConfigError, WeightsError
from medvl.models.base import System, vector_rows
from medvl.models.checkpoint import load
from medvl.models.downstream.classifier import image_encoder_of
from medvl.models.downstream.detector import (
    Detector,
    PreparedImage,
    RegionSelection,
    in_original,
    prepare,
    stack,
    suppress,
    visible_part,
)

# Regions of a Faster R-CNN of torchvision.
#
# Shape letters: P proposals of an image, N of all images, K classes with the background, D
# feature dim.

_CLASS_BIAS = "roi_heads.box_predictor.cls_score.bias"
_COCO_CLASSES = 91


class FasterRCNNRegions:
    """Proposals of the region proposal network with the box head's features and classes. A
    `RegionDetector`.

    As in bottom-up attention, boxes are the proposals that the features were pooled from, not
    refined for a class, and the distribution has the background first.

    Args:
        name: a Faster R-CNN of torchvision.
        tensors: its weights, which decide the number of classes; None: random ones, for tests.
        selection: number of regions of an image.
        class_names: names of the classes, the background first; None: COCO's for 91 classes, else
            numbers.
        device: device of the model.

    Raises:
        ConfigError: torchvision has no such model ("unknown_name"), or there is not a name for each
            class.
        WeightsError: the weights do not fit ("mismatch").
    """

    color: bool | None = True
    trained_on: tuple[Mapping[str, Any], ...] = ()

    def __init__(
        self,
        name: str,
        tensors: Mapping[str, Tensor] | None,
        selection: RegionSelection,
        class_names: Sequence[str] | None,
        device: str,
    ) -> None:
        self.name = name
        self.selection = selection
        self._device = device
        self.net = _create(name, tensors).eval().requires_grad_(False).to(device)
        # torchvision's needs compiled operators
        self.net.rpn.filter_proposals = self._filter_proposals
        predictor: Any = self.net.roi_heads.box_predictor
        self.width = predictor.cls_score.in_features
        self.class_names = _class_names(predictor.cls_score.out_features, class_names)
        self.settings: Mapping[str, Any] = {
            "model": name,
            "selection": dataclasses.asdict(selection),
        }
        self.sha256 = weights_sha256(self.net, self.settings)

    def prepare(self, pixels: np.ndarray) -> Tensor:
        """See `RegionDetector`."""
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))

    def __call__(self, images: Sequence[Tensor]) -> list[Regions]:
        """See `RegionDetector`. Images of one size are read together: others would pad them, and
        change proposals.
        """
        sizes = [image.shape for image in images]
        regions: dict[int, Regions] = {}
        for size in dict.fromkeys(sizes):
            numbers = [number for number, other in enumerate(sizes) if other == size]
            regions |= zip(numbers, self._read([images[number] for number in numbers]), strict=True)
        return [regions[number] for number in range(len(images))]

    @torch.no_grad()
    def _read(self, images: Sequence[Tensor]) -> list[Regions]:
        """Return the regions of images of one size."""
        inputs, _ = self.net.transform([image.to(self._device).float() / 255 for image in images])
        maps = self.net.backbone(inputs.tensors)
        proposals, _ = self.net.rpn(inputs, maps)
        proposals = [
            boxes_P4
            if len(boxes_P4)
            else boxes_P4.new_tensor([[0, 0, size[1], size[0]]])  # the whole image
            for boxes_P4, size in zip(proposals, inputs.image_sizes, strict=True)
        ]
        heads: Any = self.net.roi_heads
        features_ND = heads.box_head(heads.box_roi_pool(maps, proposals, inputs.image_sizes))
        logits_NK, offsets_N = heads.box_predictor(features_ND)
        refined_NK4 = heads.box_coder.decode(offsets_N, proposals)
        counts = [len(boxes_P4) for boxes_P4 in proposals]
        parts = [
            tensor.split(counts)
            for tensor in (refined_NK4, logits_NK.float().softmax(dim=1), features_ND)
        ]
        regions = []
        for boxes_P4, (height, width), refined_PK4, scores_PK, features_PD in zip(
            proposals, inputs.image_sizes, *parts, strict=True
        ):
            index_R = self.selection.choose(refined_PK4[:, 1:], scores_PK[:, 1:])
            relative_P4 = relative_boxes(boxes_P4[index_R], height, width)
            numbers = (features_PD[index_R].float(), relative_P4, scores_PK[index_R])
            regions.append(Regions(*(tensor.cpu().numpy() for tensor in numbers)))
        return regions

    def _filter_proposals(
        self,
        boxes_BN4: Tensor,
        objectness: Tensor,
        sizes: Sequence[tuple[int, int]],
        anchors: Sequence[int],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the boxes and scores of each image as torchvision's
        `RegionProposalNetwork.filter_proposals` does.
        """
        from torchvision.ops import clip_boxes_to_image, remove_small_boxes

        rpn: Any = self.net.rpn
        objectness_BN = objectness.reshape(len(boxes_BN4), -1)
        level_N = torch.arange(len(anchors), device=boxes_BN4.device).repeat_interleave(
            torch.tensor(anchors, device=boxes_BN4.device)
        )
        top_BN = rpn._get_top_n_idx(objectness_BN, anchors)
        boxes = []
        scores = []
        for row, size in enumerate(sizes):
            top_N = top_BN[row]
            boxes_N4 = clip_boxes_to_image(boxes_BN4[row, top_N], size)
            scores_N = objectness_BN[row, top_N].sigmoid()
            large_N = remove_small_boxes(boxes_N4, rpn.min_size)
            large_N = large_N[scores_N[large_N] >= rpn.score_thresh]
            index_K = suppress(
                boxes_N4[large_N], scores_N[large_N], level_N[top_N][large_N], rpn.nms_thresh
            )
            index_K = large_N[index_K][: rpn.post_nms_top_n()]
            boxes.append(boxes_N4[index_K])
            scores.append(scores_N[index_K])
        return boxes, scores


def _create(name: str, tensors: Mapping[str, Tensor] | None) -> Any:
    from torchvision import models

    names = models.list_models(include="fasterrcnn_*")
    if name not in names:
        message = f"unknown detector {name!r}: torchvision has {', '.join(names)}"
        raise ConfigError(message, "unknown_name", field="detector")
    if tensors is not None and _CLASS_BIAS not in tensors:
        message = (
            f"expected the weights of {name}, with {_CLASS_BIAS}; got keys such as "
            f"{next(iter(tensors))}"
        )
        raise WeightsError(message, "mismatch", field="weights")
    classes = _COCO_CLASSES if tensors is None else len(tensors[_CLASS_BIAS])
    with seeded(0):
        net = models.get_model(name, weights=None, weights_backbone=None, num_classes=classes)
    if tensors is not None:
        check_values(tensors, net.state_dict(), f"the file of {name}")
        try:
            net.load_state_dict(dict(tensors), strict=True)
        except RuntimeError as error:
            raise WeightsError(
                f"the weights do not fit {name}: {error}", "mismatch", field="weights"
            ) from error
    return net


def _class_names(count: int, names: Sequence[str] | None) -> tuple[str, ...]:
    if names is None and count == _COCO_CLASSES:
        from torchvision.models.detection import FasterRCNN_ResNet50_FPN_Weights

        return tuple(FasterRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"])
    if names is not None and len(names) != count:
        message = f"expected {count} names, the background's first, got {len(names)}"
        raise ConfigError(message, "mismatch", field="class_names")
    return tuple(names or ("background", *(f"class {number}" for number in range(1, count))))


# Regions of a detector that medvl has trained.
#
# Shape letters: P cells or regions of an image, L labels.

_SAMPLES = 4
"""Points along each side of a box at which the encoder's grid is read and averaged."""


class DetectorRegions:
    """The boxes of a `Detector`; features are the mean of its encoder's patches in each box. A
    `RegionDetector`.

    Its labels are independent. The distribution gives the background the probability that no label
    is right, and divides the rest in proportion to the labels' probabilities.
    """

    color: bool | None

    def __init__(self, model: Detector, selection: RegionSelection, name: str) -> None:
        self.name = name
        self.selection = selection
        self.transform = model.transform
        self.color = model.transform.trained_color
        self.model = model.eval().requires_grad_(False)
        self.width = model.image_encoder.patch_dim
        self.class_names = ("background", *model.config.labels)
        self.trained_on = model.image_encoder.trained_on
        self.settings: Mapping[str, Any] = {
            "model": dataclasses.asdict(model.config),
            "selection": dataclasses.asdict(selection),
        }
        self.sha256 = weights_sha256(model, self.settings)

    def prepare(self, pixels: np.ndarray) -> PreparedImage:
        """See `RegionDetector`."""
        return prepare(self.transform, pixels)

    @torch.no_grad()
    def __call__(self, images: Sequence[PreparedImage]) -> list[Regions]:
        """See `RegionDetector`."""
        features = self.model.image_encoder(stack(list(images), self.model.device))
        logits_BPL, boxes_BP4 = self.model.read_cells(
            self.model.decoder(features.patches_BPD, features.plane)
        )
        map_BDhw = features.patches_BPD.float().transpose(1, 2).unflatten(2, features.plane)
        rows = zip(images, boxes_BP4, logits_BPL.float().sigmoid(), map_BDhw, strict=True)
        return [self._regions(*row) for row in rows]

    def _regions(
        self, image: PreparedImage, boxes_P4: Tensor, scores_PL: Tensor, map_Dhw: Tensor
    ) -> Regions:
        edges_4 = boxes_P4.new_tensor(visible_part(self.transform, image.size))
        boxes_P4 = torch.maximum(boxes_P4, edges_4[[0, 1, 0, 1]]).minimum(edges_4[[2, 3, 2, 3]])
        seen_P = (boxes_P4[:, 2:] > boxes_P4[:, :2]).all(dim=1)
        if seen_P.any():
            boxes_P4 = boxes_P4[seen_P]
            scores_PL = scores_PL[seen_P]
        index_R = self.selection.choose(
            boxes_P4[:, None].expand(-1, scores_PL.shape[1], -1), scores_PL
        )
        boxes_P4 = boxes_P4[index_R]
        scores_PL = scores_PL[index_R]
        return Regions(
            pool_boxes(map_Dhw, boxes_P4 / self.transform.size).cpu().numpy(),
            in_original(boxes_P4.cpu().numpy(), self.transform, image.size),
            with_background(scores_PL).cpu().numpy(),
        )


def pool_boxes(map_Dhw: Tensor, boxes_P4: Tensor) -> Tensor:
    """Return (P, D): the mean of a feature map in boxes, shares of its sides, as RoIAlign with
    one bin.
    """
    steps = (torch.arange(_SAMPLES, device=boxes_P4.device) + 0.5) / _SAMPLES
    across_PS, down_PS = (
        boxes_P4[:, axis, None] + steps * (boxes_P4[:, axis + 2] - boxes_P4[:, axis])[:, None]
        for axis in (0, 1)
    )
    shape = (len(boxes_P4), _SAMPLES, _SAMPLES)
    points = torch.stack(
        [across_PS[:, None].expand(shape), down_PS[:, :, None].expand(shape)], dim=3
    )
    read_DPS = F.grid_sample(
        map_Dhw[None],
        points.flatten(1, 2)[None] * 2 - 1,
        padding_mode="border",
        align_corners=False,
    )[0]
    return read_DPS.mean(dim=2).T


def with_background(scores_PL: Tensor) -> Tensor:
    """Return the distribution (P, 1 + L) over the background and labels of independent
    probabilities (P, L).
    """
    none_P1 = (1 - scores_PL).prod(dim=1, keepdim=True)
    shares_PL = scores_PL / scores_PL.sum(dim=1, keepdim=True).clamp(
        min=torch.finfo(scores_PL.dtype).tiny
    )
    return torch.cat([none_P1, (1 - none_P1) * shares_PL], dim=1)


# Opening a detector for `medvl regions` by name.

# The grid of an image encoder as regions: no detector is needed.

_WHOLE_4 = np.array([0, 0, 1, 1], np.float32)
"""The box of a whole image."""


class GridRegions:
    """The cells of an image encoder's grid, without classes; cells outside of the image are left
    out.

    A `RegionDetector`. A model that reads pixels computes the same features itself, with gradient
    and augmentation: this caches them.

    Args:
        encoder: set to eval mode, without gradient.
        transform: preparation of the images.
        name: name for messages and the manifest.
        all_tokens: the encoder's vector (a class token) comes before the cells, and cells outside
            of the image are kept: what a model computes from the image, in its order. A vector
            wider than the cells has several rows, of which zeros fill the last
            (`medvl.models.base.stored_features`).
    """

    color: bool | None
    class_names: tuple[str, ...] = ()

    def __init__(
        self,
        encoder: ImageEncoder,
        transform: EvalTransform,
        name: str,
        *,
        all_tokens: bool = False,
    ) -> None:
        self.name = name
        self.transform = transform
        self.all_tokens = all_tokens
        self.color = transform.trained_color
        self.encoder = encoder.eval().requires_grad_(False)
        self.width = encoder.patch_dim
        self.trained_on = encoder.trained_on
        self.settings: Mapping[str, Any] = grid_settings(encoder, transform, all_tokens=all_tokens)
        self.sha256 = weights_sha256(encoder, self.settings)
        rows, columns = encoder.grid(transform.size, transform.size)
        y, x = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
        side_4 = np.array([transform.size / columns, transform.size / rows] * 2)
        self._cells_P4 = np.stack([x, y, x + 1, y + 1], axis=2).reshape(-1, 4) * side_4
        self._device = next((tensor.device for tensor in encoder.buffers()), torch.device("cpu"))

    def prepare(self, pixels: np.ndarray) -> PreparedImage:
        """See `RegionDetector`."""
        return prepare(self.transform, pixels)

    @torch.no_grad()
    def __call__(self, images: Sequence[PreparedImage]) -> list[Regions]:
        """See `RegionDetector`."""
        features = self.encoder(stack(list(images), self._device))
        vector_BD, patches_BPD = (
            each.float().cpu().numpy() for each in (features.pooled_BD, features.patches_BPD)
        )
        regions = []
        for image, vector_D, patches_PD in zip(images, vector_BD, patches_BPD, strict=True):
            boxes_P4 = in_original(self._cells_P4, self.transform, image.size)
            if self.all_tokens:
                rows = vector_rows(len(vector_D), self.width)
                vector_KD = np.pad(vector_D, (0, rows * self.width - len(vector_D)))
                boxes_K4 = np.tile(_WHOLE_4, (rows, 1))
                regions.append(
                    Regions(
                        np.vstack([vector_KD.reshape(rows, -1), patches_PD]),
                        np.vstack([boxes_K4, boxes_P4]),
                    )
                )
                continue
            seen_P = (boxes_P4[:, 2:] > boxes_P4[:, :2]).all(axis=1)
            regions.append(Regions(patches_PD[seen_P], boxes_P4[seen_P]))
        return regions


def grid_settings(
    encoder: ImageEncoder, transform: EvalTransform, *, all_tokens: bool
) -> dict[str, Any]:
    """Return the settings of `GridRegions`, which its hash covers beside the encoder's weights."""
    settings = {"encoder": encoder.config, "transform": transform.settings()}
    return {**settings, "all_tokens": True} if all_tokens else settings


_GRID = "grid:"
_TORCHVISION = "fasterrcnn_"


def create_region_detector(
    name: str,
    *,
    weights: str | None = None,
    random_weights: bool = False,
    selection: RegionSelection | None = None,
    image_size: int | None = None,
    fit: Literal["crop", "pad", "squash"] | None = None,
    all_tokens: bool = False,
    class_names: Sequence[str] | None = None,
    device: str = "cpu",
) -> RegionDetector:
    """Create a frozen detector for `medvl.data.write_regions`.

    Args:
        name: `fasterrcnn_resnet50_fpn` or another Faster R-CNN of torchvision; `grid:ENCODER` for
            the grid of an image encoder; or the folder of a checkpoint: the boxes of a `detector`,
            or the grid of another system's encoder.
        weights: for a Faster R-CNN, a local file, which also decides the number of classes; for a
            grid, `published`, or a source as in `create_image_encoder`.
        random_weights: use random weights, for tests.
        selection: number of regions of an image; a grid always has all of its cells.
        image_size: side of the input of `grid:ENCODER`; None is the encoder's own.
        fit: how `grid:ENCODER` makes images square (`EvalTransform`); None pads them. A checkpoint
            has its own.
        all_tokens: of a grid, store the encoder's vector and all cells, for training in place of
            images (`medvl.train.DataConfig.image_features`).
        class_names: names of the classes of a Faster R-CNN, the background first; None: COCO's for
            91 classes, else numbers.
        device: device of the detector.

    Raises:
        ConfigError: the name is unknown, neither weights nor `random_weights` are given, or options
            conflict.
        CheckpointError, WeightsError: the weights cannot be read, or do not fit.
    """
    folder = Path(name)
    selection = selection or RegionSelection()
    if fit is not None and not name.startswith(_GRID):
        raise ConfigError(
            f"fit is a setting of {_GRID}ENCODER; leave it out", "conflict", field="fit"
        )
    if not name.startswith((_GRID, _TORCHVISION)):
        model = _load_checkpoint(folder, device, has_weights=weights is not None or random_weights)
        if not isinstance(model, Detector):
            name = f"{_GRID}{model.name}"
            return GridRegions(
                image_encoder_of(model), model.transform, name, all_tokens=all_tokens
            )
        _refuse_tokens(model.name, all_tokens)
        return DetectorRegions(model, selection, model.name)
    if (weights is None) != random_weights:
        message = (
            f"{name} needs weights: give a source of them, or ask for random weights in a "
            f"test; not both"
        )
        raise ConfigError(message, "missing" if weights is None else "conflict", field="weights")
    if name.startswith(_TORCHVISION):
        _refuse_tokens(name, all_tokens)
        file, name_of_set = (None, None) if weights is None else split_set(weights)
        if file is not None and not Path(file).is_file():
            raise WeightsError(
                f"{file} does not exist: give a local file", "not_found", field="weights"
            )
        tensors = None if file is None else read_tensors(Path(file), name_of_set)
        return FasterRCNNRegions(name, tensors, selection, class_names, device)
    source: Pretrained = False if weights is None else weights == "published" or weights
    with seeded(0):
        encoder = create_image_encoder(
            name.removeprefix(_GRID), pretrained=source, image_size=image_size
        )
    transform = EvalTransform(size=encoder.image_size[0], fit=fit or "pad")
    return GridRegions(encoder.to(device), transform, name, all_tokens=all_tokens)


def _refuse_tokens(name: str, all_tokens: bool) -> None:
    if all_tokens:
        message = f"{name} has boxes of its own and no grid; leave all_tokens unset"
        raise ConfigError(message, "unsupported", field="all_tokens")


def _load_checkpoint(folder: Path, device: str, *, has_weights: bool) -> System:
    if not folder.is_dir():
        message = (
            f"unknown detector {str(folder)!r}: expected {_TORCHVISION}..., "
            f"{_GRID}ENCODER, or a checkpoint's folder"
        )
        raise ConfigError(message, "unknown_name", field="detector")
    if has_weights:
        raise ConfigError(
            "a checkpoint has weights of its own; leave weights out", "conflict", field="weights"
        )
    return load(folder).to(device)
