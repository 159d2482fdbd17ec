"""Case reports about the phantom's patients: an article a patient, its figures with captions and references.

Beside the radiographs there are CT and MR slices, as in the literature. What is wrong with real corpora of figures is
wrong with these too: some captions are blank, some files are missing or empty, some lines stand twice, and now and then
there is a chart among them.
"""

import dataclasses

import cv2
import numpy as np
from numpy.typing import NDArray

from medvl.phantom.language.captions import compose_caption, compose_references
from medvl.phantom.language.sentences import pick
from medvl.phantom.language.slice_captions import compose_slice_caption, compose_slice_references
from medvl.phantom.layouts.mimic_cxr import encode_jpeg
from medvl.phantom.population.world import Patient, Study, View
from medvl.phantom.rendering.ct_mr_slices import Slice, draw_slice, take_slice
from medvl.phantom.rendering.draw import draw
from medvl.phantom.seeds import generator

_STREAM = 94
_BLANK, _TWICE, _CHARTED = 0.02, 0.01, 0.08  # shares of captions, of lines, of articles
_SLICES = 0.6  # share of the studies that come with one
_LOST, _EMPTY = (100, 77), (200, 133)  # of so many articles, this one: a fixed share, below the budget of a conversion


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One figure of an article."""

    number: int
    """In the article, from 1."""
    caption: str
    """Without "Figure 1."; blank where the corpus lost it."""
    references: tuple[str, ...]
    study: Study | None = None
    view: View | None = None
    part: Slice | None = None
    """A figure is a radiograph (`view`), a slice (`part`), or a chart where both are None."""
    twice: bool = False
    """The tables list it in two lines."""
    file: str = "whole"
    """whole, missing or empty."""

    @property
    def radiology(self) -> bool:
        """Whether it is an image of a patient."""
        return self.view is not None or self.part is not None


def article_id(patient: Patient) -> str:
    """As PubMed Central numbers articles: any likeness to a real number is chance."""
    return f"PMC{patient.subject_id}"


def article_figures(patient: Patient) -> list[Figure]:
    """The figures of a patient's case report, always the same ones: study by study its views and perhaps a slice, then
    perhaps a chart."""
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
                twice=rng.random() < _TWICE,
                file=_fate(patient.index, number),
            )
            figures.append(dataclasses.replace(figure, caption="") if rng.random() < _BLANK else figure)
        rng = generator(*study.key, _STREAM, 1)
        if rng.random() < _SLICES:
            figures.append(_slice(rng, study, len(figures) + 1))
    rng = generator(*patient.studies[0].key, _STREAM)
    if rng.random() < _CHARTED:
        number = len(figures) + 1
        figures.append(
            Figure(
                number=number,
                caption=pick(rng, ["Course of body temperature during the hospital stay.", "Serum levels over time."]),
                references=(f"The course is shown in Figure {number}.",),
            )
        )
    return figures


def figure_bytes(figure: Figure, size: int, suffix: str) -> bytes | None:
    """The figure's file, ".jpg" or ".png", of `size` pixels along its longer side.

    No bytes where the file is to be empty, None where it is to be missing.
    """
    if figure.file != "whole":
        return b"" if figure.file == "empty" else None
    if figure.view is not None:
        image_HW = draw(figure.view, size)
    else:
        image_HW = draw_slice(figure.part, size) if figure.part is not None else _chart(figure.number, size)
    if suffix == ".jpg":
        return encode_jpeg(image_HW)
    return cv2.imencode(suffix, (image_HW >> 4).astype(np.uint8))[1].tobytes()


def _slice(rng: np.random.Generator, study: Study, number: int) -> Figure:
    part = take_slice((*study.key, _STREAM, 2))
    return Figure(
        number=number,
        caption="" if rng.random() < _BLANK else compose_slice_caption(rng, part),
        references=tuple(compose_slice_references(rng, part, number)),
        study=study,
        part=part,
    )


def _fate(article: int, number: int) -> str:
    if number == 1 and article % _LOST[0] == _LOST[1]:
        return "missing"
    return "empty" if number == 1 and article % _EMPTY[0] == _EMPTY[1] else "whole"


def _chart(number: int, size: int) -> NDArray[np.uint16]:
    """A line that goes up and down, in a frame; 12 bits, as `draw` gives them."""
    chart_HW = np.full((max(16, 3 * size // 4), size), 255, np.uint8)
    height, width = chart_HW.shape
    left, right, top, bottom = width // 8, width - width // 16, height // 10, height - height // 6
    cv2.rectangle(chart_HW, (left, top), (right, bottom), 0, max(1, size // 200))
    x = np.linspace(left, right, 24)
    y = (top + bottom) / 2 + 0.3 * (bottom - top) * np.sin(np.arange(24) * (0.4 + 0.1 * number))
    points = np.stack([x, y], axis=1).round().astype(np.int32)
    cv2.polylines(chart_HW, [points], False, 60, max(1, size // 120), cv2.LINE_AA)
    return chart_HW.astype(np.uint16) * np.uint16(16)
