"""Evaluations of labels in odd spellings: nothing is left out of a mean without a word."""

from typing import Any

import numpy as np
import pytest
from helpers.errors import raises
from helpers.eval_fakes import FakeLoader, FakeModel, make_source

from medvl.errors import EvaluationError
from medvl.eval import LabelPolicy, write_zero_shot_page, zero_shot
from medvl.eval.core.results import PageHeader
from medvl.eval.robustness.image_versions import paraphrases, statements
from medvl.eval.zero_shot_classification.prompts import load_prompts
from medvl.eval.zero_shot_classification.protocol import ZeroShotResult

PROPER = ("Cardiomegaly", "Edema", "Pleural Effusion")
ODD = ("cardiomegaly", "EDEMA", "Pleural_Effusion")


def evaluated(names: tuple[str, ...], **settings: Any) -> ZeroShotResult:
    labels_NL = (np.random.default_rng(0).random((60, len(names))) < 0.4).astype(float)
    prompts = settings.pop("prompts", "chexpert_pairs")
    return zero_shot(
        FakeModel(), FakeLoader(make_source(labels_NL, names)), prompts, resamples=20, **settings
    )


def test_odd_spellings_have_the_metrics_of_proper_ones() -> None:
    proper, odd = evaluated(PROPER), evaluated(ODD)
    assert repr(odd.results.rows) == repr(proper.results.rows)  # undefined values are equal too
    assert odd.images.names == PROPER
    assert odd.results.details["renamed_labels"] == dict(zip(PROPER, ODD, strict=True))
    assert odd.results.details["means"]["macro"] == list(PROPER)
    assert evaluated(ODD, labels=("edema", "pleural effusion")).images.names == (
        "Edema",
        "Pleural Effusion",
    )


@pytest.mark.parametrize("name", ["chexpert_pairs", "statements"])
def test_what_is_left_out_of_the_mean_is_named_everywhere(name: str, tmp_path: Any) -> None:
    result = evaluated(("Edema", "finding=scoliosis"), prompts=name)
    left_out = result.results.details["left_out_of_means"]
    page = write_zero_shot_page(
        result, tmp_path / "index.html", PageHeader(model="m", data="d")
    ).read_text()
    assert left_out["Fracture"] == "no label of the data"
    assert "Fracture" in result.table()
    assert "Fracture" in page
    if name == "statements":
        assert "There is scoliosis." in result.prompts.texts()
        assert "finding=scoliosis" not in left_out
    else:
        assert left_out["finding=scoliosis"] == "no prompts"
        assert "finding=scoliosis (no prompts)" in result.table()
        assert "finding=scoliosis (no prompts)" in page


def test_statements_ask_synonyms_by_their_own_name() -> None:
    prompts = load_prompts("statements").for_labels(
        ["Effusion", "pleural_thickening", "CARDIOMEGALY"]
    )
    assert prompts.classes["Effusion"].positive == ("There is effusion.",)
    assert prompts.classes["pleural_thickening"].positive == ("There is pleural thickening.",)
    assert "CARDIOMEGALY" not in prompts.classes
    assert load_prompts("chexpert_pairs").labels_of(["Effusion"]) == {
        "Pleural Effusion": "Effusion"
    }


def test_two_spellings_of_one_class_are_refused() -> None:
    with raises(EvaluationError, "conflict", field="labels"):
        evaluated(("edema", "EDEMA"))


def test_policies_know_no_finding_and_uncertain_labels_in_any_spelling() -> None:
    nan = np.nan
    table = [[1.0, nan, nan], [nan, 1.0, nan], [nan, nan, -1.0]]
    proper = LabelPolicy(uncertain="per_class").resolve(
        table, ("No Finding", "Edema", "Cardiomegaly")
    )
    odd = LabelPolicy(uncertain="per_class").resolve(table, ("no_finding", "edema", "CARDIOMEGALY"))
    np.testing.assert_array_equal(odd.labels_NL, proper.labels_NL)


def test_paraphrases_say_words() -> None:
    assert statements(["pleural_effusion", "finding=mass"]) == {
        "pleural_effusion": statements(["Pleural Effusion"])["Pleural Effusion"],
        "finding=mass": ("There is mass.", "There is no mass."),
    }
    texts = " ".join(
        text for one in paraphrases(["finding=mass", "Lung_Opacity"]) for text in one.texts()
    )
    assert "=" not in texts
    assert "_" not in texts
