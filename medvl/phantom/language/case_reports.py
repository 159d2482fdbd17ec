"""Case reports about patients: an article per patient, with figures, captions and references.

Besides radiographs there are CT and MR slices, as in the literature. The defects of real figure
corpora occur as well: blank captions, missing or empty files, duplicated table lines, and charts
among the images.
"""

import dataclasses

import numpy as np

from medvl.phantom.language.captions import (
    compose_caption,
    compose_references,
    compose_slice_caption,
    compose_slice_references,
)
from medvl.phantom.language.reports import pick
from medvl.phantom.population.slices import Slice, sample_slice
from medvl.phantom.population.world import Patient, Study, View
from medvl.phantom.seeds import generator

_STREAM = 94
# of captions, of lines, of articles
_BLANK_SHARE = 0.02
_DUPLICATED_SHARE = 0.01
_CHART_SHARE = 0.08
_SLICE_SHARE = 0.6  # of studies
# (period, remainder) of article numbers: below the budget of a conversion
_MISSING = (100, 77)
_EMPTY = (200, 133)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A figure of an article: a radiograph (`view`), a slice (`ct_mr_slice`), or a chart if both
    are None.
    """

    number: int
    """Number in the article, from 1."""
    caption: str
    """Caption without "Figure 1."; blank if missing."""
    references: tuple[str, ...]
    study: Study | None = None
    view: View | None = None
    ct_mr_slice: Slice | None = None
    duplicated: bool = False
    """Whether the tables contain its line twice."""
    file: str = "intact"
    """State of its file: intact, missing or empty."""

    @property
    def radiology(self) -> bool:
        """Whether it is an image of a patient, not a chart."""
        return self.view is not None or self.ct_mr_slice is not None


def article_id(patient: Patient) -> str:
    """Return an article id in the form of PubMed Central, unrelated to real articles."""
    return f"PMC{patient.subject_id}"


def article_figures(patient: Patient) -> list[Figure]:
    """Return the figures of a patient's case report: views and slices study by study, then
    possibly a chart.
    """
    figures: list[Figure] = []
    for study in patient.studies:
        for view in study.views:
            rng = generator(*view.key, _STREAM)
            number = len(figures) + 1
            figure = Figure(
                number=number,
                caption=compose_caption(rng, study, view),
                references=tuple(compose_references(rng, view, number)),
                study=study,
                view=view,
                duplicated=rng.random() < _DUPLICATED_SHARE,
                file=_file_state(patient.index, number),
            )
            figures.append(
                dataclasses.replace(figure, caption="") if rng.random() < _BLANK_SHARE else figure
            )
        rng = generator(*study.key, _STREAM, 1)
        if rng.random() < _SLICE_SHARE:
            figures.append(_slice(rng, study, len(figures) + 1))
    rng = generator(*patient.studies[0].key, _STREAM)
    if rng.random() < _CHART_SHARE:
        number = len(figures) + 1
        figures.append(
            Figure(
                number=number,
                caption=pick(
                    rng,
                    [
                        "Course of body temperature during the hospital stay.",
                        "Serum levels over time.",
                    ],
                ),
                references=(f"The course is shown in Figure {number}.",),
            )
        )
    return figures


def _slice(rng: np.random.Generator, study: Study, number: int) -> Figure:
    part = sample_slice((*study.key, _STREAM, 2))
    return Figure(
        number=number,
        caption="" if rng.random() < _BLANK_SHARE else compose_slice_caption(rng, part),
        references=tuple(compose_slice_references(rng, part, number)),
        study=study,
        ct_mr_slice=part,
    )


def _file_state(article: int, number: int) -> str:
    if number == 1 and article % _MISSING[0] == _MISSING[1]:
        return "missing"
    return "empty" if number == 1 and article % _EMPTY[0] == _EMPTY[1] else "intact"
