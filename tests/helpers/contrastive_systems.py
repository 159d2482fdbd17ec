"""Small models of all contrastive systems, and a batch for each."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

import medvl
from helpers import gloria_ranks
from helpers.model_copies import created_once
from medvl.data.tokenizer.tokenizer import IGNORED
from medvl.data.transforms.masked_text import MaskedText
from medvl.models import DualEncoder
from medvl.schema import Batch

VIT = {"layers": 1, "width": 64, "patch_size": 16}
BERT = {"text_encoder": "tiny_bert", "text_arguments": {"num_hidden_layers": 1}, "vocab_size": 40}
TOWERS = {
    "image_encoder": "open_clip:ViT-B-32",
    "image_arguments": VIT,
    "image_size": 32,
    "projection_dim": 16,
    **BERT,
}
CONVIRT = {
    "image_encoder": "resnet_tiny",
    "image_size": 32,
    "projection_dim": 16,
    "frozen_text_layers": 0,
}
GRID = {"image_arguments": {"output_stride": 16}}
"""2 x 2 regions of a ResNet's 32 pixels: with one region, losses within an image are 0."""
STUDIES = ["a", "b", "a", "c", "d", "c", "e"]
PAIRS = len(STUDIES)
VOLUME = {
    "image_arguments": {"patch_size": (2, 6, 6), "embed_dim": 24, "depth": 3, "num_heads": 2},
    "volume_size": (4, 12, 12),
    "projection_dim": 16,
    **BERT,
}
VOLUMES = ("hlip", "hlip sigmoid", "ct_clip", "fvlm", "colipri")
"""Systems that read volumes."""
LOCAL = ("gloria", "mgca", "carzero")
"""Systems with words, which need a tokenizer."""


def clip(**settings: Any) -> DualEncoder:
    """No batch norm; dropout in the text encoder, in train mode."""
    torch.manual_seed(0)
    return medvl.create_model("clip", **{**TOWERS, **settings})


def siglip(**settings: Any) -> DualEncoder:
    """With denied texts."""
    torch.manual_seed(0)
    settings = {"positives": "text", "denial_weight": 0.5, **settings}
    return medvl.create_model("siglip", **TOWERS, **settings)


def convirt(**settings: Any) -> DualEncoder:
    """Batch norm in the image encoder."""
    torch.manual_seed(0)
    text = {"text_encoder": "tiny_bert", "vocab_size": 40}
    return medvl.create_model("convirt", **{**CONVIRT, **text, **settings})


def medclip(**settings: Any) -> DualEncoder:
    torch.manual_seed(0)
    tiny = {
        "text_encoder": "tiny_bert",
        "vocab_size": 40,
        "image_encoder": "resnet_tiny",
        "image_size": 32,
    }
    return medvl.create_model("medclip", **{**tiny, "projection_dim": 16, **settings})


def gloria() -> DualEncoder:
    return gloria_ranks.tiny_model(gloria_ranks.tiny_tokenizer())


def mgca(**settings: Any) -> DualEncoder:
    """Batch norm in the image encoder and in all heads."""
    torch.manual_seed(0)
    towers = {
        "image_encoder": "resnet_tiny",
        "text_encoder": "tiny_bert",
        "text_arguments": {"num_hidden_layers": 1},
    }
    sizes = {
        "image_size": 64,
        "margin": 0,
        "encoder_size": 96,
        "projection_dim": 24,
        "hidden_dim": 32,
    }
    settings = {"num_prototypes": 10, "freeze_prototypes_steps": 2, **settings}
    return medvl.create_model(
        "mgca", tokenizer=gloria_ranks.tiny_tokenizer(), **{**towers, **sizes, **settings}
    )


def lovt(name: str = "lovt") -> DualEncoder:
    """Batch norm in the image encoder, the heads and the attention between sentences and
    regions.
    """
    torch.manual_seed(0)
    return medvl.create_model(name, **CONVIRT, **BERT, **GRID, hidden_dim=24)


def mutual_info(**settings: Any) -> DualEncoder:
    torch.manual_seed(0)
    sizes = {"image_encoder": "resnet_tiny", "image_size": 32, "critic_hidden": (24, 16)}
    return medvl.create_model("mutual_info", **{**sizes, **BERT, **settings})


class EverySecondWord:
    """Masking without chance, so that all ranks and parts mask alike."""

    def __call__(
        self,
        ids_BT: torch.Tensor,
        mask_BT: torch.Tensor,
        generator: torch.Generator,
        span_BT: None = None,
    ) -> MaskedText:
        masked_BT = mask_BT & (torch.arange(ids_BT.shape[1]) % 2 == 1)
        return MaskedText(ids_BT.masked_fill(masked_BT, 4), ids_BT.masked_fill(~masked_BT, IGNORED))


def biovil(**settings: Any) -> DualEncoder:
    """All losses, with temperatures at which each of them counts."""
    torch.manual_seed(0)
    sizes = {
        "image_encoder": "resnet_tiny",
        "image_size": 32,
        "margin": 0,
        "projection_dim": 16,
        **BERT,
        **GRID,
    }
    model = medvl.create_model(
        "biovil", **{**sizes, "local_weight": 0.5, "mlm_weight": 0.5, **settings}
    )
    vars(model)["masking"] = EverySecondWord()
    return model


def bfspr(**settings: Any) -> DualEncoder:
    torch.manual_seed(0)
    return medvl.create_model("bfspr", **{**CONVIRT, **BERT, **settings})


def umrl(**settings: Any) -> DualEncoder:
    torch.manual_seed(0)
    sizes = {
        "image_encoder": "resnet_tiny",
        "image_size": 32,
        "text_arguments": {"dimension": 24},
        "vocab_size": 40,
    }
    return medvl.create_model(
        "umrl", **{**sizes, "projection_dim": 16, "hidden_dim": 24, **settings}
    )


def biovil_t(**settings: Any) -> DualEncoder:
    torch.manual_seed(0)
    sizes = {
        "image_encoder": "resnet_tiny",
        "image_size": 64,
        "margin": 0,
        "projection_dim": 16,
        **BERT,
    }
    pooler = {"pooler_dim": 16, "pooler_heads": 2, "pooler_blocks": 1}
    model = medvl.create_model("biovil_t", **{**sizes, **pooler, **settings})
    vars(model)["masking"] = EverySecondWord()
    return model


def radzero(**settings: Any) -> DualEncoder:
    torch.manual_seed(0)
    sizes = {"image_encoder": "resnet_tiny", "image_size": 32, "frozen_image": False, **BERT}
    return medvl.create_model("radzero", **{**sizes, **settings})


def stored_tokens(image_BCHW: torch.Tensor) -> torch.Tensor:
    """Return the vector and the patches of the image encoder of `radzero()`, as `medvl regions
    --all-tokens` does.
    """
    with torch.no_grad():
        features = radzero().image_encoder.eval()(image_BCHW)
    return torch.cat([features.pooled_BD[:, None], features.patches_BPD], dim=1)


def carzero(**settings: Any) -> DualEncoder:
    torch.manual_seed(0)
    towers = {
        "image_encoder": "resnet_tiny",
        "text_encoder": "tiny_bert",
        "text_arguments": {"num_hidden_layers": 1},
    }
    sizes = {
        "image_size": 64,
        "projection_dim": 24,
        "decoder_layers": 2,
        "decoder_hidden": 32,
        "head_dims": (16,),
    }
    settings = {"text_layers": 1, "init_std": None, **settings}
    return medvl.create_model(
        "carzero", tokenizer=gloria_ranks.tiny_tokenizer(), **{**towers, **sizes, **settings}
    )


def cxrclip(**settings: Any) -> DualEncoder:
    torch.manual_seed(0)
    return medvl.create_model("cxrclip", **{**TOWERS, **settings})


def hlip(**settings: Any) -> DualEncoder:
    torch.manual_seed(0)
    return medvl.create_model("hlip", **{**VOLUME, "positives": "own", **settings})


def ct_clip(**settings: Any) -> DualEncoder:
    torch.manual_seed(0)
    image = {"patch_size": (2, 6, 6), "embed_dim": 24, "depth": 1, "num_heads": 2, "head_dim": 8}
    own = {"image_arguments": image, "positives": "own"}
    return medvl.create_model("ct_clip", **{**VOLUME, **own, **settings})


def fvlm(**settings: Any) -> DualEncoder:
    """Without dropout in training too."""
    torch.manual_seed(0)
    image = {**VOLUME["image_arguments"], "patch_size": (2, 4, 4), "layers": (0, 1)}
    image["attention"] = ("study",) * 3
    settings = {"image_arguments": image, "organ_dropout": 0.0, **settings}
    model = medvl.create_model("fvlm", **{**VOLUME, **settings})
    with torch.no_grad():  # at their start queries attend to all patches equally
        model.image_head.query_tokens.normal_()
    return model


def colipri(**settings: Any) -> DualEncoder:
    torch.manual_seed(0)
    image = {"patch_size": (2, 6, 6), "embed_dim": 24, "depth": 2, "num_heads": 2}
    sizes = {"image_arguments": image, "projection_dim": 192, "pool_heads": 2, "positives": "own"}
    return medvl.create_model("colipri", **{**VOLUME, **sizes, **settings})


def created_after_zero(create: Callable[[], DualEncoder]) -> DualEncoder:
    """Return a copy of a model of seed 0."""
    torch.manual_seed(0)
    model: DualEncoder = created_once(create)
    return model


_CREATE: dict[str, Callable[[], DualEncoder]] = {
    "clip": lambda: clip(positives="study"),
    "siglip": siglip,
    "convirt": lambda: convirt(positives="either"),
    "gloria": gloria,
    "mgca": mgca,
    "lovt": lovt,
    "local_analysis": lambda: lovt("local_analysis"),
    "bfspr": lambda: bfspr(positives="text"),
    "umrl": lambda: umrl(paired_share=0.5),
    "mutual_info": lambda: mutual_info(bound="info_nce"),
    "mutual_info local": lambda: mutual_info(local_weight=0.5),
    "biovil": biovil,
    "medclip": medclip,
    "biovil_t": biovil_t,
    "radzero": radzero,
    "radzero stored": lambda: radzero(frozen_image=True),
    "carzero": carzero,
    "cxrclip": lambda: cxrclip(positives="study"),
    "hlip": lambda: hlip(positives="study"),
    "ct_clip": lambda: ct_clip(positives="text"),
    "fvlm": fvlm,
    "colipri": colipri,
    "hlip sigmoid": lambda: hlip(bias=-10.0, temperature=0.1),
}
SYSTEMS: dict[str, Callable[[], DualEncoder]] = {
    name: functools.partial(created_after_zero, create) for name, create in _CREATE.items()
}


def images_of(batch: Batch) -> torch.Tensor:
    """Return the volumes of a batch, or its images."""
    return batch.image_BCHW if batch.image_BCDHW is None else batch.image_BCDHW


def make_batch(name: str = "clip", rows: slice = slice(None)) -> Batch:
    """Return seven pairs or some of them: two equal texts, no image in the fourth, one to three
    sentences.
    """
    indices = list(range(PAIRS))[rows]
    if name in LOCAL:
        batch = gloria_ranks.make_batch(gloria_ranks.tiny_tokenizer(), indices)
    else:
        generator = torch.Generator().manual_seed(5)
        ids_BT = torch.randint(5, 40, (PAIRS, 6), generator=generator)
        ids_BT[6] = ids_BT[1]
        mask_BT = torch.arange(6) < torch.tensor([6, 4, 5, 3, 6, 2, 4])[:, None]
        sentence_BT = torch.tensor([-1, 0, 0, 1, 2, -1]).where(
            mask_BT, -1
        )  # the sixth text has one sentence
        batch = Batch(
            keys=list(map(str, indices)),
            image_BCHW=torch.randint(
                0, 256, (PAIRS, 1, 32, 32), dtype=torch.uint8, generator=generator
            )[rows],
            ids_BT=ids_BT[rows],
            mask_BT=mask_BT[rows],
            labels_BL=torch.randint(-1, 2, (PAIRS, 5), generator=generator)[rows].float(),
            texts=[""] * len(indices),
            studies=STUDIES[rows],
            sentence_BT=sentence_BT[rows],
            second_image_BCHW=torch.randint(
                0, 256, (PAIRS, 1, 32, 32), dtype=torch.uint8, generator=generator
            )[rows],
        )
    if name in VOLUMES:
        generator = torch.Generator().manual_seed(8)
        volumes = torch.randint(-1200, 600, (PAIRS, 1, 4, 12, 12), generator=generator)
        batch.image_BCDHW = volumes[rows].short()
        batch.image_BCHW = batch.image_BCHW[:, :, :0, :0]
    if name == "fvlm":
        _add_organs(batch, rows)
    if name == "siglip":
        batch.denied_ids_BT, batch.denied_mask_BT = batch.ids_BT % 30 + 7, batch.mask_BT
        batch.has_denial_B = (torch.arange(PAIRS) % 4 != 0)[rows]
        # the third and the sixth text deny findings
        turned = [[1, 0, 0], [1, 1, 0], [0, -1, -1], [0, 0, 1], [0, 1, 0], [-1, 0, 0], [1, 0, 1]]
        found = [[0, 0, 0], [1, 1, 0], [0, 0, 0], [0, -1, 1], [0, 1, 0], [-1, 0, 0], [1, 0, 1]]
        batch.turned_BL = torch.tensor(turned, dtype=torch.int8)[rows]
        batch.found_BL = torch.tensor(found, dtype=torch.int8)[rows]
    if name == "cxrclip":
        batch.other_views_BVCHW, batch.has_other_view_BV = (
            batch.image_BCHW.flip(2)[:, None],
            (torch.arange(PAIRS) % 3 == 1)[rows, None],
        )
    if name in ("medclip", "cxrclip"):
        batch.second_ids_BT, batch.second_mask_BT = batch.ids_BT % 20 + 10, batch.mask_BT
        batch.has_second_text_B = (torch.arange(PAIRS) != 1)[rows]
    if name.startswith("radzero"):
        words = torch.tensor([[1, 2], [2, 0], [3, 3], [1, 4], [2, 5], [6, 0], [4, 1]])[
            rows
        ]  # some in several samples
        batch.statement_ids_BST = torch.stack([words * 3 + 7, words * 2 + 9, words + 11], dim=2)
        batch.statement_mask_BST = (words > 0)[:, :, None] & (
            torch.arange(3) < words[:, :, None] % 3 + 1
        )
    if name == "radzero stored":
        batch.regions_BPD = stored_tokens(batch.image_BCHW)
    if name == "biovil_t":
        pixels = torch.randint(
            0,
            256,
            (PAIRS, 2, 64, 64),
            dtype=torch.uint8,
            generator=torch.Generator().manual_seed(7),
        )
        batch.image_BCHW, batch.prior_BCHW = pixels[rows, :1], pixels[rows, 1:]
        batch.has_prior_B = (torch.arange(PAIRS) % 3 != 1)[rows]
    if name == "biovil":
        batch.second_ids_BT = torch.randint(
            5, 40, (PAIRS, 5), generator=torch.Generator().manual_seed(6)
        )[rows]
        batch.second_mask_BT = (torch.arange(5) < torch.tensor([5, 3, 2, 4, 5, 2, 5])[:, None])[
            rows
        ]
        batch.has_second_text_B = (torch.arange(PAIRS) != 1)[rows]
    return dataclasses.replace(batch, has_image_B=(torch.arange(PAIRS) != 3)[rows])


def _add_organs(batch: Batch, rows: slice) -> None:
    """Add organs and their texts: the lung is cut in the second row, the aorta missing in two, and
    the esophagus always normal; texts of rows 1 and 6 are equal.
    """
    organs = torch.zeros(PAIRS, 4, 12, 12, dtype=torch.uint8)
    for number, (y, x) in enumerate(((1, 1), (1, 7), (7, 1), (7, 7)), 1):
        organs[:, 1:3, y : y + 4, x : x + 4] = number
    organs[1, :, 1, 1] = 1
    organs[organs == 4] *= torch.tensor([1, 1, 0, 1, 1, 0, 1], dtype=torch.uint8).repeat_interleave(
        32
    )
    batch.organ_mask_BDHW = organs[rows]
    shift_O = torch.arange(4)[:, None] * 7
    batch.organ_ids_BOT = (batch.ids_BT[:, None] + shift_O) % 35 + 5
    batch.organ_mask_BOT = batch.mask_BT[:, None].repeat(1, 4, 1)
    normal = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0], [0, 0, 1, 1], [1, 1, 1, 1]] * 2)[:PAIRS]
    batch.organ_normal_BO = normal[rows].bool()


def assert_contrast_of_pairs(
    model: DualEncoder, actual: torch.Tensor, logits_NN: torch.Tensor
) -> None:
    """Compare a loss with the naive cross entropy of both directions, in value and gradient; every
    parameter must get a gradient.
    """
    count = len(logits_NN)
    expected = torch.zeros(())
    for i in range(count):
        for row in (logits_NN[i], logits_NN[:, i]):
            expected = expected - (row[i] - row.logsumexp(0)) / (2 * count)
    torch.testing.assert_close(actual, expected)
    gradients = []
    for loss in (actual, expected):
        model.zero_grad(set_to_none=True)
        loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, gradient in gradients[1].items():
        near = {"rtol": 1e-4, "atol": 1e-6 + 1e-5 * gradient.abs().max().item()}
        torch.testing.assert_close(gradients[0][name], gradient, **near, msg=name)
        assert gradient.abs().sum() > 0, name
