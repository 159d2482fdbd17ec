"""`medvl phantom` for the layouts of questions about images."""

from pathlib import Path


def vqa_rad(out: Path, *, patients: int = 400, size: int = 512, seed: int = 20, workers: int | None = None) -> str:
    """Write the phantom world as VQA-RAD: radiographs, CT and MR slices, and questions that need the image.

    Args:
        out: folder that gets trainset.json, testset.json and images/.
        patients: how many; each has two to three images.
        size: pixels of the longer side of the images.
        seed: of the world; another one than that of a corpus that is trained on, or the patients are the same.
        workers: processes; default one a core.
    """
    from medvl import phantom

    phantom.write_vqa_rad(out, patients=patients, size=size, seed=seed, workers=workers)
    return f"Wrote {out}. Next: medvl shards vqa-rad --root {out} --out {out}-shards"


def slake(out: Path, *, patients: int = 400, size: int = 512, seed: int = 21, workers: int | None = None) -> str:
    """Write the phantom world as SLAKE, with English questions.

    Args:
        out: folder that gets train.json, validate.json, test.json and imgs/.
        patients: how many; each has two to three images.
        size: pixels of the longer side of the images.
        seed: of the world; another one than that of a corpus that is trained on, or the patients are the same.
        workers: processes; default one a core.
    """
    from medvl import phantom

    phantom.write_slake(out, patients=patients, size=size, seed=seed, workers=workers)
    return f"Wrote {out}. Next: medvl shards slake --root {out} --out {out}-shards"
