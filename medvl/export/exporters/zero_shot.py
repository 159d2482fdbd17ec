"""Zero-shot scores of an exported dual-encoder: encoders of transformers with the model's
projection heads.

`medvl export --to huggingface` copies this file into the exported folder. It needs torch,
transformers and safetensors, timm for image encoders of timm, and medvl only where a folder of an
encoder holds `encoder.json`.

    from zero_shot import load

    model = load("FOLDER")
    # normalized floats: README.md has size, mean and standard deviation
    image_NE = model.encode_image(pixels_BCHW)
    text_ME = model.encode_text(["Large left pleural effusion.", "No pleural effusion."])
    similarity_NM = image_NE @ text_ME.T
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

SETTINGS = "zero_shot.json"
HEADS = "heads.safetensors"
LAYERS = {layer.__name__: layer for layer in (nn.Linear, nn.LayerNorm, nn.ReLU, nn.GELU)}


class DualEncoder(nn.Module):
    """Image and text encoder with their heads; `folder` is the exported folder, which may have
    been moved.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        from transformers import AutoTokenizer

        self.settings: Mapping[str, Any] = json.loads((folder / SETTINGS).read_text())
        self.encoders = nn.ModuleDict()
        self.heads = nn.ModuleDict()
        for side in ("image", "text"):
            self.encoders[side] = _load_encoder(
                folder / f"{side}_encoder", self.settings[side]["arguments"]
            )
            self.heads[side] = make_head(self.settings[side]["head"])
        self.heads.load_state_dict(load_file(folder / HEADS))
        self.tokenizer: Any = None
        if self.settings["max_tokens"] is not None:
            self.tokenizer = AutoTokenizer.from_pretrained(folder / "text_encoder")

    @torch.no_grad()
    def encode_image(self, pixels_BCHW: Tensor) -> Tensor:
        """Return (B, E), L2-normalized, from normalized pixels."""
        output = self.encoders["image"](pixels_BCHW)
        pooled_BD = pool_image(output, self.settings["image"]["pool"])
        return F.normalize(self.heads["image"](pooled_BD), dim=-1)

    @torch.no_grad()
    def encode_text(self, texts: Sequence[str] | Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """Return (B, E), L2-normalized, from strings, or from token ids (B, T) with their mask."""
        if not isinstance(texts, Tensor):
            limits: dict[str, Any] = {
                "padding": True,
                "truncation": True,
                "max_length": self.settings["max_tokens"],
            }
            tokens = self.tokenizer(list(texts), return_tensors="pt", **limits)
            texts = tokens["input_ids"]
            mask_BT = tokens["attention_mask"]
        assert mask_BT is not None, "token ids need their mask"
        if self.settings["text"]["pool"] == "medvl":
            pooled_BD = self.encoders["text"](texts, mask_BT.bool()).pooled_BD
        else:
            output = self.encoders["text"](input_ids=texts, attention_mask=mask_BT.long())
            pooled_BD = pool_text(
                output.last_hidden_state, mask_BT.bool(), self.settings["text"]["pool"]
            )
        return F.normalize(self.heads["text"](pooled_BD), dim=-1)


def load(folder: Path | str = Path(__file__).parent) -> DualEncoder:
    """Load the folder, in eval mode."""
    return DualEncoder(Path(folder)).eval()


def make_head(layers: Sequence[Sequence[Any]]) -> nn.Sequential:
    """Return the head with these layers, each a name of `LAYERS` and its arguments."""
    return nn.Sequential(*(LAYERS[name](*arguments) for name, *arguments in layers))


def pool_image(output: Any, pool: str) -> Tensor:
    """Return one vector (B, D) for each image from the output of an encoder."""
    if pool == "medvl":
        vector_BD: Tensor = output.pooled_BD
    elif pool == "pooler":
        vector_BD = output.pooler_output.flatten(1)
    elif pool == "first":
        vector_BD = output.last_hidden_state[:, 0]
    else:
        states = output.last_hidden_state
        vector_BD = states.flatten(2).mean(dim=2) if states.ndim == 4 else states.mean(dim=1)
    return vector_BD


def pool_text(states_BTD: Tensor, mask_BT: Tensor, pool: str) -> Tensor:
    """Return one vector (B, D) for each text: of its first or last token, or the mean or maximum
    over its tokens.
    """
    if pool == "cls":
        return states_BTD[:, 0]
    if pool == "eos":
        return states_BTD[torch.arange(len(mask_BT)), mask_BT.sum(dim=1) - 1]
    if pool == "mean":
        return (states_BTD * mask_BT[:, :, None]).sum(dim=1) / mask_BT.sum(dim=1, keepdim=True)
    return states_BTD.masked_fill(~mask_BT[:, :, None], float("-inf")).amax(dim=1)


def _load_encoder(folder: Path, arguments: Mapping[str, Any]) -> nn.Module:
    if (folder / "encoder.json").is_file():
        from medvl.export import load_encoder

        return load_encoder(folder)
    from transformers import AutoModel

    net: nn.Module = AutoModel.from_pretrained(folder, **arguments)
    return net
