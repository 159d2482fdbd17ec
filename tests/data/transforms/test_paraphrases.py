"""Paraphrases in training: which phrases are replaced, how often, and what a file must hold."""

import json
import pickle

import numpy as np
import pytest
from helpers.errors import raises

from medvl.data import Paraphrases
from medvl.errors import ConfigError

TABLE = {
    "retinopathy": ["damage of the retina"],
    "Proliferative retinopathy": ["new vessels of the retina", "growth of vessels"],
    "cataract": ["opacity of the lens"],
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "paraphrases.json"
    path.write_text(json.dumps(TABLE))
    return path


def texts(policy, text, count=400):
    return [policy({"impression": text}, np.random.default_rng(seed)) for seed in range(count)]


def test_the_longest_phrase_is_replaced_and_words_are_kept_whole(file):
    policy = Paraphrases(file=file, rate=1.0)
    found = set(texts(policy, "Proliferative Retinopathy, cataract; cataracts, drusen"))
    assert found == {
        f"{first}, opacity of the lens; cataracts, drusen"
        for first in TABLE["Proliferative retinopathy"]
    }


def test_a_share_of_the_phrases_is_replaced_each_drawn_apart(file):
    found = texts(Paraphrases(file=file, rate=0.25), "cataract, cataract")
    share = np.mean([text.count("opacity") for text in found]) / 2
    assert abs(share - 0.25) < 4 * np.sqrt(0.25 * 0.75 / 800)
    assert {"opacity of the lens, cataract", "cataract, opacity of the lens"} <= set(found)


def test_the_draw_depends_on_the_generator_alone_also_in_another_process(file):
    policy = pickle.loads(pickle.dumps(Paraphrases(file=file)))
    assert texts(policy, "cataract") == texts(Paraphrases(file=file), "cataract")
    assert set(texts(Paraphrases(file=file, rate=0.0), "Cataract")) == {"Cataract"}


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"a": []}', '{"a": "b"}', '{"a": [" "]}', '{" ": ["b"]}', '{"a": [1]}']
)
def test_other_content_is_refused(tmp_path, content):
    path = tmp_path / "other.json"
    path.write_text(content)
    with raises(ConfigError, "malformed", "file", names="other.json"):
        Paraphrases(file=path).check()


def test_a_missing_file_and_an_impossible_rate_are_refused(file, tmp_path):
    with raises(ConfigError, "not_found", "file", names="none.json"):
        Paraphrases(file=tmp_path / "none.json").check()
    with raises(ConfigError, "out_of_range", "rate"):
        Paraphrases(file=file, rate=1.5)
