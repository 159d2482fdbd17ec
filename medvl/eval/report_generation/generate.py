"""A model writes the reports of a loader: texts to be judged, and scores while it is being trained."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from medvl.data.loading.sources import Source
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.text import REPORT_SECTIONS, choose_sections
from medvl.errors import ConfigError
from medvl.eval.report_generation.consensus import mbr_select
from medvl.eval.report_generation.evaluate import WrittenReport, judge_reports
from medvl.models.eval_mode import evaluating
from medvl.models.text_decoding import Decoding, Generated
from medvl.schema import Batch


@runtime_checkable
class Writer(Protocol):
    """A model that writes."""

    tokenizer: Tokenizer | None

    def generate(self, image: Tensor, has_image_B: Tensor | None = None, *, decoding: Decoding) -> Generated:
        """One text an image, in eval mode."""

    def modules(self) -> Iterator[nn.Module]:
        """As torch has them."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """As torch has them."""


class ImageLoader(Protocol):
    """Every readable sample of `source` exactly once."""

    @property
    def source(self) -> Source:
        """Where the images and the references come from."""

    def __iter__(self) -> Iterator[Batch]: ...


def write_reports(
    model: Writer,
    loader: ImageLoader,
    *,
    sections: Sequence[str] = REPORT_SECTIONS,
    decoding: Decoding | None = None,
) -> list[WrittenReport]:
    """A report for every image whose sample has a text; the model is shown the pixels alone.

    Args:
        model: with a tokenizer.
        loader: whatever texts it hands out are not used.
        sections: of the reference, joined; all of a sample that has none of these.
        decoding: greedy by default. Of several draws the one is kept that speaks for all (`consensus`).

    A sample whose image cannot be read gets an empty report. Raises ConfigError when the model cannot write.
    """
    if model.tokenizer is None:
        raise ConfigError("a model without a tokenizer writes no text: create_model(..., tokenizer=FOLDER)")
    device = next(model.parameters()).device
    written: dict[str, tuple[str, bool]] = {}
    with evaluating(model):
        for batch in loader:
            has_image_B = None if batch.has_image_B is None else batch.has_image_B.to(device)
            found = model.generate(batch.image_BCHW.to(device), has_image_B, decoding=decoding or Decoding())
            rows = zip(found.ids_BT.cpu(), found.mask_BT.cpu(), strict=True)
            texts = [model.tokenizer.decode(ids_T[mask_T]) for ids_T, mask_T in rows]
            each, ends = len(texts) // len(batch), found.ended_B.tolist()
            for number, key in enumerate(batch.keys):
                chosen = number * each + mbr_select(texts[number * each :][:each])
                written[key] = (texts[chosen], ends[chosen])
    reports = []
    for place in range(len(loader.source)):
        sample = loader.source.sample(place)
        reference = " ".join(choose_sections(sample.sections, sections))
        if reference:
            text, ended = written.get(sample.key, ("", True))
            reports.append(
                WrittenReport(key=sample.key, patient=sample.patient, reference=reference, generated=text, ended=ended)
            )
    return reports


class ReportEval:
    """Scores while a model is being trained: `ReportEval(loader)(model)` is a flat mapping of numbers, no intervals."""

    def __init__(
        self, loader: ImageLoader, *, sections: Sequence[str] = REPORT_SECTIONS, decoding: Decoding | None = None
    ) -> None:
        self.loader, self.sections, self.decoding = loader, sections, decoding

    def __call__(self, model: Writer) -> Mapping[str, float]:
        """The numbers for the model as it is now: report/corpus_bleu_4, report/mean_rouge_l, report/f1_micro, ..."""
        reports = write_reports(model, self.loader, sections=self.sections, decoding=self.decoding)
        results = judge_reports(reports, resamples=0).results
        wanted = [("corpus_bleu_4", "report"), ("mean_rouge_l", "report"), ("f1", "micro"), ("f1", "macro")]
        rows = [results.row(*name) for name in wanted]
        return {f"report/{row.metric}" + f"_{row.target}" * (row.metric == "f1"): row.value for row in rows}
