"""Check of the settings of a benchmark's models before any of them is trained."""

import json
from collections.abc import Mapping

import torch

from medvl.benchmark.execute import located
from medvl.benchmark.plan import Plan
from medvl.benchmark.run import Run
from medvl.benchmark.store import Store
from medvl.common.config_io import from_dict
from medvl.errors import MedvlError
from medvl.models import System, system

_LATER = ("missing", "not_found")
"""Codes of what the corpora lack until they are made: vocabularies, graphs of entities, checkpoints of other runs."""


def model_errors(plan: Plan, store: Store) -> Mapping[str, str]:
    """Return key -> error of the runs whose model cannot be built; finished runs and data that lack are left out.

    Each distinct model is built once, on the meta device.
    """
    found: dict[tuple[str, str], str | None] = {}
    errors: dict[str, str] = {}
    for run in plan.runs:
        if store.state(run) == "finished":
            continue
        model = run.system, json.dumps(run.settings["model"], sort_keys=True)
        if model not in found:
            found[model] = _error(run, store)
        if (error := found[model]) is not None:
            errors[run.key] = error
    return errors


def _error(run: Run, store: Store) -> str | None:
    cls: type[System] = system(run.system)
    try:
        config = from_dict(cls.Config, located(run, store, run.settings["model"]))
        with torch.device("meta"):
            cls.build(config, pretrained=False, tokenizer=None)
    except MedvlError as error:
        return None if error.code in _LATER else str(error)
    return None
