"""Metrics of reports by the package RadEval (Delbrouck et al.), where it is installed.

Release 2.2.1 imports itself under a former name of its package, which is registered here. Weights
are downloaded by RadEval on the first use of a metric that needs them.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence

from medvl.errors import ConfigError

PACKAGE = "radeval"
_FORMER_NAME = "RadEval"

ReportScores = Callable[[Sequence[str], Sequence[str]], dict[str, list[float]]]
"""(texts, true texts) -> metric -> a number for each text."""


def open_radeval(metric: str) -> ReportScores:
    """Return a metric of RadEval, such as "radgraph", "f1chexbert", "bertscore" or "ratescore".

    Raises ConfigError where RadEval is not installed ("not_found"), or the metric cannot be made:
    its name is unknown, or its weights cannot be downloaded ("unsupported").
    """
    if importlib.util.find_spec(PACKAGE) is None:
        message = f"{metric} needs the package radeval: pip install radeval==2.2.1"
        raise ConfigError(message, "not_found", field="radeval")
    package = importlib.import_module(PACKAGE)
    sys.modules.setdefault(_FORMER_NAME, package)
    try:
        scorer = package.RadEval(metrics=[metric], per_sample=True, show_progress=False)
    except Exception as error:  # of libraries and of the download of weights, any kind
        message = f"RadEval cannot make {metric} ({type(error).__name__}: {error})"
        raise ConfigError(message, "unsupported", field="radeval") from error

    def scores(texts: Sequence[str], references: Sequence[str]) -> dict[str, list[float]]:
        metrics = scorer(refs=list(references), hyps=list(texts))
        return {
            name: [float(value) for value in values]
            for name, values in metrics.items()
            if isinstance(values, list) and len(values) == len(texts)
        }

    return scores
