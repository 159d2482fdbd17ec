"""An imported LViT against the published network, written out from the file's own keys, on a
small random file.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from helpers.published import random_tensors
from torch import Tensor

from medvl.data import train_wordpiece
from medvl.encoders import create_text_encoder
from medvl.export import import_checkpoint
from medvl.models import LViT
from medvl.schema import Batch

WIDTH, SIZE, WORDS, TEXT = 8, 32, 3, 64
TEXTS = ["bilateral infection, two areas", "one area, lower right lung"] * 3
DIMS, PATCHES, TOKENS = (8, 16, 32, 64), (16, 8, 4, 2), 4
Shapes = dict[str, tuple[int, ...]]


def conv(name: str, outputs: int, *kernel: int) -> Shapes:
    return {f"{name}.weight": (outputs, *kernel), f"{name}.bias": (outputs,)}


def conv_norm(name: str, outputs: int, *kernel: int) -> Shapes:
    norm = {
        f"{name}.norm.{leaf}": (outputs,)
        for leaf in ("weight", "bias", "running_mean", "running_var")
    }
    return {
        **conv(f"{name}.conv", outputs, *kernel),
        **norm,
        f"{name}.norm.num_batches_tracked": (),
    }


def published_file() -> dict[str, Tensor]:
    shapes = conv_norm("inc", WIDTH, 3, 3, 3) | conv("outc", 1, WIDTH, 1, 1)
    widths, outs, texts = (*DIMS, DIMS[3]), (DIMS[0], *DIMS[:3]), (*DIMS, TEXT)
    for level, (dim, patch) in enumerate(zip(DIMS, PATCHES, strict=True)):
        one = level + 1
        for side, first, last in (("down", dim, widths[one]), ("up", 2 * dim, outs[level])):
            shapes |= conv_norm(f"{side}{one}.nConvs.0", last, first, 3, 3)
            shapes |= conv_norm(f"{side}{one}.nConvs.1", last, last, 3, 3)
            name = f"{side}Vit{level or ''}"
            shapes |= {f"{name}.embeddings.position_embeddings": (1, TOKENS, dim)}
            shapes |= conv(f"{name}.embeddings.patch_embeddings", dim, dim, patch, patch)
            shapes |= conv(f"{name}.norm", dim) | conv(f"{name}.head", 1, dim)
            block = f"{name}.Encoder_blocks.0"
            shapes |= conv(f"{block}.norm1", dim) | conv(f"{block}.norm2", dim)
            shapes |= conv(f"{block}.attn.qkv", 3 * dim, dim) | conv(f"{block}.attn.proj", dim, dim)
            shapes |= conv(f"{block}.mlp.fc1", 4 * dim, dim) | conv(
                f"{block}.mlp.fc2", dim, 4 * dim
            )
            shapes |= conv_norm(f"{name}.CTBN", dim // 2, dim, 3) | conv_norm(
                f"{name}.CTBN2", dim, 2 * dim, 3
            )
            shapes |= conv_norm(f"{name}.CTBN3", TOKENS, WORDS, 3)
        for name in (f"up{one}.pixModule", f"pix_module{one}"):
            shapes |= {f"{name}.conv_{kind}.weight": (dim, dim, 1, 1) for kind in ("avg", "max")}
            shapes |= conv(f"{name}.bottleneck.0", 6, 3) | conv(f"{name}.bottleneck.2", 1, 6)
            shapes |= conv(f"{name}.conv_sig.0", dim, dim, 1, 1)
        shapes |= conv_norm(f"reconstruct{one}", dim, dim, 1, 1)
        shapes |= conv(f"text_module{one}", dim, texts[one], 3)
    return random_tensors(shapes)


class Published:
    """The released forward pass in eval mode."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.t = tensors

    def pair(self, name: str) -> tuple[Tensor, Tensor]:
        return self.t[f"{name}.weight"], self.t[f"{name}.bias"]

    def conv_norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.pair(f"{name}.conv")
        convolve = F.conv1d if weight.ndim == 3 else F.conv2d
        x = convolve(x, weight, bias, padding=weight.shape[-1] // 2)
        mean, variance = (self.t[f"{name}.norm.running_{leaf}"] for leaf in ("mean", "var"))
        return F.batch_norm(x, mean, variance, *self.pair(f"{name}.norm")).relu()

    def block(self, name: str, x: Tensor) -> Tensor:
        name, width = f"{name}.Encoder_blocks.0", x.shape[2]
        normed = F.layer_norm(x, (width,), *self.pair(f"{name}.norm1"))
        qkv = F.linear(normed, *self.pair(f"{name}.attn.qkv"))
        query, key, value = qkv.reshape(len(x), -1, 3, 8, width // 8).permute(2, 0, 3, 1, 4)
        weights = (query @ key.transpose(2, 3) * (width // 8) ** -0.5).softmax(dim=3)
        attended = (weights @ value).transpose(1, 2).flatten(2)
        x = x + F.linear(attended, *self.pair(f"{name}.attn.proj"))
        normed = F.layer_norm(x, (width,), *self.pair(f"{name}.norm2"))
        return x + F.gelu(
            F.linear(
                F.gelu(F.linear(normed, *self.pair(f"{name}.mlp.fc1"))),
                *self.pair(f"{name}.mlp.fc2"),
            )
        )

    def down(self, level: int, x: Tensor, coarser: Tensor, text: Tensor) -> Tensor:
        name = f"downVit{level or ''}"
        y = F.conv2d(x, *self.pair(f"{name}.embeddings.patch_embeddings"), stride=PATCHES[level])
        y = y.flatten(2).transpose(1, 2) + self.t[f"{name}.embeddings.position_embeddings"]
        if level == 0:
            return self.block(name, y + self.conv_norm(f"{name}.CTBN3", text))
        y = self.conv_norm(f"{name}.CTBN", self.block(name, y).transpose(1, 2)).transpose(1, 2)
        return torch.cat([y, coarser], dim=2)

    def up(self, one: int, x: Tensor, skip: Tensor) -> Tensor:
        name = f"up{one}.pixModule"
        mean = F.conv2d(skip, self.t[f"{name}.conv_avg.weight"]).relu().mean(dim=1, keepdim=True)
        most = F.conv2d(skip, self.t[f"{name}.conv_max.weight"]).relu().amax(dim=1, keepdim=True)
        three = torch.cat([mean, most, mean + most], dim=1).transpose(1, 3)
        three = F.linear(
            F.linear(three, *self.pair(f"{name}.bottleneck.0")).relu(),
            *self.pair(f"{name}.bottleneck.2"),
        )
        x = torch.cat([three.transpose(1, 3) * skip, F.interpolate(x, scale_factor=2)], dim=1)
        return self.conv_norm(f"up{one}.nConvs.1", self.conv_norm(f"up{one}.nConvs.0", x))

    def __call__(self, image: Tensor, words: Tensor) -> Tensor:
        text = words.transpose(1, 2)
        for one in (4, 3, 2, 1):
            text = F.conv1d(text, *self.pair(f"text_module{one}"), padding=1)
        text, x = text.transpose(1, 2), self.conv_norm("inc", image)
        features, tokens = [], [x]
        for level in range(4):
            features.append(x)
            tokens.append(self.down(level, x, tokens[-1], text))
            x = self.conv_norm(f"down{level + 1}.nConvs.0", F.max_pool2d(x, 2))
            x = self.conv_norm(f"down{level + 1}.nConvs.1", x)
        coarser = None
        for level in (3, 2, 1, 0):
            y = self.block(f"upVit{level or ''}", tokens[level + 1])
            if coarser is not None:
                y = y + self.conv_norm(
                    f"upVit{level or ''}.CTBN2", coarser.transpose(1, 2)
                ).transpose(1, 2)
            coarser = y
            cells = y.transpose(1, 2).unflatten(2, (SIZE // 16, SIZE // 16))
            cells = self.conv_norm(
                f"reconstruct{level + 1}", F.interpolate(cells, scale_factor=PATCHES[level])
            )
            x = self.up(level + 1, x, features[level] + cells)
        return F.conv2d(x, *self.pair("outc"))


def test_imported_network_gives_the_published_masks(tmp_path: Path) -> None:
    tokenizer = train_wordpiece(TEXTS, vocab_size=120, min_frequency=1)
    sizes = {
        "hidden_size": TEXT,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 32,
    }
    text = create_text_encoder("bert", pretrained=False, vocab_size=tokenizer.vocab_size, **sizes)
    torch.save(text.backbone.state_dict(), tmp_path / "bert.bin")
    tensors = published_file()
    saved = {f"module.{key}": value for key, value in tensors.items()}
    torch.save(
        {"epoch": 3, "model": "LViT", "state_dict": saved}, tmp_path / "best_model-LViT.pth.tar"
    )
    imported = import_checkpoint(
        "lvit_monuseg",
        tmp_path / "best_model-LViT.pth.tar",
        text_file=tmp_path / "bert.bin",
        tokenizer=tokenizer,
    )
    model = imported.model
    assert isinstance(model, LViT)
    config = model.config
    assert (config.labels, config.image_size, config.words, config.width) == (
        ("Nucleus",),
        SIZE,
        WORDS,
        WIDTH,
    )
    image_BCHW, words_BTD = torch.rand(2, 3, SIZE, SIZE), torch.randn(2, WORDS, TEXT)
    with torch.no_grad():
        torch.testing.assert_close(
            model.network(image_BCHW, words_BTD), Published(tensors)(image_BCHW, words_BTD)
        )
        ids_BT, mask_BT = tokenizer(TEXTS[:2])
        batch = Batch(
            keys=["0", "1"],
            image_BCHW=(image_BCHW * 255).to(torch.uint8),
            ids_BT=ids_BT,
            mask_BT=mask_BT,
            labels_BL=torch.empty(2, 0),
            texts=TEXTS[:2],
        )
        assert model.mask_logits(batch).shape == (2, 1, SIZE, SIZE)
