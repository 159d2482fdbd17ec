"""Change classification: metrics against a naive count, models with and without prior images,
prompts, page, command.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.html_pages import read
from torch import Tensor, nn

from medvl.cli import main as cli
from medvl.data.loading.loader import open_loader
from medvl.data.loading.sources import no_text
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.text import WholeText
from medvl.errors import EvaluationError
from medvl.eval.change.evaluation import write_change_page
from medvl.eval.change.protocol import (
    ChangeResult,
    change_classification,
    cross_validated_scores,
    load_change_prompts,
)
from medvl.eval.core.results import PageHeader
from medvl.schema import CHANGES, Embeddings, Inputs, Sample

LABELS = [  # of images 1, 2, ...; image 0 is the prior image of all
    {"Edema": "improving"},
    {"Edema": "stable", "Pneumonia": "worsening"},
    {"Edema": "worsening"},
    {"Pneumonia": "worsening"},
    {"Edema": "improving", "Pneumonia": "stable"},
]


class Pairs:
    """Images whose grey level is their number; the current images have labels of change."""

    label_names = ()
    fingerprint = "pairs"

    def __len__(self) -> int:
        return len(LABELS) + 1

    def sample(self, position: int) -> Sample:
        extra = {"change": LABELS[position - 1], "prior": "k0"} if position else {}
        patient = f"p{position % 3}"
        return Sample(
            key=f"k{position}",
            corpus="c",
            split="test",
            patient=patient,
            study=f"s{position}",
            extra=extra,
        )

    def pixels(self, position: int, color: bool = False) -> np.ndarray:
        return np.full((16, 16), 10 * position, np.uint8)


class Comparer(nn.Module):
    """A model that knows each image's answers by its grey level; without the prior image it
    predicts stable.
    """

    def __init__(self, answers: dict[int, str]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.answers = answers
        self.priors: list[bool] = []

    def embed_images(self, image_BCHW: Tensor) -> Embeddings:
        return Embeddings(torch.tensor([[0.0, 1.0, 0.0]]).expand(len(image_BCHW), 3))

    def embed_with_prior(
        self, image_BCHW: Tensor, prior_BCHW: Tensor, has_prior_B: Tensor
    ) -> Embeddings:
        assert (prior_BCHW == 0).all()
        self.priors += has_prior_B.tolist()
        numbers = (image_BCHW.flatten(1).float().mean(1) / 10).round().int().tolist()
        return Embeddings(torch.eye(3)[[CHANGES.index(self.answers[number]) for number in numbers]])

    def embed_texts(self, texts: Any) -> Embeddings:
        roots = {"improv": 0, "decreas": 0, "stable": 1, "unchanged": 1, "worsen": 2, "increas": 2}
        columns = [next(column for root, column in roots.items() if root in text) for text in texts]
        return Embeddings(torch.eye(3)[columns])

    def similarity(self, images: Embeddings, texts: Embeddings) -> Tensor:
        return images.global_NE @ texts.global_NE.T


def evaluate(model: nn.Module, inputs: Inputs | None = None, **options: Any) -> ChangeResult:
    loader = open_loader(
        Pairs(),
        batch=4,
        image=EvalTransform(size=16),
        text=WholeText(),
        tokenizer=no_text,
        train=False,
        inputs=inputs,
    )
    return change_classification(model, loader, resamples=50, **options)


ANSWERS = {1: "improving", 2: "worsening", 3: "worsening", 4: "stable", 5: "improving"}


def test_accuracies_are_those_of_a_naive_count() -> None:
    model = Comparer(ANSWERS)
    result = evaluate(model, Inputs(prior_image=True))
    assert result.results.config["use_prior"] is True
    assert model.priors == [True] * len(LABELS)
    for finding in ("Edema", "Pneumonia"):
        pairs = [
            (labels[finding], ANSWERS[n]) for n, labels in enumerate(LABELS, 1) if finding in labels
        ]
        recalls = [
            np.mean([p == t for t, p in pairs if t == c])
            for c in CHANGES
            if any(t == c for t, _ in pairs)
        ]
        assert result.results.row("macro_accuracy", finding).value == pytest.approx(
            np.mean(recalls)
        )
        assert result.results.row("accuracy", finding).value == pytest.approx(
            np.mean([t == p for t, p in pairs])
        )
    of_findings = [
        result.results.row("macro_accuracy", name).value for name in ("Edema", "Pneumonia")
    ]
    assert result.results.row("macro_accuracy", "macro").value == pytest.approx(
        np.mean(of_findings)
    )
    assert result.results.row("accuracy", "macro").n == 7
    first = next(result.predictions())
    assert first["prior"] == "k0"
    assert first["findings"]["Edema"] == {
        "label": "improving",
        "scores": {"improving": 1, "stable": 0, "worsening": 0},
    }


def test_a_model_without_its_prior_image_is_scored_on_the_image_alone() -> None:
    result = evaluate(Comparer(ANSWERS), use_prior=False)
    assert result.results.config["use_prior"] is False
    assert (result.scores_NLC.argmax(2) == CHANGES.index("stable")).all()
    with raises(EvaluationError, "missing", "loader"):
        evaluate(Comparer(ANSWERS))


def test_a_linear_probe_reads_the_vector_of_both_images(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers = {number: CHANGES[number * 7 % 9 // 3] for number in range(1, 25)}
    monkeypatch.setattr(
        sys.modules[__name__], "LABELS", [{"Edema": answers[number]} for number in answers]
    )
    inputs = Inputs(prior_image=True)
    result = evaluate(Comparer(answers), inputs, folds=3)
    assert result.results.row("macro_accuracy", "macro").value == 1
    assert result.results.config["folds"] == 3
    assert "prompts" not in {**result.results.config, **result.results.inputs}
    text = read(
        write_change_page(result, tmp_path / "index.html", PageHeader(model="m", data="d"))
    ).text
    assert "linear probe, cross-validated over 3 folds of patients" in text
    constant = evaluate(Comparer(answers), inputs, folds=3, use_prior=False)
    assert constant.results.row("macro_accuracy", "macro").value < 0.5
    for folds in (2, 4):  # there are three patients
        with raises(EvaluationError, "out_of_range", "folds"):
            evaluate(Comparer(answers), inputs, folds=folds)


def test_scores_that_are_not_finite_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Comparer(ANSWERS)
    monkeypatch.setattr(
        model,
        "embed_with_prior",
        lambda image_BCHW, *_: Embeddings(torch.full((len(image_BCHW), 3), torch.nan)),
    )
    with raises(EvaluationError, "nonfinite"):
        evaluate(model, Inputs(prior_image=True))


def test_probes_score_patients_that_they_have_not_seen() -> None:
    generator = torch.Generator().manual_seed(0)
    patients = [f"p{number // 3}" for number in range(120)]
    truth_NL = torch.randint(-1, 3, (120, 2), generator=generator).numpy()
    vector_ND = torch.randn(120, 6, generator=generator)
    scores_NLC = cross_validated_scores(vector_ND, truth_NL, patients, folds=4, seed=1)
    assert scores_NLC.shape == (120, 2, 3)
    changed_NL = truth_NL.copy()
    changed_NL[:3] = (changed_NL[:3] + 2) % 3  # of the first patient
    again_NLC = cross_validated_scores(vector_ND, changed_NL, patients, folds=4, seed=1)
    same_N = (again_NLC == scores_NLC).all(axis=(1, 2))
    assert same_N[:3].all()
    assert not same_N[3:].all()


def test_probes_do_not_predict_a_change_that_they_were_not_trained_on() -> None:
    generator = torch.Generator().manual_seed(0)
    patients = [f"p{number}" for number in range(60)]
    truth_NL = torch.randint(0, 2, (60, 1), generator=generator).numpy()  # no image is worsening
    vector_ND = torch.randn(60, 4, generator=generator) + torch.from_numpy(4 * truth_NL)
    scores_NLC = cross_validated_scores(vector_ND, truth_NL, patients, folds=3, seed=0)
    assert (scores_NLC[..., CHANGES.index("worsening")] == 0).all()
    assert (scores_NLC.argmax(axis=2) == truth_NL).mean() > 0.9


def test_data_without_labels_of_change_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LABELS", [{}, {}])
    with raises(EvaluationError, "missing", "data"):
        evaluate(Comparer(ANSWERS), use_prior=False)


def test_prompts_fill_in_the_finding_and_are_read_from_a_file(tmp_path: Path) -> None:
    groups = load_change_prompts().sentences("Pleural Effusion")
    assert groups[0][0] == "Pleural effusion is improving."
    assert len(groups) == 3
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps({change: [f"a {change} {{finding}}"] for change in CHANGES}))
    own = load_change_prompts(path)
    assert own.sentences("Edema") == [
        ["A improving edema"],
        ["A stable edema"],
        ["A worsening edema"],
    ]
    assert own.sha256 != load_change_prompts().sha256
    for content in (
        "[]",
        "{",
        json.dumps({key: ["no slot"] for key in CHANGES}),
        json.dumps({"stable": ["{finding}"]}),
    ):
        path.write_text(content)
        with raises(EvaluationError, "malformed", "prompts", names="prompts.json"):
            load_change_prompts(path)


def test_page_shows_accuracies_confusion_and_pairs(tmp_path: Path) -> None:
    result = evaluate(Comparer(ANSWERS), Inputs(prior_image=True))
    pixels = Pairs().pixels
    page = write_change_page(
        result,
        tmp_path / "index.html",
        PageHeader(model="m", data="d"),
        pixels=pixels,
        prior_pixels=lambda _: pixels(0),
    )
    text = read(page).text
    assert text.count("prior image") == 7
    assert {"Confusion", "Correct", "Wrong"} <= set(text)


def test_page_counts_a_tie_as_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = Comparer(ANSWERS)
    monkeypatch.setattr(
        model, "embed_images", lambda image_BCHW: Embeddings(torch.ones(len(image_BCHW), 3))
    )
    result = evaluate(model, use_prior=False)
    assert result.results.row("accuracy", "macro").value == 0
    pixels = Pairs().pixels
    header = PageHeader(model="m", data="d")
    page = write_change_page(
        result, tmp_path / "index.html", header, pixels=pixels, prior_pixels=pixels
    )
    text = read(page).text
    assert "a tie" in text
    assert "Correct" not in text
    assert "1.00" not in text


def test_command_needs_a_dual_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(
            ["eval", "change", "--checkpoint", str(tmp_path / "none"), "--data", str(tmp_path)]
        )
    assert "none" in capsys.readouterr().err
