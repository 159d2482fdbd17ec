"""Perplexity of references: every word by itself, references that are cut, and other images."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from helpers.fusion_samples import shaken

import medvl
from medvl.data.loading.loader import open_loader
from medvl.data.loading.sources import FileSource
from medvl.data.tokenizer.tokenizer import Tokenizer, train_words
from medvl.data.transforms.text import TextPair, WholeText
from medvl.eval import evaluate_reports, generate_reports
from medvl.eval.report_generation.generate import add_likelihoods
from medvl.eval.report_generation.metrics import perplexity_metrics
from medvl.eval.report_generation.protocol import OTHER_IMAGES
from medvl.schema import Batch, Sample

SECTIONS = ("findings", "impression")
TEXTS = [
    ("Small left pleural effusion.", "Effusion."),
    ("The heart is normal.", ""),
    ("No pneumothorax. The lungs are clear. The heart is normal.", "Normal."),
    ("", "No acute findings."),
]
SIZES: dict[str, Any] = {
    "image_encoder": "timm:test_vit",
    "image_arguments": {"depth": 1},
    "image_size": 64,
    "width": 16,
    "layers": 1,
    "heads": 2,
    "intermediate": 24,
    "max_tokens": 8,
}


@pytest.fixture
def tokenizer() -> Tokenizer:
    return train_words([text for pair in TEXTS for text in pair], min_frequency=1)


def samples(folder: Path) -> list[Sample]:
    created = []
    for number, (findings, impression) in enumerate(TEXTS):
        path = folder / f"{number}.png"
        cv2.imwrite(str(path), np.random.default_rng(number).integers(0, 256, (64, 64), np.uint8))
        sections = {"findings": findings, "impression": impression}
        created.append(
            Sample(
                key=f"k{number}", corpus="c", split="test", patient=f"p{number}",
                study=f"s{number}", image=path,
                sections={name: text for name, text in sections.items() if text},
            )
        )  # fmt: skip
    return created


def opened(model: Any, created: list[Sample]) -> Any:
    text = TextPair(
        first=WholeText(sections=("findings",), missing="no_text"),
        second=WholeText(sections=("impression",), missing="no_text"),
    )
    return open_loader(
        FileSource(created, ()), batch=4, image=model.transform, text=text,
        tokenizer=model.tokenizer.with_max_tokens(8), train=False, inputs=model.inputs,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["cxrmate", "r2gen"])
def test_perplexity_is_that_of_each_word(tokenizer: Tokenizer, tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    more: dict[str, Any] = {"memory_heads": 2} if name == "r2gen" else {}
    model: Any = medvl.create_model(name, tokenizer=tokenizer, views=1, **SIZES, **more)
    model = shaken(model)
    loader = opened(model, samples(tmp_path))
    sections = SECTIONS if name == "cxrmate" else SECTIONS[:1]
    reports = add_likelihoods(
        model, loader, generate_reports(model, loader, sections=sections), sections
    )
    assert model.training
    model.eval()
    batch: Batch = next(iter(loader))
    total, other_total, tokens = 0.0, 0.0, 0
    for row, report in enumerate(reports):
        one = batch.rows([row])
        if name == "cxrmate":
            ids_BT, target_BT = model.words_and_targets(one)
        else:  # all sections of a sample that has none of the wanted ones
            ids_BT, mask_BT = tokenizer.with_max_tokens(8)([report.reference])
            one = dataclasses.replace(one, ids_BT=ids_BT, mask_BT=mask_BT)
            ids_BT, target_BT = model.words_and_targets(one)
        log_TV = model.score_next(ids_BT, model.read(one))[0].log_softmax(dim=1)
        known_T = target_BT[0] != -100
        loss = -log_TV[known_T, target_BT[0][known_T]].sum().detach()
        assert report.likelihood is not None
        assert report.likelihood["loss"] == pytest.approx(float(loss), rel=1e-4)
        other = model.read(batch.rows([(row + 2) % 4]))
        log_TV = model.score_next(ids_BT, other)[0].log_softmax(dim=1)
        loss_of_other = -log_TV[known_T, target_BT[0][known_T]].sum().detach()
        assert report.likelihood["loss_of_other_image"] == pytest.approx(
            float(loss_of_other), rel=1e-4
        )
        total += float(loss)
        other_total += float(loss_of_other)
        tokens += int(known_T.sum())
    assert reports[0].likelihood["words"] == (5 if name == "cxrmate" else 4)
    assert reports[2].likelihood["words"] < 10  # it was cut
    results = evaluate_reports(reports, resamples=0).results
    words, size = (
        sum(report.likelihood[name] for report in reports) for name in ("words", "bytes")
    )
    for unit, count in {"token": tokens, "word": words, "byte": size}.items():
        row = results.row(f"perplexity_by_{unit}", "report")
        other_row = results.row(f"perplexity_by_{unit}", "report", OTHER_IMAGES)
        assert row.value == pytest.approx(math.exp(total / count), rel=1e-4)
        assert other_row.value == pytest.approx(math.exp(other_total / count), rel=1e-4)
    first = "small left pleural effusion ."
    assert reports[0].likelihood["bytes"] == len(first) + 11 * (name == "cxrmate")  # " effusion ."


def test_reports_without_likelihoods(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model: Any = medvl.create_model("cxrmate", tokenizer=tokenizer, views=1, **SIZES)
    loader = opened(model, samples(tmp_path)[:1])
    reports = generate_reports(model, loader)
    assert add_likelihoods(model, loader, reports, ("findings",)) == reports  # it writes both
    (alone,) = add_likelihoods(model, loader, reports, SECTIONS)
    assert alone.likelihood is not None
    assert set(alone.likelihood) == {"tokens", "words", "bytes", "loss"}  # no other patient
    assert perplexity_metrics([None, None], OTHER_IMAGES) == []
    (group,) = perplexity_metrics([alone.likelihood, None], OTHER_IMAGES)
    assert group.rows[0].n == 1
    assert np.isnan(
        group.statistic(np.array([[0.0], [2.0]]))
    ).all()  # only the unknown one is drawn
