"""Masked prediction: which words are hidden, scores of models that know the answers or nothing,
and the command.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.errors import raises
from helpers.eval_fakes import make_source
from torch import Tensor

from medvl.cli import main as cli
from medvl.common.seeding import seeded
from medvl.data.tokenizer.tokenizer import Tokenizer, train_wordpiece
from medvl.errors import ConfigError, EvaluationError
from medvl.eval import evaluate_masked_prediction, write_masked_prediction_page, write_results
from medvl.eval.compare.compare import compare, find_runs
from medvl.eval.core.results import PageHeader
from medvl.eval.masked_prediction import hidden_words
from medvl.models import create_model
from medvl.models.checkpoint import save

REPORTS = (
    "There is a small left pleural effusion. No pneumothorax.",
    "Mild edema.  No pneumothorax. The lungs are clear.",
    "There is a large right pleural effusion. NO PNEUMOTHORAX.",
    "There is no edema. Small left effusion.",
)
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


def reports(texts: tuple[str, ...] = REPORTS) -> Any:
    source = make_source(np.zeros((len(texts), 0)), ())
    source.samples = [
        dataclasses.replace(sample, sections={"findings": text})
        for sample, text in zip(source.samples, texts, strict=True)
    ]
    return source


@pytest.fixture(scope="module")
def model() -> Any:
    tokenizer = train_wordpiece(
        [text.lower() for text in REPORTS] * 3, vocab_size=110, min_frequency=1
    )
    arguments = {**SMALL, "max_position_embeddings": 40}
    with seeded(0):
        return create_model(
            "masked_text",
            text_encoder="bert",
            text_arguments=arguments,
            tokenizer=tokenizer,
            max_tokens=32,
        )


class Answers(torch.nn.Module):
    """Fake language model that knows some sentences and fills in the true words, or always one
    `constant`.
    """

    def __init__(
        self, tokenizer: Tokenizer, texts: tuple[str, ...], constant: str | None = None
    ) -> None:
        super().__init__()
        self.tokenizer, self.name, self.device = tokenizer, "answers", torch.device("cpu")
        self.whole = [
            [tokenizer.cls_id, *tokenizer.encode_whole(text)[0], tokenizer.sep_id] for text in texts
        ]
        self.constant = constant

    def text_encoder(self, ids_BT: Tensor, mask_BT: Tensor) -> Any:
        """Return the true ids as states: those of the sentence that agrees with all tokens that
        are not hidden.
        """
        rows = []
        for ids_T, mask_T in zip(ids_BT.tolist(), mask_BT.tolist(), strict=True):
            ids = [one for one, real in zip(ids_T, mask_T, strict=True) if real]
            fitting = [
                whole for whole in self.whole if len(whole) == len(ids) and self._agree(whole, ids)
            ]
            rows.append(fitting[0] + [0] * (len(ids_T) - len(ids)))
        return type("Features", (), {"tokens_BTD": torch.tensor(rows)[:, :, None]})

    def _agree(self, whole: list[int], ids: list[int]) -> bool:
        return all(
            one in (known, self.tokenizer.mask_id) for known, one in zip(whole, ids, strict=True)
        )

    def score_words(self, states_ND: Tensor) -> Tensor:
        best_N = states_ND[:, 0]
        if self.constant is not None:
            best_N = torch.full_like(best_N, self.tokenizer.vocabulary[self.constant])
        return torch.nn.functional.one_hot(best_N, self.tokenizer.vocab_size).float()


def test_equal_sentences_count_once() -> None:
    found = hidden_words(reports().samples, ("findings",))
    assert found.texts == (
        "There is a small left pleural effusion.",
        "No pneumothorax.",
        "Mild edema.",
        "There is a large right pleural effusion.",
        "There is no edema.",
        "Small left effusion.",
    )
    assert [sample.patient for sample in found.samples] == ["p0", "p0", "p1", "p2", "p3", "p3"]
    first = [(word.word, word.kind) for word in found.words if word.sentence == 0]
    assert first == [("small", "severity"), ("left", "side"), ("effusion", "finding")]
    assert len(hidden_words(reports().samples, ("findings",), 2).texts) == 2
    one_study = [dataclasses.replace(sample, study="s") for sample in reports().samples]
    assert len(hidden_words(one_study, ("findings",)).texts) == 2


def test_the_true_words_are_right_and_a_constant_is_at_its_share(model: Any) -> None:
    source = reports()
    texts = hidden_words(source.samples, ("findings",)).texts
    knows: Any = Answers(model.tokenizer, texts)
    rows = evaluate_masked_prediction(knows, source, resamples=20).results
    assert rows.row("accuracy@1", "overall").value == rows.row("accuracy@1", "macro").value == 1
    assert rows.row("accuracy@1", "side").n == 3
    assert rows.row("floor@1", "side").value == pytest.approx(2 / 3)  # left, right, left
    assert rows.row("floor@5", "side").value == 1
    assert rows.row("gain@1", "side").value == pytest.approx(1 / 3)
    assert rows.details["left_out"] == 0
    constant: Any = Answers(model.tokenizer, texts, "left")
    rows = evaluate_masked_prediction(constant, source, resamples=20).results
    assert (
        rows.row("accuracy@1", "side").value
        == rows.row("floor@1", "side").value
        == pytest.approx(2 / 3)
    )
    assert rows.row("gain@1", "side").value == 0
    assert rows.row("accuracy@1", "negation").value == 0


def test_two_models_are_compared_word_by_word(model: Any, tmp_path: Path) -> None:
    texts = hidden_words(reports().samples, ("findings",)).texts
    for name, constant in (("constant", "left"), ("knows", None)):
        scorer: Any = Answers(model.tokenizer, texts, constant)
        result = evaluate_masked_prediction(scorer, reports(), resamples=20)
        write_results(result.results, tmp_path / name, result.predictions())
    runs = find_runs([tmp_path / "constant", tmp_path / "knows"])
    comparison = compare(runs["masked_prediction"], resamples=20)
    difference = comparison.differences[0]["accuracy@1/side"]
    assert difference.value == pytest.approx(1 / 3)
    assert comparison.differences[0]["nll/side"].value < 0


def test_words_of_several_pieces_need_all_of_them() -> None:
    pieces = train_wordpiece(["pneumothorax no"] * 3, vocab_size=24, min_frequency=1)
    source = reports(("No pneumothorax.",))
    scorer: Any = Answers(pieces, ("No pneumothorax.",))
    result = evaluate_masked_prediction(scorer, source, resamples=0)
    assert result.results.details["of_several_pieces"] >= 1
    assert result.right_NK.all()
    assert "pneumothorax" in [filled.replace(" ", "") for filled in result.filled]
    scorer.constant = "n"
    result = evaluate_masked_prediction(scorer, source, resamples=0)
    by_kind = {
        word.kind: right
        for word, right in zip(result.words, result.right_NK[:, 0].tolist(), strict=True)
    }
    assert by_kind["finding"] == 0


def test_nll_is_the_sum_over_the_pieces_of_a_word(model: Any) -> None:
    source = reports()
    result = evaluate_masked_prediction(model, source, resamples=0, batch=5)
    tokenizer = model.tokenizer
    for word, nll in zip(result.words, result.nll_N.tolist(), strict=True):
        text = result.sentences.texts[word.sentence]
        ids, offsets = tokenizer.encode_whole(text)
        inside = [
            at for at, (start, end) in enumerate(offsets) if start < word.end and end > word.start
        ]
        hidden = [tokenizer.mask_id if at in inside else one for at, one in enumerate(ids)]
        ids_1T = torch.tensor([[tokenizer.cls_id, *hidden, tokenizer.sep_id]])
        with torch.no_grad():
            states_TD = (
                model.eval()
                .text_encoder(ids_1T, torch.ones_like(ids_1T, dtype=torch.bool))
                .tokens_BTD[0]
            )
            share_TV = model.score_words(states_TD).softmax(dim=1)
        expected = -sum(share_TV[at + 1, ids[at]].log().item() for at in inside)
        assert nll == pytest.approx(expected, abs=1e-4)
    rows = result.results
    assert rows.row("nll", "overall").value == pytest.approx(result.nll_N.mean())
    assert rows.row("nll", "macro").value > 0


def test_what_cannot_be_evaluated_is_refused(model: Any) -> None:
    with raises(EvaluationError, "empty", "data"):
        evaluate_masked_prediction(model, reports(("The lungs are clear.",)))
    bare: Any = type("Bare", (), {"tokenizer": None, "name": "bare"})
    with raises(ConfigError, "missing", "tokenizer"):
        evaluate_masked_prediction(bare, reports())


def test_page_shows_sentences_only_if_asked(model: Any, tmp_path: Path) -> None:
    result = evaluate_masked_prediction(model, reports(), resamples=20, batch=3)
    again = evaluate_masked_prediction(model, reports(), resamples=20, batch=50)
    values = [row.value for row in result.results.rows]
    assert values == pytest.approx([row.value for row in again.results.rows], rel=1e-6, nan_ok=True)
    page = write_masked_prediction_page(
        result, tmp_path / "a.html", PageHeader(model="m", data="d")
    ).read_text()
    assert "____" in page
    hidden = write_masked_prediction_page(
        result, tmp_path / "b.html", PageHeader(model="m", data="d"), examples=0
    ).read_text()
    assert "____" not in hidden
    assert "Floor of five" in hidden
    assert all("sentence" not in line for line in result.predictions())


def test_the_command_refuses_other_systems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "best"
    folder.mkdir()
    save(create_model("classifier", encoder={"name": "resnet_tiny"}, labels=["Edema"]), folder)
    with pytest.raises(SystemExit):
        cli.main(
            ["eval", "masked-prediction", "--checkpoint", str(folder), "--data", str(tmp_path)]
        )
    assert "head for masked words" in capsys.readouterr().err
