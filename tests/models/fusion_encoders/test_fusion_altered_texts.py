"""Matching of mirrored and denied texts: value, gradient, the samples that count, and the loader's
part of it.
"""

import copy
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.fusion_samples import (
    TINY,
    flags,
    make_batch,
    shaken,
    tiny_model,
    tiny_tokenizer,
    with_altered_texts,
)

from medvl import losses
from medvl.data.loading.collate import Collate
from medvl.data.loading.items import ItemMaker
from medvl.data.transforms.image import ConVIRTAugmentation, EvalTransform
from medvl.data.transforms.text import WholeText
from medvl.errors import ConfigError
from medvl.models import MedViLLConfig
from medvl.schema import FINDINGS, Inputs, Sample

TOKENIZER = tiny_tokenizer()


KINDS = {
    "mirrored": ("mirror_weight", "itm_mirror", "has_mirror_B", [0, 3]),
    "denied": ("denial_weight", "itm_denial", "has_denial_B", [0, 2, 3]),
}
"""Setting, term, field of the batch, and the rows of the samples that count."""


def altered_model(name: str, kind: str = "mirrored", weight: float = 0.5) -> Any:
    settings = {KINDS[kind][0]: weight}
    model: Any = shaken(tiny_model(name, TOKENIZER, **settings)).eval()
    return model


def altered_batch(**fields: Any) -> Any:
    return with_altered_texts(make_batch(TOKENIZER, 4, **fields), TOKENIZER)


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "mirrored") for name in sorted(TINY)), ("m3ae", "denied"), ("lxmert", "denied")],
)
def test_term_is_the_matching_loss_of_texts_and_altered_texts(name: str, kind: str) -> None:
    """Rows 0 and 3 name a side; rows 1 and 2 do not count, with whatever text. No image has the
    finding that row 1 denies.
    """
    setting, term, field, rows = KINDS[kind]
    model, batch = altered_model(name, kind), altered_batch()
    needed = {"mirrored": Inputs(mirrored_text=True), "denied": Inputs(denied_text=True)}[kind]
    assert dataclasses.replace(model.inputs, entities=None) == needed
    altered = {"mirrored": rows, "denied": [0, 1, 2, 3]}[kind]
    assert getattr(batch, field).nonzero()[:, 0].tolist() == altered
    torch.manual_seed(0)
    result = model(batch)
    torch.manual_seed(0)
    image = model.encode(
        batch, model.corrupt(batch)
    ).image  # that of the other objectives: M2I2 removes patches
    tokens = [getattr(batch, f"{kind}_{part}_BT") for part in ("ids", "mask")]
    text, other = (
        model.text_tokens(ids_BT, mask_BT)
        for ids_BT, mask_BT in ((batch.ids_BT, batch.mask_BT), tokens)
    )
    match, mismatch = model.match(text, image)[rows], model.match(other, image)[rows]
    expected = -(match.log_softmax(dim=1)[:, 1] + mismatch.log_softmax(dim=1)[:, 0]).mean() / 2
    if kind == "denied":  # the altered text is the match of an image that contradicts the text
        following = image.rows(torch.tensor([1, 2, 3, 0]))
        none, match = model.match(text, following)[rows], model.match(other, following)[rows]
        swapped = -(match.log_softmax(dim=1)[:, 1] + none.log_softmax(dim=1)[:, 0]).mean() / 2
        expected = (expected + swapped) / 2
    torch.testing.assert_close(result.terms[term], expected)
    torch.manual_seed(0)
    without = copy.deepcopy(model)
    object.__setattr__(without.config, setting, 0.0)
    torch.testing.assert_close(result.total, without(batch).total + 0.5 * expected)
    model.zero_grad()
    first = next(model.itm_head.parameters())
    (gradient,) = torch.autograd.grad(result.terms[term], first, retain_graph=True)
    (wanted,) = torch.autograd.grad(expected, first)
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("name", ["m3ae", "medvill", "albef"])
def test_samples_without_side_image_or_text_do_not_count(name: str) -> None:
    model = altered_model(name)
    batch = altered_batch(has_image_B=flags(0, 1, 1, 1), has_text_B=flags(1, 1, 1, 0))
    term = model(batch).terms["itm_mirror"]
    assert term.item() == 0
    term.backward()
    assert not model.itm_head.weight.grad.any()
    with raises(ConfigError, "missing", "mirrored_ids_BT"):
        model(make_batch(TOKENIZER, 4))


def test_matching_of_some_pairs() -> None:
    logits_B2 = torch.randn(5, 2, generator=torch.Generator().manual_seed(0), requires_grad=True)
    matched_B, counted_B = flags(1, 0, 1, 0, 0), flags(1, 1, 0, 1, 0)
    actual = losses.itm(logits_B2, matched_B, counted_B)
    torch.testing.assert_close(actual, losses.itm(logits_B2[[0, 1, 3]], matched_B[[0, 1, 3]]))
    (gradient,) = torch.autograd.grad(actual, logits_B2)
    assert gradient.any(dim=1).tolist() == counted_B.tolist()
    nothing = losses.itm(logits_B2, matched_B, ~torch.ones(5, dtype=torch.bool))
    assert nothing.item() == 0
    assert losses.itm(torch.zeros(3, 2), flags(1, 0, 1), flags(1, 1, 0)).item() == pytest.approx(
        math.log(2)
    )


def test_loader_makes_mirrors_that_agree_with_flipped_images() -> None:
    """The text of a flipped image is exchanged already; its mirror is the text of the image as
    it was.
    """
    inputs, texts = (
        Inputs(mirrored_text=True),
        ("There is a small left effusion.", "No pneumothorax."),
    )
    image = ConVIRTAugmentation(size=32, flip="swap_text")
    maker = ItemMaker(image, WholeText(sections=("impression",)), (), 0, inputs)
    pixels = np.zeros((40, 40), np.uint8)
    seen = set()
    for epoch in range(12):
        items = [
            maker(Sample(key=str(row), corpus="c", split="s", patient="p", study=str(row),
            sections={"impression": text}),
                  pixels, epoch)
            for row, text in enumerate(texts)
        ]  # fmt: skip
        batch, _ = Collate(TOKENIZER, inputs)(items)
        assert batch is not None
        mirrored = [
            "There is a small right effusion." if "left" in items[0].text else texts[0],
            texts[1],
        ]
        ids_BT, _ = TOKENIZER([*batch.texts, *mirrored])
        assert torch.equal(batch.ids_BT, ids_BT[:2])
        assert torch.equal(batch.mirrored_ids_BT, ids_BT[2:])
        assert batch.has_mirror_B.tolist() == [True, False]
        seen.add(batch.texts[0])
    assert len(seen) == 2
    assert batch.to("cpu").mirrored_mask_BT is not None
    with raises(ConfigError, "conflict", "image.flip"):
        ItemMaker(ConVIRTAugmentation(size=32, flip="plain"), WholeText(), (), 0, inputs)
    ItemMaker(EvalTransform(size=32), WholeText(), (), 0, inputs)


def test_loader_makes_denials_beside_mirrors() -> None:
    texts = ["There is a small left effusion.", "No pneumothorax.", "Comparison is made."]
    inputs = Inputs(mirrored_text=True, denied_text=True)
    maker = ItemMaker(EvalTransform(size=32), WholeText(sections=("impression",)), (), 0, inputs)
    parts: dict[str, Any] = {"corpus": "c", "split": "s", "patient": "p", "study": "s"}
    items = [
        maker(Sample(key=text, sections={"impression": text}, **parts), np.zeros((40, 40)), 0)
        for text in texts
    ]
    batch, _ = Collate(TOKENIZER, inputs)(items)
    assert batch is not None
    mirrored = ["There is a small right effusion.", *texts[1:]]
    denied = ["There is no small left effusion.", "Pneumothorax.", texts[2]]
    ids_BT, mask_BT = TOKENIZER([*texts, *mirrored, *denied])
    for rows, fields in enumerate(
        [
            (batch.ids_BT, batch.mask_BT),
            (batch.mirrored_ids_BT, batch.mirrored_mask_BT),
            (batch.denied_ids_BT, batch.denied_mask_BT),
        ]
    ):
        part = slice(3 * rows, 3 * rows + 3)
        assert torch.equal(fields[0], ids_BT[part])
        assert torch.equal(fields[1], mask_BT[part])
    assert batch.has_mirror_B.tolist() == [True, False, False]
    assert batch.has_denial_B.tolist() == [True, True, False]
    effusion, pneumothorax = FINDINGS.index("Pleural Effusion"), FINDINGS.index("Pneumothorax")
    assert batch.turned_BL.nonzero().tolist() == [[0, effusion], [1, pneumothorax]]
    assert [int(batch.turned_BL[0, effusion]), int(batch.turned_BL[1, pneumothorax])] == [1, -1]
    assert batch.found_BL.nonzero().tolist()[0] == [0, effusion]


@pytest.mark.parametrize("name", ["mirror_weight", "denial_weight"])
def test_report_objective_is_without_altered_texts(name: str) -> None:
    with raises(ConfigError, "conflict", name):
        MedViLLConfig(attention="seq2seq", objective="report", **{name: 1.0})
