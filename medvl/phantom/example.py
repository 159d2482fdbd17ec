"""One synthetic radiograph with its report, for a first try of a model."""

from pathlib import Path

from medvl.common.files import write_atomic
from medvl.errors import ConfigError
from medvl.phantom.language.reports import compose_report
from medvl.phantom.layouts.dicom_writer import dicom_bytes
from medvl.phantom.population.world import World
from medvl.phantom.rendering.draw import draw
from medvl.phantom.rendering.scene import encode_jpeg, encode_png

_SEED = 1
_PATIENT = 48


def write_example(out: Path | str, *, size: int = 512) -> str:
    """Write the radiograph of a patient with a large right pleural effusion and an enlarged heart,
    and return the impression of its report.

    Arguments and errors are those of `draw_example`; `out` is the file.
    """
    path = Path(out)
    content, impression = draw_example(path.suffix, size=size)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content)
    return impression


def draw_example(suffix: str, *, size: int = 512) -> tuple[bytes, str]:
    """Return the radiograph of `write_example` as a file, and the impression of its report.

    The patient belongs to the phantom world of seed 1, which the quickstart and the demo checkpoint
    were not trained on.

    Args:
        suffix: kind of the file: .png, .jpg, .jpeg, .dcm or .dicom.
        size: longer side in pixels.

    Raises ConfigError for another suffix ("out_of_range").
    """
    patient = World(seed=_SEED).patient(_PATIENT)
    study = patient.studies[0]
    image_HW = draw(study.views[0], size)
    kind = suffix.lower()
    if kind == ".png":
        content = encode_png(image_HW)
    elif kind in (".jpg", ".jpeg"):
        content = encode_jpeg(image_HW)
    elif kind in (".dcm", ".dicom"):
        content = dicom_bytes(patient, study, study.views[0], image_HW)
    else:
        message = f"expected the suffix .png, .jpg, .jpeg, .dcm or .dicom, got {suffix!r}"
        raise ConfigError(message, "out_of_range", field="out")
    return content, compose_report(study).impression
