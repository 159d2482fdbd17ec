"""`medvl serve`: a page in the browser for one image."""

import logging
import sys
from pathlib import Path

import tyro

from medvl.errors import ConfigError
from medvl.serve.config import ServeConfig


def serve(
    server: tyro.conf.OmitArgPrefixes[ServeConfig],
    *,
    checkpoint: tuple[str, ...] = (),
    prompts: str = "chexpert_ensemble",
    calibration: tuple[Path, ...] = (),
    gallery: Path | None = None,
    gallery_images: int = 5000,
    certificate: tuple[Path, Path] | None = None,
    device: str = "auto",
) -> None:
    """Serve a page for one image: findings, heat maps, questions, reports, neighbours.

    Args:
        server: address, access and limits.
        checkpoint: a run, a folder of a checkpoint, or a name on the hub; two are shown side by side (required).
        prompts: name of a prompt set (`medvl list prompts`) or path of a JSON file, whose findings are offered.
        calibration: files of `medvl eval calibrate`, one for each checkpoint; default those beside the checkpoints.
        gallery: folder of shards whose images are searched for neighbours.
        gallery_images: images of the gallery, evenly spread over its shards.
        certificate: files of a TLS certificate and its key, for https.
        device: auto, cpu or cuda.
    """
    try:
        import fastapi
        import python_multipart
        import uvicorn
    except ImportError as error:
        message = f"medvl serve needs the package {error.name}: pip install 'medvl[serve]'"
        raise ConfigError(message, "missing", field="serve") from None
    del fastapi, python_multipart, uvicorn
    from medvl.serve.run import serve as run

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    run(
        checkpoint,
        config=server,
        prompts=prompts,
        calibrations=calibration,
        gallery=gallery,
        gallery_images=gallery_images,
        device=device,
        certificate=certificate,
    )
