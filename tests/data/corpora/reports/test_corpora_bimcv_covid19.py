"""BIMCV-COVID19+, and the translations of RRG24 for it and for PadChest."""

from collections import Counter
from pathlib import Path

import pytest
from helpers.errors import raises

from medvl.common.untrusted import ANYWHERE
from medvl.data.corpora.reports.bimcv_covid19 import BimcvCovid19
from medvl.data.corpora.reports.padchest import PadChest, detokenize, read_translations
from medvl.data.privacy import Deidentifier
from medvl.errors import ConfigError, CorpusError
from medvl.phantom import write_padchest

A = "sub-S01_ses-E1_run-1_bp-chest_vp-pa_dx.png"
B = "sub-S01_ses-E1_run-2_bp-chest_vp-ll_dx.png"
C = "sub-S02_ses-E2_run-1_bp-chest_dx.png"
TABLE = f"""file_path,view,report
data/sub-S01/ses-E1/mod-rx/{A},,Sin hallazgos.
sub-S01/ses-E1/mod-rx/{B},PA,Otro texto.
sub-S02/ses-E2/mod-rx/{C},oblique,Derrame pleural.
sub-S02/ses-E2/mod-ct/{C},,Derrame pleural.
image7.png,,Texto.
"""


def write(root: Path, table: str | None = TABLE, lines: int = 2) -> Path:
    if table is not None:
        (root / "final_annotations.csv").write_text(table)
    (root / "test.image.en.tok").write_text(f"x/{A},x/{B}\nx/{C}\n")
    texts = ["no findings .", "small effusion ( left ) .", "more ."]
    (root / "test.report.en.tok").write_text("\n".join(texts[:lines]) + "\n")
    return root


def test_sessions_share_a_report_and_views_come_from_names(
    tmp_path: Path, deid: Deidentifier
) -> None:
    plan = BimcvCovid19(root=write(tmp_path)).plan(deid)
    first, second, third = plan.iter_samples()
    assert (first.key, first.patient) == (deid.image(A), deid.patient("sub-S01"))
    assert first.study == second.study == deid.study("sub-S01", "ses-E1")
    assert first.sections == second.sections == {"report": "Sin hallazgos."}
    assert [first.view, second.view, third.view] == ["PA", "PA", None]
    assert plan.excluded == {"not_a_radiograph": 1, "no_bids_name": 1}
    counts = {"reports_of_session_differ": 1, "unknown_view": 1}
    assert {name: plan.warnings[name] for name in counts} == counts


def test_translations_replace_reports(tmp_path: Path, deid: Deidentifier) -> None:
    write(tmp_path)
    english = tmp_path / "test.report.en.tok"
    plan = BimcvCovid19(root=tmp_path, reports_en=english).plan(deid)
    assert [each.sections["report"] for each in plan.iter_samples()] == [
        "No findings.", "No findings.", "Small effusion (left).",
    ]  # fmt: skip
    (tmp_path / "final_annotations.csv").unlink()
    alone = BimcvCovid19(root=tmp_path, reports_en=english).plan(deid)
    assert [each.view for each in alone.iter_samples()] == ["PA", "LATERAL", None]
    english.write_text("no findings .\n\n")
    assert BimcvCovid19(root=tmp_path, reports_en=english).plan(deid).excluded == {
        "no_translation": 1
    }


def test_detokenizing_restores_english() -> None:
    assert detokenize("the heart is 1 . 5 cm wide . no effusion ( left ) , x - ray . ok ?") == (
        "The heart is 1.5 cm wide. No effusion (left), x-ray. Ok?"
    )
    assert detokenize("Normal.") == "Normal."


@pytest.mark.parametrize("lines", [1, 3])
def test_another_number_of_lines_is_refused(lines: int, tmp_path: Path) -> None:
    write(tmp_path, lines=lines)
    short = "test.report" if lines == 1 else "test.image"
    with raises(CorpusError, "malformed", names=short):
        read_translations(tmp_path / "test.report.en.tok", ANYWHERE, Counter())


def test_odd_translations_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "test.image.en.tok").write_text(f"{A}\n{A}\n")
    with raises(CorpusError, "malformed", names="test.image"):
        read_translations(tmp_path / "test.report.en.tok", ANYWHERE, Counter())
    with raises(CorpusError, "malformed", "reports_en"):
        read_translations(tmp_path / "reports.txt", ANYWHERE, Counter())
    (tmp_path / "test.image.en.tok").unlink()
    with raises(CorpusError, "not_found"):
        read_translations(tmp_path / "test.report.en.tok", ANYWHERE, Counter())


def test_padchest_in_english(tmp_path: Path, deid: Deidentifier) -> None:
    root = write_padchest(tmp_path / "padchest", patients=3, size=32, workers=1)
    corpus = PadChest(root=root, reports_en=root / "report.en.tok")
    plan = corpus.plan(deid)
    plain = {each.key: each for each in PadChest(root=root).plan(deid).iter_samples()}
    texts = [each.sections.get("report", "") for each in plan.iter_samples()]
    assert plan.warnings["detokenized"] > 0
    assert all(text[0].isupper() and " ." not in text for text in texts if text)
    assert {each.key for each in plan.iter_samples()} == plain.keys()
    assert [each.labels for each in plan.iter_samples()] == [each.labels for each in plain.values()]
    with raises(ConfigError, "conflict", "reports_en"):
        PadChest(root=root, text="spanish", reports_en=root / "report.en.tok").plan(deid)
    lines = (root / "report.en.tok").read_text().splitlines()
    (root / "report.en.tok").write_text("\n".join(lines[:-1]) + "\n")
    with raises(CorpusError, "malformed", names="report.en.tok"):
        corpus.plan(deid)
