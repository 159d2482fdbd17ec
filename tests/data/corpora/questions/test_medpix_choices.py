"""Questions with options from real slices, through `medvl shards parquet`."""

from collections import Counter

import pytest
from helpers.medpix_choices import FORMS, write_medpix_choices

from medvl.data.annotations import questions_of
from medvl.data.corpora.parquet_files import ParquetColumns, ParquetFiles
from medvl.eval.vqa.multiple_choice import baseline_credits

pytestmark = pytest.mark.real


def test_medpix_choices_are_read_with_their_options(real_data, deid, tmp_path):
    write_medpix_choices(real_data, tmp_path)
    columns = ParquetColumns(
        question_column="question", answer_column="answer", options_column="options",
        kind_column="kind", group_column="case",
    )  # fmt: skip
    plan = ParquetFiles(files=(str(tmp_path / "*.parquet"),), columns=columns).plan(deid)
    questions = [question for record in plan.records for question in questions_of(record.sample)]
    test = [question for question in questions if question.split == "test"]
    assert Counter(question.kind for question in test) == {
        "modality": 199, "plane": 190, "region": 199,
    }  # fmt: skip
    for question in questions:
        assert set(question.options) == set(FORMS[question.kind][2].values())
    train = [question for question in questions if question.split == "train"]
    credits = [each["most_frequent_text"] for each in baseline_credits(train, test)]
    assert sum(credits) / len(credits) == pytest.approx(0.537, abs=5e-4)
