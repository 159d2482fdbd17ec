"""Page of masked prediction: accuracy beside the floor by kind of word, frequent words, and examples."""

from collections import Counter
from pathlib import Path

import numpy as np

from medvl.eval.core.publish import PageHeader
from medvl.eval.html.header import header_facts, headline
from medvl.eval.html.page import Card, Cards, Choice, Deck, Page, Section, write_page
from medvl.eval.html.tables import Table, metric_cell
from medvl.eval.masked_prediction.evaluate import MaskedPredictionResult
from medvl.eval.masked_prediction.words import KINDS

_LIMITS = (
    "A research evaluation of a language model, not for clinical use.",
    "The floor counts the words of these sentences themselves. Words of several pieces are harder than words of one, "
    "so that accuracies of models with different vocabularies differ by their vocabularies too.",
)
_NAMES = {"overall": "All words", "macro": "Mean of the kinds"}


def write_masked_prediction_page(
    result: MaskedPredictionResult, path: str | Path, header: PageHeader, *, examples: int = 6
) -> Path:
    """Write the page as one HTML file and return its path.

    Args:
        result: result of `evaluate_masked_prediction`.
        path: path of the file; its folder is created if missing.
        header: display names of model and data, and the date.
        examples: wrong words of each kind; 0 for a page without sentences.
    """
    results, details = result.results, result.results.details
    present = [kind for kind in KINDS if any(row.target == kind for row in results.rows)]
    targets = ["overall", "macro", *present]
    metrics = ("accuracy@1", "floor@1", "gain@1", "accuracy@5", "floor@5", "nll")
    sections: list[Section] = [
        Table(
            title="Summary",
            columns=["", "Right at first", "Floor", "Gain", "Within five", "Floor of five", "Nats", "Words"],
            rows=[
                [
                    _NAMES.get(target, target.capitalize()),
                    *(metric_cell(results.row(metric, target), bar=metric == "gain@1") for metric in metrics),
                    f"{results.row('accuracy@1', target).n:,}",
                ]
                for target in targets
            ],
            caption="Floor: the most frequent word of the kind, or one of the five most frequent ones, without reading "
            "the sentence. Gain: accuracy minus floor, paired. Nats: negative log-likelihood of the word, lower is "
            "better.",
            strong_rows=2,
        ),
        _frequent_words(result),
    ]
    if examples:
        sections.append(_mistakes(result, present, examples))
    page = Page(
        title=f"Masked prediction: {header.model}",
        subtitle=f"{header.data}: {details['words']:,} hidden words of {details['sentences']:,} distinct sentences",
        headlines=[headline(f"{kind}: right at first", results.row("accuracy@1", kind)) for kind in present],
        facts=header_facts(results, header, units="patients"),
        sections=sections,
        limits=_LIMITS,
    )
    return write_page(page, path)


def _frequent_words(result: MaskedPredictionResult) -> Table:
    counts = Counter((word.kind, word.word) for word in result.words)
    right = Counter(
        (word.kind, word.word) for word, first in zip(result.words, result.right_NK[:, 0], strict=True) if first
    )
    return Table(
        title="Frequent words",
        columns=["", "Kind", "Words", "Right at first"],
        rows=[
            [word, kind, f"{count:,}", f"{right[kind, word] / count:.3f}"]
            for (kind, word), count in counts.most_common(20)
        ],
    )


def _mistakes(result: MaskedPredictionResult, kinds: list[str], examples: int) -> Cards:
    decks = []
    for kind in kinds:
        of_kind = np.array([word.kind == kind for word in result.words])
        wrong = np.flatnonzero(of_kind & (result.right_NK[:, 0] == 0))
        shown = wrong[np.linspace(0, len(wrong) - 1, min(examples, len(wrong))).astype(int)]
        if len(shown):
            cards = [_card(result, int(at)) for at in shown]
            decks.append(Deck(title=f"{kind.capitalize()}: {len(wrong):,} wrong words", cards=cards, good=False))
    return Cards(title="Mistakes", decks=decks, caption="The model's word, then the true one (✓).")


def _card(result: MaskedPredictionResult, at: int) -> Card:
    word = result.words[at]
    text = result.sentences.texts[word.sentence]
    choices = [
        Choice(text=result.filled[at] or "(nothing)", score=None, right=False),
        Choice(text=word.word, score=None, right=True),
    ]
    return Card(title=f"{text[: word.start]}____{text[word.end :]}", pictures=[], choices=choices, lines=[], tags=[])
