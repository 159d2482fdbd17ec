"""`medvl phantom`: the phantom world in the layouts of the real corpora. Each command returns what it has to say."""

from pathlib import Path


def mimic_cxr(out: Path, *, patients: int = 400, size: int = 512, seed: int = 0, workers: int | None = None) -> str:
    """Write the phantom world as MIMIC-CXR 2.0.0: DICOM files, reports and tables.

    Args:
        out: folder to write to.
        patients: how many patients; each has one study or more, each study one image or more.
        size: height and width of the images in pixels.
        seed: of the world.
        workers: processes; default one a core.
    """
    from medvl import phantom

    phantom.write_mimic_cxr(out, patients=patients, size=size, seed=seed, workers=workers)
    return f"Wrote {out}. Next: medvl shards mimic-cxr --root {out} --out {out}-shards"


def mimic_cxr_jpg(out: Path, *, patients: int = 400, size: int = 512, seed: int = 0, workers: int | None = None) -> str:
    """Write the phantom world as MIMIC-CXR-JPG 2.0.0, with the reports beside the images.

    Args:
        out: folder to write to.
        patients: how many patients.
        size: height and width of the images in pixels.
        seed: of the world.
        workers: processes; default one a core.
    """
    from medvl import phantom

    phantom.write_mimic_cxr_jpg(out, patients=patients, size=size, seed=seed, workers=workers)
    return f"Wrote {out}. Next: medvl shards mimic-cxr --root {out} --out {out}-shards"


def chexpert(out: Path, *, patients: int = 400, size: int = 320, seed: int = 1, workers: int | None = None) -> str:
    """Write the phantom world as CheXpert-v1.0-small.

    Args:
        out: folder that gets CheXpert-v1.0-small/.
        patients: how many patients.
        size: height and width of the images in pixels.
        seed: of the world; another one than that of a MIMIC-CXR that was trained on, or the patients are the same.
        workers: processes; default one a core.
    """
    from medvl import phantom

    phantom.write_chexpert(out, patients=patients, size=size, seed=seed, workers=workers)
    root = out / "CheXpert-v1.0-small"
    return f"Wrote {root}. Next: python scripts/zeroshot_chexpert.py --checkpoint RUN --root {root}"


def ms_cxr(out: Path, *, patients: int = 100, size: int = 512, seed: int = 30, workers: int | None = None) -> str:
    """Write the phantom world as MS-CXR: phrases with boxes, and the images beside the table.

    Args:
        out: folder to write to.
        patients: how many patients.
        size: height and width of the images in pixels.
        seed: of the world; another one than that of a corpus that was trained on, or the patients are the same.
        workers: processes; default one a core.
    """
    from medvl import phantom

    phantom.write_ms_cxr(out, patients=patients, size=size, seed=seed, workers=workers)
    return f"Wrote {out}. Next: medvl shards ms-cxr --root {out} --out {out}-shards"


def rsna(out: Path, *, patients: int = 400, size: int = 1024, seed: int = 40, workers: int | None = None) -> str:
    """Write the phantom world as the RSNA pneumonia challenge: images with boxes of opacities.

    Args:
        out: folder to write to.
        patients: how many patients; each has 2.3 images on average.
        size: height and width of the images in pixels.
        seed: of the world; another one than that of a corpus that was trained on, or the patients are the same.
        workers: processes; default one a core.
    """
    from medvl import phantom

    phantom.write_rsna(out, patients=patients, size=size, seed=seed, workers=workers)
    return f"Wrote {out}. Next: medvl shards rsna --root {out} --out {out}-shards"


def siim(out: Path, *, patients: int = 400, size: int = 1024, seed: int = 41, workers: int | None = None) -> str:
    """Write the phantom world as the SIIM-ACR pneumothorax challenge: images with masks.

    Args:
        out: folder to write to.
        patients: how many patients; there is an image for every 1.4 of them.
        size: height and width of the images in pixels.
        seed: of the world; another one than that of a corpus that was trained on, or the patients are the same.
        workers: processes; default one a core.
    """
    from medvl import phantom

    phantom.write_siim(out, patients=patients, size=size, seed=seed, workers=workers)
    return f"Wrote {out}. Next: medvl shards siim --root {out} --out {out}-shards"


def roco(out: Path, *, patients: int = 400, size: int = 512, seed: int = 10, workers: int | None = None) -> str:
    """Write the phantom world as ROCO: figures of case reports, their captions and the references to them.

    Args:
        out: folder that gets data/ and roco_references/.
        patients: how many; each is an article with a figure or more.
        size: height and width of the images in pixels.
        seed: of the world; another one than that of a corpus that is evaluated on, or the patients are the same.
        workers: processes; default one a core.
    """
    from medvl import phantom

    phantom.write_roco(out, patients=patients, size=size, seed=seed, workers=workers)
    references = f"--references {out / 'roco_references'}"
    return f"Wrote {out}. Next: medvl shards roco --root {out} {references} --out {out}-shards"


def medicat(out: Path, *, patients: int = 400, size: int = 512, seed: int = 11, workers: int | None = None) -> str:
    """Write the phantom world as MedICaT: figures of case reports, their captions and the references to them.

    Args:
        out: folder that gets the table of figures and figures/.
        patients: how many; each is an article with a figure or more.
        size: height and width of the images in pixels.
        seed: of the world; another one than that of a corpus that is evaluated on, or the patients are the same.
        workers: processes; default one a core.
    """
    from medvl import phantom

    phantom.write_medicat(out, patients=patients, size=size, seed=seed, workers=workers)
    return f"Wrote {out}. Next: medvl shards medicat --root {out} --radiology-only --out {out}-shards"


def contact_sheet(out: Path, *, seed: int = 0) -> str:
    """Draw a sheet with every finding at every severity.

    Args:
        out: PNG file.
        seed: of the world.
    """
    from medvl import phantom

    phantom.contact_sheet(phantom.World(seed=seed), out)
    return f"Wrote {out}"
