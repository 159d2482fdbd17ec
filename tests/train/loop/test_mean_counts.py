"""Losses that are means over some elements of a batch: micro-batches of an update have together the
loss of the whole.

Without the counts of the complete update, a micro-batch with one known label would weigh as much as
one with many.
"""

import dataclasses
from typing import Any

import pytest
import torch
from helpers.fusion_samples import TEXTS, flags, make_batch, tiny_model, tiny_tokenizer
from helpers.train_fakes import optim, step_of

import medvl
from medvl.data.loading.dense_targets import DenseBatch
from medvl.data.tokenizer.tokenizer import train_words
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import create_image_encoder
from medvl.models import ChoiceModel, Classifier, Detector, FusedClassifier
from medvl.models.base import System
from medvl.schema import Batch

LABELS = ("Edema", "Fracture", "Normal")
NAN = torch.nan
KNOWN = torch.tensor([[1.0, 0, 0], [0, 1, 0], [NAN, NAN, 1], [NAN] * 3, [1, 0, 0], [NAN] * 3])
SQUARE = EvalTransform(size=32, fit="squash")
TOKENIZER = tiny_tokenizer()


def classifier() -> tuple[System, Batch]:
    model = Classifier.on(create_image_encoder("resnet_tiny", image_size=32), LABELS, SQUARE)
    torch.nn.init.normal_(model.label_head.weight)
    image_BCHW = torch.randint(0, 256, (6, 1, 32, 32), dtype=torch.uint8)
    return model, make_batch(TOKENIZER, 6, labels_BL=KNOWN, image_BCHW=image_BCHW)


def fused(target: Any) -> tuple[System, Batch]:
    model = FusedClassifier.on(tiny_model("dual_stream", TOKENIZER), LABELS, target=target)
    torch.nn.init.normal_(model.label_head[-1].weight)
    return model, make_batch(TOKENIZER, 6, labels_BL=KNOWN)


def choices() -> tuple[System, Batch]:
    model = ChoiceModel.on(tiny_model("dual_stream", TOKENIZER))
    for parameter in model.parameters():  # at the initial weights all options score alike
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    ids_BT, mask_BT = TOKENIZER([TEXTS[0]] * 6 + [TEXTS[1]] * 6 + [TEXTS[3]] * 6)
    labels_BL = torch.tensor([[1.0, 0, 0], [0, 1, 0], [NAN] * 3, [0, 0, 1], [0, 0, 0], [NAN] * 3])
    return model, make_batch(
        TOKENIZER,
        6,
        labels_BL=labels_BL,
        statement_ids_BST=ids_BT.unflatten(0, (3, 6)).transpose(0, 1),
        statement_mask_BST=mask_BT.unflatten(0, (3, 6)).transpose(0, 1),
    )


def detector() -> tuple[System, Batch]:
    model = Detector.on(create_image_encoder("resnet_tiny", image_size=32), LABELS, SQUARE, width=8)
    boxes_BN5 = torch.full((6, 2, 5), NAN)
    boxes_BN5[0] = torch.tensor([[2.0, 2, 30, 30, 0], [1, 1, 9, 9, 2]])
    boxes_BN5[4, 0] = torch.tensor([4.0, 4, 12, 12, 1])
    plain = make_batch(
        TOKENIZER, 6, image_BCHW=torch.randint(0, 256, (6, 1, 32, 32), dtype=torch.uint8)
    )
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    return model, DenseBatch(**fields, boxes_BN5=boxes_BN5)


def generator() -> tuple[System, Batch]:
    words = train_words(TEXTS, min_frequency=1)
    sizes = {
        "width": 16,
        "layers": 1,
        "heads": 2,
        "intermediate": 24,
        "memory_heads": 2,
        "max_tokens": 20,
    }
    image: dict[str, Any] = {
        "image_encoder": "timm:test_vit",
        "image_arguments": {"depth": 1},
        "image_size": 64,
    }
    model = medvl.create_model("r2gen", tokenizer=words, views=1, **sizes, **image)
    return model, make_batch(words, 6, has_text_B=flags(1, 1, 1, 0, 1, 0))


MAKERS = {
    "classifier": classifier,
    "several labels": lambda: fused("multi_label"),
    "one label": lambda: fused("single_label"),
    "choices": choices,
    "detector": detector,
    "generator": generator,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_micro_batches_equal_the_whole_batch(make: Any) -> None:
    found = []
    for rows in ([[0, 1, 2, 3, 4, 5]], [[0, 1], [2, 3], [4, 5]]):
        torch.manual_seed(0)
        model, batch = make()
        step = step_of(model.eval(), optim(optimizer="sgd", momentum=0.0))
        result = step(0, 0.1, [batch.rows(part) for part in rows], len(rows))
        found.append(
            (torch.stack([losses.total for losses in result.losses]).mean(), result.grad_norm)
        )
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
