"""Export to the files of the authors' code, for systems that were published as an image model and a text model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medvl.common.folders import new_folder
from medvl.errors import ConfigError
from medvl.export.exporters.common import Exported, difference, random_ids, random_pixels, write_card
from medvl.export.importers.import_checkpoint import import_checkpoint
from medvl.export.importers.importer import Importer
from medvl.export.importers.key_map import add_copies, to_published
from medvl.export.importers.registry import find_importer
from medvl.models.base import System, TwoTowers

IMAGE_FILE, TEXT_FILE = "image_model.pt", "text_model.pt"
_IMAGE_KEYS = ("encoder.", "projector.")
_CLASSIFIER, _MISSING = "encoder.encoder.fc", "encoder.missing_previous_emb"
_SYSTEMS = ("biovil", "biovil_t")
_LAST, _CLASSES = "encoder.encoder.layer4.", 1000


def export_published(model: System, out: Path | str) -> Exported:
    """Write a complete BioViL or BioViL-T as the two files that hi-ml's code loads, and a card.

    The files are imported again, and the outputs are compared with medvl's before the folder is kept.

    Args:
        model: the system.
        out: new folder, with `image_model.pt`, `text_model.pt` and the tokenizer.

    Raises:
        ConfigError: the model is another system.
        CheckpointError: the outputs differ.
    """
    if model.name not in _SYSTEMS or not isinstance(model, TwoTowers):
        message = f"{model.name} has no layout of two published files: this export takes {', '.join(_SYSTEMS)}"
        raise ConfigError(message, "unsupported")
    importer = find_importer(model.name)
    model.eval()
    with new_folder(Path(out)) as folder, torch.no_grad():
        tensors, unknown = to_published(model.state_dict(), importer.table)
        tensors = add_copies(tensors, importer.table) | _unused_classifier(tensors)
        if _MISSING in tensors:
            tensors[_MISSING] = tensors[_MISSING].view(1, -1, 1, 1)
        image = {key: tensor for key, tensor in tensors.items() if key.startswith(_IMAGE_KEYS)}
        torch.save(image, folder / IMAGE_FILE)
        torch.save({key: tensor for key, tensor in tensors.items() if key not in image}, folder / TEXT_FILE)
        if model.tokenizer is not None:
            model.tokenizer.save(folder / "tokenizer")
        differences = _compare(model, importer, folder)
        left_out = dict.fromkeys(unknown, "the published files have no place for it")
        write_card(folder, model, usage=_USAGE, left_out=left_out, library="hi-ml-multimodal")
    return Exported(folder=Path(out), differences=differences, left_out=left_out)


_USAGE = f"""from health_multimodal.image.model.model import ImageModel
path = "FOLDER/{IMAGE_FILE}"
image_model = ImageModel(img_encoder_type="resnet50", joint_feature_size=128, pretrained_model_path=path)
text_weights = torch.load("FOLDER/{TEXT_FILE}", weights_only=True)  # of CXRBertModel: load_state_dict"""


def _unused_classifier(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return zeros for the ImageNet classifier, which the authors' loader requires and never uses."""
    width = max(tensor.shape[0] for key, tensor in tensors.items() if tensor.ndim and key.startswith(_LAST))
    return {f"{_CLASSIFIER}.weight": torch.zeros(_CLASSES, width), f"{_CLASSIFIER}.bias": torch.zeros(_CLASSES)}


def _compare(model: Any, importer: Importer, folder: Path) -> dict[str, float]:
    """Import the files, and return the differences of the embeddings of random inputs."""
    files: dict[str, Any] = {"text_file": folder / TEXT_FILE, "tokenizer": model.tokenizer}
    again: Any = import_checkpoint(importer.name, folder / IMAGE_FILE, **files).model
    pixels, ids_BT = random_pixels(model.image_encoder), random_ids(model.text_encoder, None)
    mask_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    (new_image, new_text), (image, text) = (
        (each.encode_image(pixels), each.encode_text(ids_BT, mask_BT)) for each in (again, model)
    )
    return {
        "image": difference("the embedding of an image", new_image, image),
        "text": difference("the embedding of a text", new_text, text),
    }
