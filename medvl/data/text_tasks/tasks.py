"""The data sets of `medvl eval text`: kind of task, labels, metric and sizes.

The thirteen of BLURB (Gu et al. 2021, Tables 2 and 3), ChemProt as in SciBERT (thirteen types of
relations, only pairs that have one, so that the micro F1 of its paper is the accuracy), MedNLI and
RadNLI (inference between two sentences), clinical semantic similarity (MedSTS and its successors),
and the findings of Open-i's reports by people (NegBio's labels).
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from medvl.errors import CorpusError

Kind = Literal["entities", "words", "relations", "similarity", "documents", "answers"]
Split = Literal["train", "dev", "test"]
SPLITS: tuple[Split, ...] = ("train", "dev", "test")
METRICS: Mapping[Kind, str] = {
    "entities": "entity_f1",
    "words": "macro_word_f1",
    "relations": "micro_f1",
    "similarity": "pearson",
    "documents": "micro_f1",
    "answers": "accuracy",
}
"""Metric of each kind of task."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextExample:
    """One labelled example."""

    key: str
    document: str
    """Examples of one document are resampled together; the key where documents are unknown."""
    texts: tuple[str, ...]
    """The words of a tagging task; else one text, or two for similarity, inference and questions
    with context.
    """
    label: str | float | tuple[str, ...]
    """A class, a score, the tag of each word, or the labels of a document."""
    spans: tuple[tuple[int, int], tuple[int, int]] | None = None
    """[start, end) in characters of the two mentions of a relation, where known."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextTask:
    """A data set with its labels."""

    name: str
    kind: Kind
    labels: tuple[str, ...] = ()
    """Classes in the order of the head's outputs; the tag of no entity, and the class of no
    relation, come first.
    """
    max_tokens: int = 512
    merge_types: bool = True
    """Tags keep B and I only, without the type of the entity."""
    dummies: tuple[str, ...] = ()
    """Words that replace the mentions of a relation, where they are known."""
    released_as: str = ""
    """Folder of the original release below the data's root; default the name."""
    counts: tuple[int, int, int] | None = None
    """BLURB's train, dev and test counts: mentions, labelled words or examples (Table 3 of the
    paper).
    """
    left_out: tuple[str, ...] = ()
    """Labels whose examples are left out: "None", an interaction without a type (one training
    pair of DDI).
    """
    compact_prefix: str = ""
    """Start of the names of compact files where two tasks share a folder."""
    seeds: int = 5
    """Fine-tunings of the paper: ten for the three smallest sets of BLURB."""
    evaluation_only: str = ""
    """Task whose training and dev examples are used, for a set that has a test split only."""

    @property
    def metric(self) -> str:
        """Name of the metric."""
        return METRICS[self.kind]

    @property
    def negative(self) -> str | None:
        """Class that a micro F1 leaves out: no relation."""
        return self.labels[0] if self.kind == "relations" else None


_BIO = ("O", "B", "I")
_HALLMARKS = (
    "activating invasion and metastasis",
    "avoiding immune destruction",
    "cellular energetics",
    "enabling replicative immortality",
    "evading growth suppressors",
    "genomic instability and mutation",
    "inducing angiogenesis",
    "resisting cell death",
    "sustaining proliferative signaling",
    "tumor promoting inflammation",
)
_RELATIONS = (
    "ACTIVATOR",
    "AGONIST",
    "AGONIST-ACTIVATOR",
    "AGONIST-INHIBITOR",
    "ANTAGONIST",
    "DOWNREGULATOR",
    "INDIRECT-DOWNREGULATOR",
    "INDIRECT-UPREGULATOR",
    "INHIBITOR",
    "PRODUCT-OF",
    "SUBSTRATE",
    "SUBSTRATE_PRODUCT-OF",
    "UPREGULATOR",
)
_FINDINGS = (
    "Atelectasis",
    "Cardiomegaly",
    "Effusion",
    "Infiltration",
    "Mass",
    "Nodule",
    "Pneumonia",
    "Pneumothorax",
    "Consolidation",
    "Edema",
    "Emphysema",
    "Fibrosis",
    "Pleural_Thickening",
    "Hernia",
    "normal",
)
_INFERENCE = ("contradiction", "entailment", "neutral")


def _entities(name: str, released_as: str, counts: tuple[int, int, int]) -> TextTask:
    return TextTask(name=name, kind="entities", labels=_BIO, released_as=released_as, counts=counts)


TASKS: Mapping[str, TextTask] = {
    task.name: task
    for task in (
        _entities("bc5-chem", "BC5CDR-chem-IOB", (5203, 5347, 5385)),
        _entities("bc5-disease", "BC5CDR-disease-IOB", (4182, 4244, 4424)),
        _entities("ncbi-disease", "NCBI-disease-IOB", (5134, 787, 960)),
        _entities("bc2gm", "BC2GM-IOB", (15197, 3061, 6325)),
        _entities("jnlpba", "JNLPBA", (46750, 4551, 8662)),
        TextTask(
            name="ebm-pico",
            kind="words",
            labels=("O", "PAR", "INT", "OUT"),
            merge_types=False,
            released_as="ebm_nlp_2_00",
            counts=(339167, 85321, 16364),
        ),
        TextTask(
            name="chemprot",
            kind="relations",
            labels=("false", "CPR:3", "CPR:4", "CPR:5", "CPR:6", "CPR:9"),
            max_tokens=256,
            dummies=("@CHEMICAL$", "@GENE$", "@CHEM-GENE$"),
            released_as="ChemProt_Corpus",
            compact_prefix="blurb-",
            counts=(18035, 11268, 15745),
        ),
        TextTask(
            name="chemprot-scibert",
            kind="answers",
            labels=_RELATIONS,
            max_tokens=256,
            released_as="chemprot",
            compact_prefix="scibert-",
        ),
        TextTask(
            name="ddi",
            kind="relations",
            labels=("false", "advise", "effect", "int", "mechanism"),
            max_tokens=256,
            dummies=("@DRUG$", "@DRUG$", "@DRUG-DRUG$"),
            left_out=("None",),
            released_as="DDICorpus",
            counts=(25296, 2496, 5716),
        ),
        TextTask(
            name="gad",
            kind="relations",
            labels=("0", "1"),
            max_tokens=128,
            released_as="GAD",
            counts=(4261, 535, 534),
        ),
        TextTask(
            name="biosses", kind="similarity", released_as="BIOSSES", counts=(64, 16, 20), seeds=10
        ),
        TextTask(
            name="hoc",
            kind="documents",
            labels=_HALLMARKS,
            released_as="HoC",
            counts=(1295, 186, 371),
        ),
        TextTask(
            name="pubmedqa",
            kind="answers",
            labels=("yes", "no", "maybe"),
            released_as="pubmedqa",
            counts=(450, 50, 500),
            seeds=10,
        ),
        TextTask(
            name="bioasq",
            kind="answers",
            labels=("yes", "no"),
            released_as="BioASQ",
            counts=(670, 75, 140),
            seeds=10,
        ),
        TextTask(name="mednli", kind="answers", labels=_INFERENCE, max_tokens=128),
        TextTask(
            name="radnli",
            kind="answers",
            labels=_INFERENCE,
            max_tokens=128,
            evaluation_only="mednli",
        ),
        TextTask(name="medsts", kind="similarity", max_tokens=128),
        TextTask(name="openi", kind="documents", labels=_FINDINGS, max_tokens=256),
    )
}
"""Name -> task."""
BLURB: tuple[tuple[str, ...], ...] = (
    ("bc5-chem", "bc5-disease", "ncbi-disease", "bc2gm", "jnlpba"),
    ("ebm-pico",),
    ("chemprot", "ddi", "gad"),
    ("biosses",),
    ("hoc",),
    ("pubmedqa", "bioasq"),
)
"""The six groups of BLURB; its score is the mean of their means."""


# Texts of relations: forms of the two mentions in the input of an encoder (Gu et al. 2021, Table
# 14).
#
# * "dummies": each mention is replaced by its type, such as `@DRUG$`; overlapping ones by one
#   word.
# * "markers": `<e1>`, `</e1>`, `<e2>`, `</e2>` around the mentions.
# * "original": the sentence as it is. Read through the first token alone, several pairs of one
#   sentence are one input.

RelationText = Literal["dummies", "markers", "original"]
Spans = tuple[tuple[int, int], tuple[int, int]]


def relation_text(
    example: TextExample, task: TextTask, form: RelationText
) -> tuple[str, Spans | None]:
    """Return the text of a relation, and the spans of its mentions in it where they are known.

    Raises CorpusError where a set has dummies only and another form is requested, or spans exceed
    the text.
    """
    text = example.texts[0]
    spans = example.spans
    if spans is None:
        if form != "dummies":
            message = f"{task.name} has texts with dummies only; it cannot be read as {form!r}"
            raise CorpusError(message, "unsupported", field="relation_form")
        return text, None
    (a, b), (c, d) = spans
    if not (0 <= a < b <= len(text) and 0 <= c < d <= len(text) and a <= c):
        message = (
            f"{task.name}: the mentions of {example.key} leave its text or are out of "
            f"order: {spans}"
        )
        raise CorpusError(message, "out_of_range", field="data")
    if form == "original":
        return text, spans
    overlap = c < b
    if form == "markers":
        return (
            _marked(text, spans)
            if not overlap
            else (_around(text, a, max(b, d), "<e1><e2>", "</e2></e1>"))
        )
    first, second, both = task.dummies
    if overlap:
        end = max(b, d)
        return text[:a] + both + text[end:], ((a, a + len(both)), (a, a + len(both)))
    shown = text[:a] + first + text[b:c] + second + text[d:]
    start = a + len(first) + (c - b)
    return shown, ((a, a + len(first)), (start, start + len(second)))


def _marked(text: str, spans: Spans) -> tuple[str, Spans]:
    (a, b), (c, d) = spans
    pieces = (text[:a], "<e1>", text[a:b], "</e1>", text[b:c], "<e2>", text[c:d], "</e2>", text[d:])
    starts = [0]
    for piece in pieces:
        starts.append(starts[-1] + len(piece))
    return "".join(pieces), ((starts[1], starts[4]), (starts[5], starts[8]))


def _around(text: str, start: int, end: int, before: str, after: str) -> tuple[str, Spans]:
    stop = end + len(before) + len(after)
    return text[:start] + before + text[start:end] + after + text[end:], (
        (start, stop),
        (start, stop),
    )
