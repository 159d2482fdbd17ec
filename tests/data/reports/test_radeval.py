"""The adapter of RadEval: with a stand-in of the package, and with itself where it is installed."""

import importlib.util
import sys
from pathlib import Path

import pytest
from helpers.errors import raises

from medvl.data.reports.radeval import open_radeval
from medvl.errors import ConfigError
from medvl.eval.report_generation.external import radeval_scores
from medvl.train.rewards.text_rewards import radgraph_reward

INSTALLED = importlib.util.find_spec("radeval") is not None


@pytest.mark.skipif(not INSTALLED, reason="needs radeval")
def test_a_metric_without_weights() -> None:
    texts = [("no effusion", "no effusion is seen"), ("the same", "the same")]
    scores, missing = radeval_scores(["rouge", "unknown"], texts)
    assert scores["rougeL"][1] == 1
    assert 0 < scores["rougeL"][0] < 1
    assert [*missing] == ["unknown"]


@pytest.mark.skipif(INSTALLED, reason="radeval is installed")
def test_the_package_is_named_where_it_is_missing() -> None:
    with raises(ConfigError, "not_found", "radeval"):
        open_radeval("radgraph")


def test_radgraph_is_that_of_radeval(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Release 2.2.1 of the package imports itself under its former name."""
    folder = tmp_path / "radeval"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "class RadEval:\n"
        "    def __init__(self, metrics, per_sample, show_progress):\n"
        "        from RadEval.metrics import score\n"
        "        self.score, self.name = score, metrics[0]\n"
        "        if self.name == 'green': raise OSError('no weights')\n"
        "    def __call__(self, refs, hyps):\n"
        "        values = [self.score(*pair) for pair in zip(refs, hyps)]\n"
        "        return {f'{self.name}_partial': values, 'note': 'x'}\n"
    )
    (folder / "metrics.py").write_text("def score(a, b): return 1 if a == b else .25\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("radeval", "radeval.metrics", "RadEval", "RadEval.metrics"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    scores = open_radeval("radgraph")(["a", "b"], ["a", "a"])
    assert scores == {"radgraph_partial": [1.0, 0.25]}
    assert radgraph_reward()("a", "b") == 0.25
    with raises(ConfigError, "unsupported", "radeval"):
        open_radeval("green")
    for name in ("radeval", "radeval.metrics", "RadEval", "RadEval.metrics"):
        sys.modules.pop(name, None)
