"""Export to ONNX: one file per encoder, with its head and the normalization of pixels."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medvl.common.files import new_folder
from medvl.errors import ConfigError
from medvl.export.exporters.common import (
    Exported,
    difference,
    random_ids,
    require_encoders,
    write_card,
)
from medvl.models.base import System
from medvl.models.dual_encoders.bases.base import DualEncoder

_NEEDED = ("onnx", "onnxscript")
_OPSET = 18
_USED = ("image_encoder", "text_encoder", "image_head", "text_head")
_NOT_COMPARED = float("nan")


class ImageTower(nn.Module):
    """Map uint8 pixels (B, C, H, W) to a dual-encoder's embedding; for other systems, to pooled
    vector and regions.
    """

    outputs: Sequence[str]

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.outputs = (
            ("image_embedding",)
            if isinstance(model, DualEncoder)
            else ("image_pooled", "image_regions")
        )

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs in the order of `outputs`."""
        if isinstance(self.model, DualEncoder):
            return (self.model.encode_image(pixels),)
        features = self.model.image_encoder(pixels)
        return features.pooled_BD, features.patches_BPD


class TextTower(nn.Module):
    """Map ids and mask (B, T), int64, to a dual-encoder's embedding; for other systems, to
    pooled vector and tokens.
    """

    outputs: Sequence[str]

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.outputs = (
            ("text_embedding",)
            if isinstance(model, DualEncoder)
            else ("text_pooled", "text_tokens")
        )

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs in the order of `outputs`; the mask is 1 on real tokens."""
        if isinstance(self.model, DualEncoder):
            return (self.model.encode_text(ids, mask.bool()),)
        features = self.model.text_encoder(ids, mask.bool())
        return features.pooled_BD, features.tokens_BTD


def export_onnx(model: System, out: Path | str) -> Exported:
    """Write `image_tower.onnx` and `text_tower.onnx`, for any batch size and text length.

    If onnxruntime is installed, its outputs are compared with medvl's before the folder is kept;
    otherwise the differences are NaN.

    Args:
        model: any system with an image and a text encoder.
        out: new folder.

    Raises:
        ConfigError: onnx or onnxscript is not installed, or the model does not have both encoders.
        CheckpointError: onnxruntime's outputs differ.
    """
    lacking = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        raise ConfigError(
            f"not installed: {' and '.join(lacking)}; run pip install 'medvl[onnx]'", "missing"
        )
    model, _ = require_encoders(model)
    model.eval()
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (2, *_image_shape(model)), generator=generator, dtype=torch.uint8)
    ids = random_ids(
        model.text_encoder, None if model.tokenizer is None else model.tokenizer.sep_id
    )
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    batch = torch.export.Dim("batch")
    tokens = torch.export.Dim("tokens", max=model.text_encoder.max_tokens)
    with new_folder(Path(out)) as folder, torch.no_grad():
        differences = {
            **_write(
                ImageTower(model),
                {"pixels": pixels},
                {"pixels": {0: batch}},
                folder / "image_tower.onnx",
            ),
            **_write(
                TextTower(model),
                {"ids": ids, "mask": mask},
                {name: {0: batch, 1: tokens} for name in ("ids", "mask")},
                folder / "text_tower.onnx",
            ),
        }
        left_out = {
            name: "neither file uses it"
            for name, child in model.named_children()
            if name not in _USED and any(True for _ in child.parameters())
        }
        if model.tokenizer is not None:
            model.tokenizer.save(folder / "tokenizer")
        write_card(
            folder,
            model,
            usage=_usage(model),
            left_out=left_out,
            library="onnx",
            inputs=_inputs(model),
        )
    return Exported(folder=Path(out), differences=differences, left_out=left_out)


def _image_shape(model: Any) -> tuple[int, int, int]:
    """Return channels, height and width of the pixels of `image_tower.onnx`."""
    encoder = model.image_encoder
    side: int = getattr(model.config, "image_size", encoder.image_size[0])
    return encoder.in_channels, side, side


def _usage(model: Any) -> str:
    """Return code that calls both files on an image and, where the model has a tokenizer, on a
    text.
    """
    fields = ", ".join(
        f"{name}={value!r}" for name, value in model.transform.settings().items() if value
    )
    channels = _image_shape(model)[0]
    grey = ".expand(-1, 3, -1, -1)" if channels == 3 else ""
    pixels = f'EvalTransform({fields})("image.png"){grey}.numpy()'
    lines = [
        "import onnxruntime",
        f"from medvl.data import "
        f"EvalTransform{'' if model.tokenizer is None else ', load_tokenizer'}",
        "",
        'image_tower = onnxruntime.InferenceSession("FOLDER/image_tower.onnx")',
        'text_tower = onnxruntime.InferenceSession("FOLDER/text_tower.onnx")',
        f"pixels = {pixels}",
    ]
    if model.tokenizer is None:
        lines.append("ids, mask = ...  # int64 arrays; the checkpoint has no tokenizer")
    else:
        lines += [
            'tokenizer = load_tokenizer("FOLDER/tokenizer")',
            'ids, mask = (each.long().numpy() for each in tokenizer(["Small left pleural '
            'effusion."]))',
        ]
    images, texts = (", ".join(tower.outputs) for tower in (ImageTower(model), TextTower(model)))
    return "\n".join(
        [
            *lines,
            f'[{images}] = image_tower.run(None, {{"pixels": pixels}})',
            f'[{texts}] = text_tower.run(None, {{"ids": ids, "mask": mask}})',
        ]
    )


def _inputs(model: Any) -> list[str]:
    """Return lines of the card about the inputs of both files."""
    channels, height, width = _image_shape(model)
    grey = "" if channels == 1 else "; a grey image three times"
    return [
        f"`pixels`: uint8, images x {channels} x {height} x {width}, 0 to 255{grey}. "
        f"image_tower.onnx scales and "
        "normalises them; medvl is only needed to cut images as in training.",
        f"`ids`, `mask`: int64, texts x tokens, at most {model.text_encoder.max_tokens} tokens; "
        "the mask is 1 on real tokens and 0 on padding, which follows them.",
    ]


def _write(
    tower: Any, inputs: dict[str, Tensor], shapes: dict[str, Any], path: Path
) -> dict[str, float]:
    torch.onnx.export(
        tower.eval(),
        tuple(inputs.values()),
        str(path),
        input_names=list(inputs),
        output_names=list(tower.outputs),
        dynamic_shapes=tuple(shapes.values()),
        opset_version=_OPSET,
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    names = [output.replace("_", " ") for output in tower.outputs]
    if importlib.util.find_spec("onnxruntime") is None:
        return dict.fromkeys(names, _NOT_COMPARED)
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    # a batch size other than the traced one
    second = {name: tensor[1:] for name, tensor in inputs.items()}
    outputs = session.run(None, {name: tensor.numpy() for name, tensor in second.items()})
    return {
        name: difference(f"the {name}", torch.from_numpy(value), expected)
        for name, value, expected in zip(names, outputs, tower(*second.values()), strict=True)
    }
