"""ConVIRT as users write it with timm and transformers: the stock forms beside medvl's step."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from measure.timing import Run, repeat

LR, WEIGHT_DECAY = 1e-5, 1e-2
WIDTH, TEMPERATURE, IMAGE_WEIGHT = 512, 0.1, 0.75


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """How the stock model is written."""

    name: str
    channels_last: bool = True
    mask: bool = False
    """Pass the mask to BERT, and pool real tokens only."""
    compiled: bool = True
    """Compile each tower; heads and loss stay eager."""
    by_layer: bool = False
    """Compile each layer of BERT alone, in a sixth of the time, instead of the whole of it."""
    attention_dropout: float = 0.1
    frozen_layers: int = 0
    """Layers of BERT that are frozen together with its embeddings."""


PEERS = Form(
    name="stock: peers' style, eager, NCHW, mask", channels_last=False, mask=True, compiled=False
)
COMPILED = Form(name="stock: channels last, no mask, towers compiled")
PADDED = Form(
    name="stock: padded to 128, mask, image tower and BERT's layers compiled",
    mask=True,
    by_layer=True,
    attention_dropout=0.0,
)
FROZEN = dataclasses.replace(PADDED, frozen_layers=6)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the towers; the defaults are the published ones."""

    image: str = "resnet50"
    bert: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of BERT's configuration."""
    vocabulary: int = 28_996


class StockConVIRT(nn.Module):
    """timm's network and transformers' BERT with a head of two layers each."""

    def __init__(self, form: Form, sizes: Sizes) -> None:
        import timm
        import transformers

        super().__init__()
        config = transformers.BertConfig(
            vocab_size=sizes.vocabulary,
            attention_probs_dropout_prob=form.attention_dropout,
            **sizes.bert,
        )
        self.form = form
        image: Any = timm.create_model(sizes.image, num_classes=0)
        self.image, width = image, image.num_features
        self.text: Any = transformers.BertModel(config, add_pooling_layer=False)
        self.image_head, self.text_head = head(width), head(config.hidden_size)
        for part in (self.text.embeddings, *self.text.encoder.layer[: form.frozen_layers]):
            part.requires_grad_(not form.frozen_layers)

    def compile_towers(self) -> None:
        """Compile both towers, or the image tower and BERT's layers, for fixed shapes."""
        for part in (
            self.image,
            *(self.text.encoder.layer if self.form.by_layer else (self.text,)),
        ):
            part.compile(dynamic=False)

    def forward(self, image_BCHW: Tensor, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Return the loss."""
        image_BE = self.image_head(self.image(image_BCHW))
        states_BTD = self.text(
            ids_BT, attention_mask=mask_BT if self.form.mask else None
        ).last_hidden_state
        if self.form.mask:
            states_BTD = states_BTD.masked_fill(
                ~mask_BT[:, :, None].bool(), torch.finfo(states_BTD.dtype).min
            )
        return contrast(image_BE, self.text_head(states_BTD.amax(dim=1)))


def head(width: int) -> nn.Module:
    """Return a projection head."""
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, WIDTH))


def contrast(image_BE: Tensor, text_BE: Tensor) -> Tensor:
    """Return ConVIRT's loss of a batch, in float32."""
    image_BE, text_BE = (F.normalize(part_BE.float(), dim=1) for part_BE in (image_BE, text_BE))
    logits_BB = image_BE @ text_BE.T / TEMPERATURE
    target_B = torch.arange(len(logits_BB), device=logits_BB.device)
    image_to_text, text_to_image = (
        F.cross_entropy(logits_BB, target_B),
        F.cross_entropy(logits_BB.T, target_B),
    )
    return IMAGE_WEIGHT * image_to_text + (1 - IMAGE_WEIGHT) * text_to_image


def stock_step(
    form: Form, sizes: Sizes, image_BCHW: Tensor, ids_BT: Tensor, mask_BT: Tensor
) -> Run:
    """Return steps with float32 weights, bf16 autocast and fused AdamW, on inputs that are on
    the device.
    """
    device = image_BCHW.device
    torch.manual_seed(0)
    model: Any = StockConVIRT(form, sizes).to(device).train()
    if form.channels_last:
        model.to(memory_format=torch.channels_last)
        image_BCHW = image_BCHW.contiguous(memory_format=torch.channels_last)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=LR, weight_decay=WEIGHT_DECAY, fused=device.type == "cuda" or None
    )
    if form.compiled:
        model.compile_towers()

    def step(number: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(image_BCHW, ids_BT, mask_BT)
        loss.backward()
        optimizer.step()

    return repeat(step)


@contextlib.contextmanager
def untuned() -> Iterator[None]:
    """Use torch's defaults: no search for convolution algorithms, no TensorFloat32 in matrix
    products.

    Only for forms that are not compiled: a change of these flags would compile a model again.
    """
    matmul, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.benchmark = benchmark
