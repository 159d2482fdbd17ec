"""Model cards: the README.md of a checkpoint, in the format of the Hugging Face hub."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from medvl.common.files import write_atomic
from medvl.models.checkpoint_folder import CARD

# Kinds of images that a model was trained on, by the corpora that its checkpoint records.


@dataclasses.dataclass(frozen=True)
class ImageKind:
    """Images of one kind, and the DICOM files that are of it."""

    name: str
    """Plural noun phrase."""
    modalities: tuple[str, ...] = ()
    """DICOM modalities; empty: any."""
    body_parts: tuple[str, ...] = ()
    """Values of Body Part Examined; empty: any."""


_CHEST = ("CHEST", "PORT CHEST", "THORAX", "LUNG", "HEART")
CHEST_RADIOGRAPHS = ImageKind("chest radiographs", ("CR", "DX", "RG"), _CHEST)
CT_SCANS = ImageKind("CT scans", ("CT",))
_CHEST_CT = ImageKind("chest CT", ("CT",), _CHEST)
_ABDOMINAL_CT = ImageKind("abdominal CT", ("CT",), ("ABDOMEN",))
_MAMMOGRAMS = ImageKind("mammograms", ("MG",), ("BREAST",))
_HISTOLOGY = ImageKind("histology", ("SM", "GM"))
_FUNDUS = ImageKind("fundus photographs", ("OP",), ("EYE", "RETINA"))
_SEVERAL = ImageKind("images of several modalities")
_CORPORA = {
    **dict.fromkeys(
        (
            "chestxdet10",
            "chexpert",
            "chexpert-plus",
            "covidx",
            "medvill-jsonl",
            "mimic-cxr",
            "ms-cxr",
            "ms-cxr-t",
            "nih-cxr14",
            "object-cxr",
            "openi",
            "padchest",
            "qata",
            "r2gen-annotation",
            "rsna",
            "chest-imagenome",
            "padchest-gr",
            "rexgradient",
            "rexvqa",
            "siim",
            "vindr-cxr",
            "cxr-qba",
            "diff-vqa",
            "gemex",
            "mimic-cxr-vqa",
            "bimcv-covid19",
            "brax",
            "candid-ptx",
            "chestxdet",
            "vindr-pcxr",
        ),
        CHEST_RADIOGRAPHS,
    ),
    **dict.fromkeys(("ct-rate", "inspect", "mosmed", "rad-chestct"), _CHEST_CT),
    "merlin": _ABDOMINAL_CT,
    **dict.fromkeys(("embed-mammo", "vindr-mammo"), _MAMMOGRAMS),
    "odir": _FUNDUS,
    **dict.fromkeys(("monuseg", "path-vqa"), _HISTOLOGY),
    **dict.fromkeys(
        (
            *("m3ae-arrow", "medicat", "melinda", "roco", "roco-non-radiology", "rocov2"),
            *("pmc-vqa", "slake", "vqa-med", "vqa-rad"),
        ),
        _SEVERAL,
    ),
}


def image_kind(corpus: Any) -> ImageKind | None:
    """Return the kind of the images of a corpus of medvl; None for others, whose manifests do
    not state it.
    """
    return _CORPORA.get(corpus) if isinstance(corpus, str) else None


def image_kinds(manifests: Iterable[Mapping[str, Any]]) -> tuple[ImageKind | None, ...]:
    """Return the kinds of the images of training data, each once; None stands for corpora that do
    not state it.

    Synthetic images are of the kinds of their generators' training data. Corpora of texts alone do
    not count.
    """
    image_manifests = [each for each in manifests if _has_images(each)]
    originals = [each for each in image_manifests if not each.get("generators")]
    return tuple(
        dict.fromkeys(
            image_kind(each.get("corpus"))
            for each in [*originals, *generator_manifests(image_manifests)]
        )
    )


def generator_manifests(manifests: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the manifests of the training data of the generators of synthetic images, theirs
    included.
    """
    generators = [
        each
        for manifest in manifests
        for one in manifest.get("generators", ())
        for each in one["trained_on"]
    ]
    return [*generators, *generator_manifests(generators)] if generators else []


def _has_images(manifest: Mapping[str, Any]) -> bool:
    samples = manifest.get("samples")
    return samples is None or (manifest.get("warnings") or {}).get("no_image", 0) < samples


NO_LICENCE = "not-stated"
_RESULTS = "## Results\n\n", "\n## Licence"
_SHOWN = 24
_TEXT_TO_IMAGE = "text-to-image"
_PIPELINES = {
    **dict.fromkeys(("choices", "vqa"), "visual-question-answering"),
    "classifier": "image-classification",
    **dict.fromkeys(("causal_lm", "cxrmate", "r2gen"), "image-to-text"),
    **dict.fromkeys(("latent_diffusion", "roentgen"), _TEXT_TO_IMAGE),
}


def model_card(
    name: str,
    settings: Mapping[str, Any],
    manifests: Sequence[Mapping[str, Any]],
    run: Mapping[str, Any],
    *,
    dual: bool = False,
    licence: str | None = None,
    results: Mapping[str, float] | None = None,
) -> str:
    """Return the card of a model as Markdown with YAML front matter. It has no path and no hash of
    a patient.

    Args:
        name: the system.
        settings: its configuration.
        manifests: manifests of the training data, own first, then those of earlier training.
        run: how it was trained, as checkpoints record it.
        dual: whether it is a dual-encoder.
        licence: SPDX identifier of the weights' licence; None: not stated.
        results: metric -> value.
    """
    pipeline = "zero-shot-image-classification" if dual else _PIPELINES.get(name)
    front = [
        "library_name: medvl",
        f"license: {'other' if licence is None else json.dumps(licence)}",
    ]
    front += [f"license_name: {NO_LICENCE}"] if licence is None else []
    front += [f"pipeline_tag: {pipeline}"] if pipeline else []
    front += [f"tags: [medvl, medical-imaging, vision-language, {json.dumps(name)}]"]
    call = (
        'medvl.infer(model, "image.dcm", ["pleural effusion"])'
        if dual
        else 'model.transform("image.dcm")'
    )
    if pipeline == _TEXT_TO_IMAGE:  # synthetic images, which must not be taken for a patient's
        call = (
            'medvl.models.sample_images(model, ["Small left pleural effusion."], [0], '
            "medvl.models.Sampling())"
        )
    parts = [
        "\n".join(["---", *front, "---"]),
        f"# {name}",
        "Research model of [medvl](https://github.com/medvl/medvl). It is not a medical device; do "
        "not use it for clinical decisions.",
        f'## Use\n\n```python\nimport medvl\n\nmodel = medvl.load("FOLDER")  # or '
        f'"hf-hub:OWNER/NAME"\n{call}\n```',
        f"## Data\n\n{_data(manifests)}",
        f"## Training\n\n{_training(settings, run)}",
        f"{_RESULTS[0]}{_results(results)}{_RESULTS[1]}\n\n{_licence(licence, manifests)}",
    ]
    return "\n\n".join(parts) + "\n"


def add_results(folder: Path, results: Mapping[str, float]) -> None:
    """Write the results of a run's validation into the card of a checkpoint, in place of those
    it has.
    """
    path = folder / CARD
    before, _, rest = path.read_text(encoding="utf-8").partition(_RESULTS[0])
    _, _, after = rest.partition(_RESULTS[1])
    note = (
        "Validation data of the run, without intervals; the checkpoint may have been "
        "selected by one of them."
    )
    write_atomic(path, f"{before}{_RESULTS[0]}{_results(results, note)}{_RESULTS[1]}{after}")


def _data(manifests: Sequence[Mapping[str, Any]]) -> str:
    if not manifests:
        return "Not recorded: weights of unknown origin, or without training."
    uses = [
        (each, "this training" if number == 0 else "earlier training")
        for number, each in enumerate(manifests)
    ]
    rows = [
        f"| {each.get('corpus', '-')} | {_kind(each)} | {each.get('split', '-')} | "
        f"{each.get('samples', '-')} | {_patients(each)} | {use} |"
        for each, use in [
            *uses,
            *(
                (each, "training of a generator of images")
                for each in generator_manifests(manifests)
            ),
        ]
    ]
    head = (
        "| Corpus | Images | Split | Samples | Patients (or articles) | Used in "
        "|\n|---|---|---|---|---|---|"
    )
    note = (
        "Evaluations refuse data that shares a patient with it: the salted hashes are in the "
        "JSON manifests."
    )
    return "\n".join([head, *rows, "", note])


def _patients(manifest: Mapping[str, Any]) -> str:
    """Return the number of patients, and what counts as one where the release names none."""
    count = len(manifest.get("patients", ()))
    warnings = manifest.get("warnings") or {}
    units = [unit for unit in ("rows", "studies") if warnings.get(f"{unit}_are_patients")]
    return f"{count} ({units[0]}: the release names no patient)" if units else str(count)


def _kind(manifest: Mapping[str, Any]) -> str:
    kind = image_kind(manifest.get("corpus"))
    return "not stated" if kind is None else kind.name


def _training(settings: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    recipe = run.get("recipe")
    resize = settings.get("resize", "area")
    facts = {
        "Recipe": f"`{recipe}`" if recipe else None,
        "Image encoder": _without_fields(settings.get("image_encoder")),
        "Text encoder": _without_fields(settings.get("text_encoder")),
        "Image size": settings.get("image_size"),
        "Resize": None if resize == "area" else f"{settings.get('fit')}, {resize}",
        "Imported from": (run.get("imported") or {}).get("system"),
    }
    lines = [f"- {label}: {value}" for label, value in facts.items() if value is not None]
    return "\n".join([*lines, "- All settings: `config.json`"])


def _without_fields(name: Any) -> Any:
    """Return an encoder's name without the fields of its configuration (`hf:TYPE{FIELDS}`)."""
    return name.partition("{")[0] if isinstance(name, str) else name


def _results(
    results: Mapping[str, float] | None, note: str = "As given by the owner of the weights."
) -> str:
    if not results:
        return "None recorded. `medvl eval` writes them with confidence intervals.\n"
    items = list(results.items())[:_SHOWN]
    rows = [
        f"| {name} | {'undefined' if value is None else f'{value:.4g}'} |" for name, value in items
    ]
    more = (
        [f"\n{len(results) - _SHOWN} more are in the run's log."] if len(results) > _SHOWN else []
    )
    return "\n".join([note, "", "| Metric | Value |", "|---|---|", *rows, *more]) + "\n"


def _licence(licence: str | None, manifests: Sequence[Mapping[str, Any]]) -> str:
    trained = [*manifests, *generator_manifests(manifests)]
    corpora = ", ".join(dict.fromkeys(str(each.get("corpus")) for each in trained))
    terms = (
        f" The terms of the training data apply as well ({corpora}: see medvl's data cards)."
        if corpora
        else ""
    )
    name = (
        "Not stated: the owner of the weights has not named one."
        if licence is None
        else f"{licence}."
    )
    return f"{name}{terms}"
