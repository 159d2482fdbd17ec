"""`medvl phantom`: the phantom world in the layouts of the real corpora. Each command returns the text to print."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhantomOptions:
    """Size and seed of the corpus."""

    patients: int = 400
    """number of patients; each has one or more images, on average 2.3 in RSNA, 0.7 in SIIM and 2.5 in VQA corpora"""
    size: int = 512
    """height and width of the images in pixels; the longer side in VQA corpora"""
    seed: int = 0
    """seed of the world; corpora with the same seed have the same patients, so evaluate on another seed"""
    workers: int | None = None
    """processes; default one per core"""


MIMIC_CXR = PhantomOptions()
CHEXPERT = PhantomOptions(size=320, seed=1)
ROCO = PhantomOptions(seed=10)
MEDICAT = PhantomOptions(seed=11)
VQA_RAD = PhantomOptions(seed=20)
SLAKE = PhantomOptions(seed=21)
MS_CXR = PhantomOptions(patients=100, seed=30)
RSNA = PhantomOptions(size=1024, seed=40)
SIIM = PhantomOptions(size=1024, seed=41)


def mimic_cxr(out: Path, options: PhantomOptions = MIMIC_CXR) -> str:
    """Write the phantom world as MIMIC-CXR 2.0.0: DICOM files, reports and tables.

    Args:
        out: output folder.
        options: size and seed of the corpus.
    """
    from medvl.phantom import write_mimic_cxr

    return _write(write_mimic_cxr, out, options, "mimic-cxr")


def mimic_cxr_jpg(out: Path, options: PhantomOptions = MIMIC_CXR) -> str:
    """Write the phantom world as MIMIC-CXR-JPG 2.0.0, with the reports beside the images.

    Args:
        out: output folder.
        options: size and seed of the corpus.
    """
    from medvl.phantom import write_mimic_cxr_jpg

    return _write(write_mimic_cxr_jpg, out, options, "mimic-cxr")


def chexpert(out: Path, options: PhantomOptions = CHEXPERT) -> str:
    """Write the phantom world as CheXpert-v1.0-small.

    Args:
        out: output folder, in which CheXpert-v1.0-small/ is created.
        options: size and seed of the corpus.
    """
    from medvl.phantom import write_chexpert

    write_chexpert(out, **dataclasses.asdict(options))
    root = out / "CheXpert-v1.0-small"
    return f"Wrote {root}. Next: python scripts/zeroshot_chexpert.py --checkpoint RUN --root {root}"


def ms_cxr(out: Path, options: PhantomOptions = MS_CXR) -> str:
    """Write the phantom world as MS-CXR: phrases with boxes, and the images beside the table.

    Args:
        out: output folder.
        options: size and seed of the corpus.
    """
    from medvl.phantom import write_ms_cxr

    return _write(write_ms_cxr, out, options, "ms-cxr")


def rsna(out: Path, options: PhantomOptions = RSNA) -> str:
    """Write the phantom world as the RSNA pneumonia challenge: images with boxes of opacities.

    Args:
        out: output folder.
        options: size and seed of the corpus.
    """
    from medvl.phantom import write_rsna

    return _write(write_rsna, out, options, "rsna")


def siim(out: Path, options: PhantomOptions = SIIM) -> str:
    """Write the phantom world as the SIIM-ACR pneumothorax challenge: images with masks.

    Args:
        out: output folder.
        options: size and seed of the corpus.
    """
    from medvl.phantom import write_siim

    return _write(write_siim, out, options, "siim")


def roco(out: Path, options: PhantomOptions = ROCO) -> str:
    """Write the phantom world as ROCO: figures of case reports with captions and references to them.

    Args:
        out: output folder, in which data/ and roco_references/ are created.
        options: size and seed of the corpus; each patient is an article with one or more figures.
    """
    from medvl.phantom import write_roco

    return _write(write_roco, out, options, "roco", f" --references {out / 'roco_references'}")


def medicat(out: Path, options: PhantomOptions = MEDICAT) -> str:
    """Write the phantom world as MedICaT: figures of case reports with captions and references to them.

    Args:
        out: output folder of the table of figures and figures/.
        options: size and seed of the corpus; each patient is an article with one or more figures.
    """
    from medvl.phantom import write_medicat

    return _write(write_medicat, out, options, "medicat", " --radiology-only")


def vqa_rad(out: Path, options: PhantomOptions = VQA_RAD) -> str:
    """Write the phantom world as VQA-RAD: radiographs, CT and MR slices, and questions that need the image.

    Args:
        out: output folder of trainset.json, testset.json and images/.
        options: size and seed of the corpus.
    """
    from medvl.phantom import write_vqa_rad

    return _write(write_vqa_rad, out, options, "vqa-rad")


def slake(out: Path, options: PhantomOptions = SLAKE) -> str:
    """Write the phantom world as SLAKE, with English questions.

    Args:
        out: output folder of train.json, validate.json, test.json and imgs/.
        options: size and seed of the corpus.
    """
    from medvl.phantom import write_slake

    return _write(write_slake, out, options, "slake")


def contact_sheet(out: Path, *, seed: int = 0) -> str:
    """Draw a sheet with every finding at every severity.

    Args:
        out: PNG file.
        seed: seed of the world.
    """
    from medvl import phantom

    phantom.contact_sheet(phantom.World(seed=seed), out)
    return f"Wrote {out}"


def _write(write: Callable[..., Any], out: Path, options: PhantomOptions, corpus: str, arguments: str = "") -> str:
    """Write a corpus, and return the command that converts it."""
    write(out, **dataclasses.asdict(options))
    return f"Wrote {out}. Next: medvl shards {corpus} --root {out}{arguments} --out {out}-shards"
