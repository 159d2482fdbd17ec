"""medvl to ONNX: one file a tower, heads included, the preparation of pixels inside."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medvl.common.folders import new_folder
from medvl.encoders import ImageEncoder
from medvl.errors import ConfigError
from medvl.export.exporters.common import Exported, difference, random_ids, write_card
from medvl.models.base import System, TwoTowers
from medvl.models.dual_encoders.base import DualEncoder

_NEEDED = ("onnx", "onnxscript")
_OPSET = 18
_USED = ("image_encoder", "text_encoder", "image_head", "text_head")
_NOT_COMPARED = float("nan")


class ImageTower(nn.Module):
    """uint8 pixels (B, C, H, W) to the embedding of a dual-encoder; of another system, to pooled vector and regions."""

    outputs: Sequence[str]

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.outputs = ("image_embedding",) if isinstance(model, DualEncoder) else ("image_pooled", "image_regions")

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """In the order of `outputs`."""
        if isinstance(self.model, DualEncoder):
            return (self.model.encode_image(pixels),)
        features = self.model.image_encoder(pixels)
        return features.pooled_BD, features.patches_BPD


class TextTower(nn.Module):
    """ids and mask (B, T), int64, to the embedding of a dual-encoder; else to pooled vector and tokens."""

    outputs: Sequence[str]

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.outputs = ("text_embedding",) if isinstance(model, DualEncoder) else ("text_pooled", "text_tokens")

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        """In the order of `outputs`; the mask is 1 on real tokens."""
        if isinstance(self.model, DualEncoder):
            return (self.model.encode_text(ids, mask.bool()),)
        features = self.model.text_encoder(ids, mask.bool())
        return features.pooled_BD, features.tokens_BTD


def export_onnx(model: System, out: Path | str) -> Exported:
    """Write `image_tower.onnx` and `text_tower.onnx`, with any number of images and of texts of any length.

    Where onnxruntime is installed, its outputs are compared with medvl's before anything is kept; where it is not,
    the differences are NaN.

    Args:
        model: any system with two towers.
        out: new folder.

    Raises:
        ConfigError: onnx or onnxscript is not installed, or the model has no two towers.
        CheckpointError: onnxruntime computes something else.
    """
    lacking = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        raise ConfigError(f"{' and '.join(lacking)} is not installed: pip install 'medvl[onnx]'")
    if not isinstance(model, TwoTowers) or not isinstance(model.image_encoder, ImageEncoder):
        raise ConfigError(f"{model.name} has no two towers of its own: export the system that it was made of")
    model.eval()
    encoder = model.image_encoder
    generator = torch.Generator().manual_seed(0)
    side = (getattr(model.config, "image_size", encoder.image_size[0]),) * 2
    pixels = torch.randint(256, (2, encoder.in_channels, *side), generator=generator, dtype=torch.uint8)
    ids = random_ids(model.text_encoder, None if model.tokenizer is None else model.tokenizer.sep_id)
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    batch, tokens = torch.export.Dim("batch"), torch.export.Dim("tokens", max=model.text_encoder.max_tokens)
    with new_folder(Path(out)) as folder, torch.no_grad():
        differences = {
            **_write(ImageTower(model), {"pixels": pixels}, {"pixels": {0: batch}}, folder / "image_tower.onnx"),
            **_write(
                TextTower(model),
                {"ids": ids, "mask": mask},
                {name: {0: batch, 1: tokens} for name in ("ids", "mask")},
                folder / "text_tower.onnx",
            ),
        }
        usage = 'import onnxruntime\nimage_tower = onnxruntime.InferenceSession("FOLDER/image_tower.onnx")'
        left_out = {
            name: "neither tower runs it"
            for name, child in model.named_children()
            if name not in _USED and any(True for _ in child.parameters())
        }
        if model.tokenizer is not None:
            model.tokenizer.save(folder / "tokenizer")
        write_card(folder, model, usage=usage, left_out=left_out, library="onnx")
    return Exported(folder=Path(out), differences=differences, left_out=left_out)


def _write(tower: Any, inputs: dict[str, Tensor], shapes: dict[str, Any], path: Path) -> dict[str, float]:
    """One file, and how far its outputs are from the tower's."""
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
    fewer = {name: tensor[1:] for name, tensor in inputs.items()}  # another batch than it was traced with
    found = session.run(None, {name: tensor.numpy() for name, tensor in fewer.items()})
    return {
        name: difference(f"the {name}", torch.from_numpy(value), expected)
        for name, value, expected in zip(names, found, tower(*fewer.values()), strict=True)
    }
