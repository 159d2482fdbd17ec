"""`medvl eval robustness`: subgroups, sites, calibration, prompts, corruptions, negation, sides, other images."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from medvl.cli.eval.options import EvalOptions, MeanOptions, open_evaluation, publish_result
from medvl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from medvl.eval import Loader
    from medvl.eval.probing.fitted import FittedProbe
    from medvl.eval.zero_shot_classification.calibration import Calibration
    from medvl.models import System

_ADVICE = "give a system's checkpoint"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """The data of a linear probe: give both or none."""

    probe_train: Path | None = None
    """folder of labelled shards of other patients, to which a linear probe of the image encoder is fitted"""
    probe_valid: Path | None = None
    """folder of labelled shards of further patients, on which the penalty of the probe is chosen"""

    def splits(self, prompts: Sequence[str], calibration: Path | None) -> list[Path]:
        """Return both folders, or nothing. Raises ConfigError where one is missing or an option does not apply."""
        found = [path for path in (self.probe_train, self.probe_valid) if path is not None]
        if len(found) == 1:
            raise ConfigError("give both --probe-train and --probe-valid", "conflict", field="probe_train")
        if found and (prompts or calibration is not None):
            raise ConfigError("a linear probe has no prompts and no calibration", "conflict", field="probe_train")
        return found


def robustness(
    shared: EvalOptions,
    label: MeanOptions,
    fit: ProbeOptions,
    *,
    prompts: tuple[str, ...] = (),
    corruptions: tuple[str, ...] = ("noise", "blur", "contrast", "crop", "rotation", "marks"),
    made_up: tuple[str, ...] = ("natural noise", "inverted", "shuffled tiles"),
    sites: tuple[Path, ...] = (),
    outside: tuple[Path, ...] = (),
    calibration: Path | None = None,
    seed: int = 0,
) -> None:
    """Test a model on other patients, sites, image qualities and wordings, and on images that are not radiographs.

    The checkpoint is a dual-encoder, a fusion-encoder or a classifier; the shards have labels, texts or both. With
    --probe-train and --probe-valid it is any system with an image encoder, and a linear probe scores the findings.

    Args:
        prompts: prompt sets of a dual-encoder (`medvl list prompts`, or JSON files); the first scores the findings.
            Default chexpert_ensemble (statements for systems that are trained on statements), chexpert_pairs and
            chexzero_template.
        corruptions: corruptions, each at five strengths.
        made_up: images that are not radiographs, made from those of the data.
        sites: folders of labelled shards of other hospitals.
        outside: folders of shards of images that are not chest radiographs, such as those of `medvl phantom roco`.
        calibration: file of `medvl eval calibrate`; default the one beside the checkpoint, if there is one.
        seed: seed of the corruptions and of the intervals.
    """
    from medvl.eval.core.open import open_source
    from medvl.eval.robustness.evaluate import RobustnessSettings, evaluate_robustness
    from medvl.eval.robustness.page import write_robustness_page
    from medvl.eval.zero_shot_classification.prompts import default_prompts, load_prompts
    from medvl.models import System

    splits = fit.splits(prompts, calibration)
    sets = [load_prompts(name) for name in prompts]
    kind: type[System] = System
    model, source, read = open_evaluation(shared, kind, _ADVICE, text=not splits)
    output = shared.folder(shared.checkpoint, "robustness_probe" if splits else "robustness")
    folder = output.settle(manifest=source.fingerprint)
    probe = _probe(model, read, splits, output.path.parent / "features", label) if splits else None
    first = sets[0].name if sets else default_prompts(model)
    result = evaluate_robustness(
        model,
        source,
        read,
        prompts=sets,
        sites={name: open_source(path, [shared.checkpoint]) for name, path in _named(sites).items()},
        outside={name: open_source(path) for name, path in _named(outside).items()},
        calibration=None if splits else _calibration(calibration, shared.checkpoint, first),
        probe=probe,
        settings=RobustnessSettings(
            corruptions=corruptions,
            made_up=made_up,
            policy=label.policy(),
            smallest_class=label.smallest_class,
            resamples=shared.resamples,
            seed=seed,
        ),
        checkpoint=shared.checkpoint,
    )
    name = f"{'linear probe of ' if splits else ''}{model.name} ({shared.checkpoint})"
    page = functools.partial(write_robustness_page, result, pixels=source.pixels)
    publish_result(result, folder, page, name, source.manifest, result.table(), options=shared)


def _probe(
    model: "System", read: "Callable[..., Loader]", splits: Sequence[Path], cache: Path, label: MeanOptions
) -> "FittedProbe":
    """Return a linear probe of the model's image encoder; its features are cached as those of `medvl eval probe`."""
    from medvl.eval.core.open import open_source
    from medvl.eval.probing.features import ProbedEncoder, encode_features
    from medvl.eval.probing.fitted import FittedProbe

    encoder = ProbedEncoder.from_model(model, name=model.name)
    sources = [open_source(path, synthetic=path == splits[0]) for path in splits]
    train, valid = (encode_features(encoder, read(source), cache=cache) for source in sources)
    return FittedProbe.fit(encoder, train, valid, policy=label.policy())


def _named(folders: tuple[Path, ...]) -> dict[str, Path]:
    """Return short name -> folder: the last two parts of the path, or all of it where these are not unique."""
    short = ["/".join(path.parts[-2:]) for path in folders]
    names = [str(path) if short.count(name) > 1 else name for name, path in zip(short, folders, strict=True)]
    return dict(zip(names, folders, strict=True))


def _calibration(path: Path | None, checkpoint: Path, prompts: str) -> "Calibration | None":
    """Return the calibration of a file, or that beside the checkpoint for its prompts; None if there is none."""
    from medvl.eval.zero_shot_classification.calibration import calibration_path, read_calibration

    default = calibration_path(checkpoint, prompts)
    return read_calibration(path or default) if path is not None or default.is_file() else None
