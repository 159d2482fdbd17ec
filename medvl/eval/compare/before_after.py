"""A start and the model that was trained from it, evaluated on the same data: one page.

Zero-shot classification, retrieval (beside the recall of the commonest texts) and a linear probe of
both checkpoints are compared (`medvl.eval.compare.compare`): paired differences with intervals, in
total and in the subgroups of the data. Zero-shot classification is repeated with prompts in other
words, and with retrieval on the shards of other sites: what training on one site costs elsewhere.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from medvl.errors import ConfigError
from medvl.eval.compare.compare import Comparison, Run, compare
from medvl.eval.core.open import RunOptions, open_source
from medvl.eval.core.results import read_results
from medvl.eval.evaluation import Evaluation, run_evaluation
from medvl.eval.html.page import slug
from medvl.eval.probing.evaluation import EncoderOptions, Probe
from medvl.eval.retrieval.evaluation import Retrieval
from medvl.eval.zero_shot_classification.evaluation import ZeroShot

_STUDIES = 100
"""Studies that are read to find out whether shards have texts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeforeAfter:
    """Checkpoints, and the data on which they are compared.

    Attributes:
        start: checkpoint that the training began with; a dual-encoder, as `trained`.
        trained: run or checkpoint after the training.
        data: shards of patients of neither training.
        prompts: prompt set of the labels, as of `medvl eval zero-shot`.
        wordings: prompt sets of the same labels in other words.
        sites: shards of other sites.
        train, valid: shards on which the probe is fitted, and chosen; without them no probe.
    """

    start: Path
    trained: Path
    data: Path
    prompts: str | None = None
    wordings: Sequence[str] = ()
    sites: Sequence[Path] = ()
    train: Path | None = None
    valid: Path | None = None

    def __post_init__(self) -> None:
        if (self.train is None) != (self.valid is None):
            message = "expected train and valid for a probe, got one of them; give both or none"
            raise ConfigError(message, "missing", field="valid" if self.train else "train")

    def evaluations(self) -> Iterator[tuple[str, Callable[[Path], Evaluation]]]:
        """Yield the title of each evaluation, and a function that returns it for a checkpoint.

        Shards without labels have no zero-shot classification and no probe, those without texts no
        retrieval.
        """
        several = len({path.name for path in (self.data, *self.sites)}) <= len(self.sites)
        for data in (self.data, *self.sites):
            place = "" if data == self.data else f" on {data if several else data.name}"
            source = open_source(str(data))
            if source.label_names:
                yield f"Zero-shot classification{place}", self._zero_shot(data, self.prompts)
            for words in self.wordings if source.label_names and not place else ():
                title = f"Zero-shot classification with {Path(words).stem}"
                yield title, self._zero_shot(data, words)
            if any(itertools.islice(source.texts_by_study(), _STUDIES)):
                yield f"Retrieval{place}", self._retrieval(data)
            if self.train and self.valid and source.label_names and not place:
                yield "Linear probe", self._probe(self.train, self.valid)

    def _zero_shot(self, data: Path, prompts: str | None) -> Callable[[Path], Evaluation]:
        return lambda checkpoint: ZeroShot(checkpoint=(checkpoint,), data=data, prompts=prompts)

    def _retrieval(self, data: Path) -> Callable[[Path], Evaluation]:
        return lambda checkpoint: Retrieval(checkpoint=checkpoint, data=data)

    def _probe(self, train: Path, valid: Path) -> Callable[[Path], Evaluation]:
        return lambda checkpoint: Probe(
            train=train,
            valid=valid,
            test=self.data,
            fractions=(1.0,),
            image=EncoderOptions(checkpoint=checkpoint),
        )

    def compare(self, folder: Path, options: RunOptions) -> list[Comparison]:
        """Evaluate both checkpoints, and return a comparison for each evaluation.

        Args:
            folder: gets a folder for each evaluation and checkpoint.
            options: batches, device, resamples and `replace`.

        Raises as the evaluations, and ConfigError for data without labels and texts.
        """
        comparisons = []
        for title, make in self.evaluations():
            runs = []
            for name, checkpoint in (("start", self.start), ("trained", self.trained)):
                out = folder / "evaluations" / slug(title) / name
                run_evaluation(make(checkpoint), dataclasses.replace(options, out=out))
                runs.append(Run(name, out, read_results(out)))
            found = compare(runs, resamples=options.resamples)
            comparisons.append(dataclasses.replace(found, title=title))
        if not comparisons:
            message = f"expected labels or texts, got shards without both in {self.data}"
            raise ConfigError(f"{message}; give other shards", "empty", field="data")
        return comparisons
