"""Kinds of views."""

from typing import Any

import pytest

from medvl.data.annotations import frontal_or_lateral
from medvl.data.loading.studies import StudySource
from medvl.eval.core.metric_rows import subgroups_of
from medvl.schema import Sample


@pytest.mark.parametrize(
    ("view", "kind"),
    [
        ("PA", "frontal"),
        ("ap axial", "frontal"),
        ("FRONTAL", "frontal"),
        ("AP LLD", "frontal"),
        ("PA RLD", "frontal"),
        ("RLD", "frontal"),
        ("LATERAL", "lateral"),
        ("XTABLE LATERAL", "lateral"),
        ("LL", "lateral"),
        ("SWIMMERS", None),
        ("", None),
        (None, None),
    ],
)
def test_a_view_is_frontal_or_lateral(view: str | None, kind: str | None) -> None:
    assert frontal_or_lateral(view) == kind


def test_decubitus_films_are_frontal_in_subgroups_and_studies() -> None:
    samples = [
        Sample(key=view, corpus="c", split="test", patient="p", study="s", view=view)
        for view in ("AP LLD", "LLD", "LATERAL", "PA")
    ]

    class Study:
        label_names, fingerprint = (), "0" * 64

        def __len__(self) -> int:
            return len(samples)

        def sample(self, position: int) -> Sample:
            return samples[position]

        def pixels(self, position: int, color: bool = False) -> str:
            return samples[position].key

    assert [subgroups_of(sample).get("view") for sample in samples] == [
        "frontal",
        "frontal",
        "lateral",
        "frontal",
    ]
    assert subgroups_of(samples[0])["projection"] == "AP"
    study: Any = Study()  # the part of a source that is read here
    assert StudySource(study).images_of(0, study.pixels, 2) == ["AP LLD", "LATERAL"]
