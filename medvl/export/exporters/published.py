"""Export to the files of the authors' code: whole systems, under their published names.

Tensors of the authors' classes that no output depends on are written as zeros where their loaders
require them (the classifier of BioViL's ResNet, the pooler of MedCLIP's BERT), and left out
otherwise (cross-attention in MGCA's BERT).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medvl.common.files import new_folder
from medvl.errors import ConfigError
from medvl.export.exporters.common import Exported, difference, random_ids, write_card
from medvl.export.importers.dual_encoders import MEDCLIP_RESNET_HEAD
from medvl.export.importers.import_checkpoint import find_importer, import_checkpoint
from medvl.export.importers.importer import Importer
from medvl.export.importers.key_map import add_copies, to_published
from medvl.models.base import System, has_towers

IMAGE_FILE = "image_model.pt"
TEXT_FILE = "text_model.pt"
_FILES: Mapping[str, tuple[str, ...]] = {
    "biovil": (IMAGE_FILE, TEXT_FILE),
    "biovil_t": (IMAGE_FILE, TEXT_FILE),
    "lovt": ("lovt.ckpt",),
    "medclip": ("pytorch_model.bin",),
    "mgca": ("mgca.ckpt",),
}
"""System -> files of a complete model."""
_IMAGE_KEYS = ("encoder.", "projector.")
_CLASSIFIER = "encoder.encoder.fc"
_MISSING = "encoder.missing_previous_emb"
_LAST = "encoder.encoder.layer4."
_CLASSES = 1000
_BERT = "text_model.model."
_SWIN = "vision_model.model.encoder.layers"


def export_published(model: System, out: Path | str) -> Exported:
    """Write a complete BioViL, BioViL-T, LoVT, MedCLIP or MGCA as the files of its authors' code,
    and a card.

    The files are imported again, and the outputs are compared with medvl's before the folder is
    kept. Settings that the files do not hold, such as the size of images, have to be the published
    ones.

    Args:
        model: the system.
        out: new folder, with `image_model.pt` and `text_model.pt` of BioViL and BioViL-T,
            `pytorch_model.bin` of MedCLIP, `lovt.ckpt` or `mgca.ckpt`, and the tokenizer.

    Raises:
        ConfigError: the model is another system.
        CheckpointError, WeightsError: the outputs differ, or the authors' code has no such encoder.
    """
    if model.name not in _FILES or not has_towers(model):
        message = (
            f"{model.name} has no layout of published files: this export takes {', '.join(_FILES)}"
        )
        raise ConfigError(message, "unsupported")
    importer = find_importer(model.name)
    model.eval()
    with new_folder(Path(out)) as folder, torch.no_grad():
        contents, unknown = published_contents(model, importer)
        for name, content in contents.items():
            torch.save(content, folder / name)
        if model.tokenizer is not None:
            model.tokenizer.save(folder / "tokenizer")
        differences = _compare(model, importer, [folder / name for name in contents])
        left_out = dict.fromkeys(unknown, "the published files have no place for it")
        write_card(
            folder, model, usage=_usage(model.name), left_out=left_out, library="the authors' code"
        )
    return Exported(folder=Path(out), differences=differences, left_out=left_out)


def _usage(system: str) -> str:
    if system == "medclip":
        return f"""# With Swin: MedCLIPVisionModelViT.
from medclip import MedCLIPModel, MedCLIPVisionModel
model = MedCLIPModel(vision_cls=MedCLIPVisionModel)
model.load_state_dict(torch.load("FOLDER/{_FILES[system][0]}", weights_only=True))"""
    if len(_FILES[system]) == 1:
        return f"""# A Lightning checkpoint. Tensors that no output depends on are not in it.
tensors = torch.load("FOLDER/{_FILES[system][0]}", weights_only=True)["state_dict"]"""
    return f"""from health_multimodal.image.model.model import ImageModel
path = "FOLDER/{IMAGE_FILE}"
image_model = ImageModel(
    img_encoder_type="resnet50", joint_feature_size=128, pretrained_model_path=path
)
# For CXRBertModel.load_state_dict:
text_weights = torch.load("FOLDER/{TEXT_FILE}", weights_only=True)"""


def published_contents(model: System, importer: Importer) -> tuple[dict[str, Any], list[str]]:
    """Return the content of each file by its name, and the model's tensors that have no place in
    them.
    """
    files = _FILES[model.name]
    tensors, unknown = to_published(_without_token_types(model, importer), importer.table)
    tensors = add_copies(tensors, importer.table)
    if model.name == "medclip":
        return {files[0]: _medclip(model, tensors)}, unknown
    if len(files) == 1:
        return {files[0]: {"state_dict": tensors}}, unknown
    tensors |= _unused_classifier(tensors)
    if _MISSING in tensors:
        tensors[_MISSING] = tensors[_MISSING].view(1, -1, 1, 1)
    image = {key: tensor for key, tensor in tensors.items() if key.startswith(_IMAGE_KEYS)}
    text = {key: tensor for key, tensor in tensors.items() if key not in image}
    return {IMAGE_FILE: image, TEXT_FILE: text}, unknown


def _without_token_types(model: System, importer: Importer) -> dict[str, Tensor]:
    """Return the model's tensors; where the published BERT has no token types, positions include
    type 0.
    """
    tensors = dict(model.state_dict())
    for zero in importer.zeros:
        types_VD = tensors.pop(zero.name)
        positions = zero.name.replace("token_type", "position")
        tensors[positions] = tensors[positions] + types_VD[:1]
    return tensors


def _medclip(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return all tensors of the authors' class, with those that older transformers stored and
    the unused pooler.
    """
    is_swin = any(key.startswith(_SWIN) for key in tensors)
    other_head = MEDCLIP_RESNET_HEAD if is_swin else "vision_model.projection_head"
    complete = {key: tensor for key, tensor in tensors.items() if key != f"{other_head}.weight"}
    positions, width = complete[f"{_BERT}embeddings.position_embeddings.weight"].shape
    complete[f"{_BERT}embeddings.position_ids"] = torch.arange(positions)[None]
    complete[f"{_BERT}pooler.dense.weight"] = torch.zeros(width, width)
    complete[f"{_BERT}pooler.dense.bias"] = torch.zeros(width)
    for name, buffer in model.image_encoder.backbone.named_buffers() if is_swin else ():
        _, stage, _, block, *_, leaf = name.split(".")
        if leaf == "relative_position_index":
            complete[f"{_SWIN}.{stage}.blocks.{block}.attention.self.{leaf}"] = buffer
    return complete


def _unused_classifier(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return zeros for the ImageNet classifier, which the authors' loader requires and never
    uses.
    """
    width = max(
        tensor.shape[0] for key, tensor in tensors.items() if tensor.ndim and key.startswith(_LAST)
    )
    return {
        f"{_CLASSIFIER}.weight": torch.zeros(_CLASSES, width),
        f"{_CLASSIFIER}.bias": torch.zeros(_CLASSES),
    }


def _compare(model: Any, importer: Importer, files: Sequence[Path]) -> dict[str, float]:
    """Import the files, and return the differences of the embeddings of random inputs."""
    second: dict[str, Any] = {"text_file": files[1]} if len(files) > 1 else {}
    again: Any = import_checkpoint(
        importer.name, files[0], **second, tokenizer=model.tokenizer
    ).model
    size = model.config.image_size
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(2, model.image_encoder.in_channels, size, size, generator=generator)
    ids_BT = random_ids(model.text_encoder, None)
    mask_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    (new_images, new_text), (images, text) = (
        (each.embed_images(pixels), each.encode_text(ids_BT, mask_BT)) for each in (again, model)
    )
    differences = {
        "image": difference("the embedding of an image", new_images.global_NE, images.global_NE),
        "text": difference("the embedding of a text", new_text, text),
    }
    if images.local_NPE is not None:
        differences["regions"] = difference(
            "the embeddings of regions", new_images.local_NPE, images.local_NPE
        )
    return differences
