"""Small folders in the layout of transformers, with random weights, written by transformers."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import nn

from medvl.data.tokenizer.files import byte_characters

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TOWER = {**SIZES, "intermediate_size": 64}
PIECES = ["<pad>", "</s>", "<unk>", "▁no", "▁effusion", "▁", *"nofuseia", "▁small", "▁left", "_"]
TEXTS = ["Small left EFFUSION, no fusion.", "no_effusion; (no) a fusion's", "fuse?", ""]


def randomize(model: nn.Module) -> Any:
    """Return the model in eval mode with weights that are far from their initial values."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2, generator=generator)
    return model.eval()


def clip_model(**vision: Any) -> Any:
    """Return a CLIPModel with an embedding of 24 numbers."""
    import transformers

    config = transformers.CLIPConfig(
        vision_config={**TOWER, "image_size": 32, "patch_size": 16, **vision},
        text_config={
            **TOWER, "vocab_size": 516, "max_position_embeddings": 20, "eos_token_id": 513,
            "bos_token_id": 512, "pad_token_id": 1,
        },
        projection_dim=24,
    )  # fmt: skip
    model = randomize(transformers.CLIPModel(config))
    nn.init.constant_(model.logit_scale, 2.5)
    return model


def siglip_model(**vision: Any) -> Any:
    """Return a SiglipModel whose texts are padded to 20 tokens."""
    import transformers

    config = transformers.SiglipConfig(
        vision_config={**TOWER, "image_size": 32, "patch_size": 16, **vision},
        text_config={
            **TOWER, "vocab_size": 24, "max_position_embeddings": 20, "projection_size": 32,
            "bos_token_id": 1, "eos_token_id": 1,
        },
    )  # fmt: skip
    model = randomize(transformers.SiglipModel(config))
    nn.init.constant_(model.logit_scale, 2.5)
    nn.init.constant_(model.logit_bias, -3.0)
    return model


def save_clip_tokenizer(folder: Path, **settings: Any) -> Any:
    """Write a tokenizer of bytes with CLIP's rules, of 514 ids; return that of transformers."""
    import transformers

    letters = list(byte_characters().values())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters)]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = transformers.CLIPTokenizer(
        vocab=vocabulary, merges=[], model_max_length=20, **settings
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_siglip_tokenizer(folder: Path, kind: str = "SiglipTokenizer", **settings: Any) -> None:
    """Write a vocabulary of pieces without a first token; the class cleans the texts."""
    pieces = [(piece, -float(rank) / 4) for rank, piece in enumerate(dict.fromkeys(PIECES))]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=2))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    backend.add_special_tokens(["<pad>", "</s>", "<unk>"])
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": kind, "eos_token": "</s>", "pad_token": "</s>"}
    config |= {"unk_token": "<unk>", "model_max_length": 20, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def save_processor(folder: Path, kind: str, **settings: Any) -> Any:
    """Write an image processor of 32 pixels; return that of transformers."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    sizes: dict[str, Any] = {"size": {"height": 32, "width": 32}}
    if kind == "clip":
        sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    network: Any = CLIPImageProcessorPil if kind == "clip" else SiglipImageProcessorPil
    processor = network(**{**sizes, **settings})
    processor.save_pretrained(folder)
    return processor


def change(path: Path, **fields: Any) -> None:
    """Change fields of a JSON file; None removes one."""
    content = {**json.loads(path.read_text()), **fields}
    kept = {key: value for key, value in content.items() if value is not None}
    path.write_text(json.dumps(kept))
