"""Export of the towers of transformers: a whole SigLIP or CLIP in one folder with its image
processor and tokenizer, or one tower alone.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.common.files import write_json
from medvl.data.tokenizer.files import CONFIG_FILE as TOKENIZER_CONFIG, MODEL_FILE
from medvl.data.tokenizer.limits import PUNCTUATION
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.encoders.hugging_face import KERNELS, PROCESSOR_FILES
from medvl.errors import ConfigError
from medvl.export.exporters.common import difference, random_ids, random_pixels
from medvl.export.importers.hugging_face import CLIP_RULES, SIGLIP_RULES
from medvl.export.importers.key_map import to_published
from medvl.models.base import System
from medvl.models.dual_encoders.clip import CLIP

_PAIRS = {
    ("SiglipVisionModel", "SiglipTextModel"): ("SiglipModel", SIGLIP_RULES),
    ("CLIPVisionModelWithProjection", "CLIPTextModel"): ("CLIPModel", CLIP_RULES),
}
"""Classes of both towers -> class of the whole, and the rules of its names."""
_PROCESSOR = "image processor"


def is_pair(model: System) -> bool:
    """Return whether a model is a SigLIP or CLIP on both towers of one class of transformers."""
    if not isinstance(model, CLIP) or _names(model) not in _PAIRS:
        return False
    has_bias = hasattr(model, "logit_bias")
    whole = _PAIRS[_names(model)][0]
    projected = model.text_encoder.projection is not None and model.text_encoder.pool == "eos"
    return projected and has_bias == (whole == "SiglipModel")


def _names(model: Any) -> tuple[str, str]:
    return (
        type(model.image_encoder.backbone).__name__,
        type(model.text_encoder.backbone).__name__,
    )


def write_pair(model: Any, folder: Path) -> tuple[dict[str, float], dict[str, str], str]:
    """Write a whole model with its tokenizer and image processor.

    Returns the differences of the reloaded model's outputs, the parts that were left out with the
    reason, and the code that loads the folder.
    """
    import transformers

    image: ImageEncoder = model.image_encoder
    text: TextEncoder = model.text_encoder
    name, rules = _PAIRS[_names(model)]
    network: Any = getattr(transformers, name)
    vision_config: Any = image.backbone.config
    text_config: Any = text.backbone.config
    sizes = {} if name == "SiglipModel" else {"projection_dim": image.feature_dim}
    config = network.config_class(
        vision_config=vision_config.to_dict(), text_config=text_config.to_dict(), **sizes
    )
    net = network(config)
    renamed, unknown = to_published(model.state_dict(), rules)
    assert not unknown, unknown
    state = net.state_dict()
    net.load_state_dict({key: tensor.reshape(state[key].shape) for key, tensor in renamed.items()})
    net.save_pretrained(folder)
    left_out = {}
    if model.tokenizer is not None:
        save_tokenizer(model.tokenizer, folder)
    processor = describe_processor(model.transform, image)
    if processor is None:
        kernel = model.transform.resize
        left_out[_PROCESSOR] = f"transformers has none that resizes as {kernel!r}: see its inputs"
    else:
        write_json(folder / PROCESSOR_FILES[0], processor)
    resized = image.image_size != _sides(vision_config.image_size)
    options = {"interpolate_pos_encoding": True} if resized else {}
    differences = _compare(model, folder, options)
    usage = 'from transformers import AutoModel\nmodel = AutoModel.from_pretrained("FOLDER")'
    if resized:
        usage += "\n# model(..., interpolate_pos_encoding=True): images have another size"
    return differences, left_out, usage


def _sides(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _compare(model: Any, folder: Path, options: Mapping[str, Any]) -> dict[str, float]:
    import transformers

    reloaded = transformers.AutoModel.from_pretrained(folder).eval()
    text: TextEncoder = model.text_encoder
    end = getattr(text.backbone.config, "eos_token_id", None)
    is_clip = not hasattr(model, "logit_bias")
    if is_clip and not isinstance(end, int):
        raise ConfigError("CLIP's text needs an eos_token_id", "unsupported", field="text_encoder")
    last = text.vocab_size - 1 if end == 2 else end
    ids_BT = random_ids(text, last if is_clip else None)
    mask_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    pixels = random_pixels(model.image_encoder)
    output = reloaded(input_ids=full_length(text, ids_BT), pixel_values=pixels, **options)
    image_BE = model.encode_image(pixels)
    text_BE = model.encode_text(ids_BT, mask_BT)
    logits = image_BE @ text_BE.T * model.logit_scale.exp() + getattr(model, "logit_bias", 0.0)
    pairs = {
        "image embedding": (output.image_embeds, image_BE),
        "text embedding": (output.text_embeds, text_BE),
        "logits": (output.logits_per_image, logits),
    }
    return {
        name: difference(f"the {name}", actual, expected)
        for name, (actual, expected) in pairs.items()
    }


def full_length(encoder: TextEncoder, ids_BT: Tensor) -> Tensor:
    """Return ids as the processor of their model pads them: SigLIP's to full length."""
    if type(encoder.backbone).__name__ != "SiglipTextModel":
        return ids_BT
    return F.pad(ids_BT, (0, encoder.max_tokens - ids_BT.shape[1]), value=encoder.pad_id)


def describe_processor(transform: EvalTransform, image: ImageEncoder) -> dict[str, Any] | None:
    """Return the image processor of transformers that prepares images as a transform; None where
    it has none.
    """
    numbers = {kernel: number for number, kernel in KERNELS.items()}
    is_plain = transform.stored_size is None and transform.fit in ("crop", "squash")
    if transform.resize not in numbers or not is_plain:
        return None
    side = transform.size + 2 * transform.margin
    common = {
        "do_resize": True,
        "resample": numbers[transform.resize],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [image.mean[0]] * 3 if image.in_channels == 1 else list(image.mean),
        "image_std": [image.std[0]] * 3 if image.in_channels == 1 else list(image.std),
    }
    square = {"height": transform.size, "width": transform.size}
    if transform.fit == "squash":
        if transform.margin:
            return None
        return {"image_processor_type": "SiglipImageProcessor", **common, "size": square}
    if transform.crop_rounding != "down":
        return None
    return {
        "image_processor_type": "CLIPImageProcessor",
        **common,
        "size": {"shortest_edge": side},
        "do_center_crop": True,
        "crop_size": square,
    }


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer whose cleaning of texts, where transformers' class would do it in Python,
    is among the rules of its file.
    """
    tokenizer.save(folder)
    path = folder / TOKENIZER_CONFIG
    config = json.loads(path.read_text())
    steps: dict[str, list[dict[str, Any]]] = {
        "lower": [{"type": "Lowercase"}],
        "siglip": [
            {"type": "Lowercase"},
            {"type": "Replace", "pattern": {"Regex": PUNCTUATION}, "content": ""},
            {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
            {"type": "Strip", "strip_left": True, "strip_right": True},
        ],
    }
    first = steps.get(config.get("medvl_text", ""))
    if first is None:
        return
    content = json.loads((folder / MODEL_FILE).read_text())
    rest = [] if content["normalizer"] is None else [content["normalizer"]]
    content["normalizer"] = {"type": "Sequence", "normalizers": [*first, *rest]}
    (folder / MODEL_FILE).write_text(json.dumps(content, ensure_ascii=False))
    del config["medvl_text"]
    write_json(path, config)


def write_image_tower(
    encoder: ImageEncoder, folder: Path
) -> tuple[dict[str, float], dict[str, bool]]:
    """Write an image tower of transformers; return its differences and loading arguments.

    Raises ConfigError ("unsupported") for the backbone of another library.
    """
    import transformers

    net: Any = encoder.backbone
    if not isinstance(net, transformers.PreTrainedModel):
        message = f"{encoder.name} is not a model of transformers"
        raise ConfigError(message, "unsupported", field="image_encoder")
    is_clip = type(net).__name__.startswith("CLIP")
    tower: Any = net.vision_model if type(net).__name__.endswith("WithProjection") else net
    tower.save_pretrained(folder)
    arguments = {"add_pooling_layer": False} if getattr(tower, "pooler", 0) is None else {}
    reloaded = transformers.AutoModel.from_pretrained(folder, **arguments).eval()
    pixels = random_pixels(encoder)
    options = {}
    if "Dinov2" not in type(net).__name__:
        options["interpolate_pos_encoding"] = True
    states_BTD = reloaded(pixels, **options).last_hidden_state
    if is_clip:
        states_BTD = reloaded.post_layernorm(states_BTD)
    expected_BPD = encoder(pixels).patches_BPD
    actual_BPD = states_BTD[:, states_BTD.shape[1] - expected_BPD.shape[1] :]
    return {"image regions": difference("the image regions", actual_BPD, expected_BPD)}, arguments


def text_tower(encoder: TextEncoder) -> Any:
    """Return the model of transformers of a text encoder; SigLIP's gets its projection back."""
    import transformers

    net: Any = encoder.backbone
    if type(net).__name__ != "SiglipTextModel" or encoder.projection is None:
        return net
    whole = transformers.SiglipTextModel(net.config)
    assert isinstance(encoder.projection, nn.Linear)
    head = {f"head.{name}": tensor for name, tensor in encoder.projection.state_dict().items()}
    whole.load_state_dict({**net.state_dict(), **head})
    return whole.eval()
