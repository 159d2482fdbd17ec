"""Process of the server: load models, embed the gallery, listen."""

import dataclasses
import logging
import socket
from collections.abc import Sequence
from pathlib import Path

from medvl.errors import ConfigError
from medvl.eval.zero_shot_classification.prompts import load_prompts
from medvl.serve.app import create_app
from medvl.serve.config import ServeConfig
from medvl.serve.models import Gallery, ServedModel

_MOST_MODELS = 2


def serve(
    checkpoints: Sequence[str | Path],
    *,
    config: ServeConfig | None = None,
    prompts: str = "chexpert_ensemble",
    calibrations: Sequence[Path] = (),
    gallery: Path | None = None,
    gallery_images: int = 5000,
    device: str = "auto",
    certificate: tuple[Path, Path] | None = None,
) -> None:
    """Serve one checkpoint, or two side by side, until interrupted.

    Args:
        checkpoints: what `medvl.load` takes: folders of checkpoints or of runs, names on the hub.
        config: address, access and limits.
        prompts: prompt set of the findings, by name or path.
        calibrations: files of calibrations in the order of the checkpoints; those beside the
            checkpoints by default.
        gallery: folder of shards for nearest neighbours, at most `gallery_images` of them.
        device: auto, cpu or cuda.
        certificate: files of a TLS certificate and its key, for https.

    Raises as `ServedModel.open` and `Gallery.build`; ConfigError for other numbers of checkpoints,
    or where the address is not available.
    """
    import uvicorn

    from medvl.serve.guard import MOST_CONNECTIONS, limited_protocol

    config = (config or ServeConfig()).with_token()
    models = open_models(checkpoints, prompts=prompts, calibrations=calibrations, device=device)
    images = None if gallery is None else Gallery.build(gallery, models, gallery_images)
    listener = listen(config)
    port = listener.getsockname()[1]
    app = create_app(models, images, dataclasses.replace(config, port=port))
    _announce(models, config, port, "http" if certificate is None else "https")
    settings = uvicorn.Config(
        app,
        log_config=None,
        http=limited_protocol(config),
        access_log=False,  # would log the paths of requests, which clients can choose freely
        proxy_headers=False,  # a client could name another address with each request
        server_header=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=10,
        ws="none",
        ssl_certfile=None if certificate is None else certificate[0],
        ssl_keyfile=None if certificate is None else str(certificate[1]),
    )
    with listener:
        uvicorn.Server(settings).run(sockets=[listener])


def open_models(
    checkpoints: Sequence[str | Path],
    *,
    prompts: str,
    calibrations: Sequence[Path] = (),
    device: str = "auto",
) -> list[ServedModel]:
    """Load the checkpoints with different titles. Raises as `serve`."""
    if not 1 <= len(checkpoints) <= _MOST_MODELS:
        message = (
            f"expected one or {_MOST_MODELS} checkpoints, got {len(checkpoints)}: medvl "
            f"serve --checkpoint RUN"
        )
        raise ConfigError(message, "out_of_range", field="checkpoint")
    if calibrations and len(calibrations) != len(checkpoints):
        message = (
            f"expected one calibration for each checkpoint, got {len(calibrations)} for "
            f"{len(checkpoints)}"
        )
        raise ConfigError(message, "mismatch", field="calibration")
    prompt_set = load_prompts(prompts)
    given: list[Path | None] = [*calibrations] if calibrations else [None] * len(checkpoints)
    models = [
        ServedModel.open(run, prompt_set, device, path)
        for run, path in zip(checkpoints, given, strict=True)
    ]
    if len({served.title for served in models}) < len(models):
        for number, served in enumerate(models, 1):
            served.title = f"{served.title} ({number})"
    return models


def listen(config: ServeConfig) -> socket.socket:
    """Return a socket that is bound to the address. Raises ConfigError where it is not
    available.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        message = (
            f"cannot listen on {config.host}:{config.port} ({error.strerror}); take another port"
        )
        raise ConfigError(message, "in_use", field="port") from error
    listener.set_inheritable(True)
    return listener


def _announce(models: Sequence[ServedModel], config: ServeConfig, port: int, scheme: str) -> None:
    """Log the models and the address; the token is in the fragment of the address, which
    browsers do not send.
    """
    log = logging.getLogger("medvl.serve")
    for served in models:
        able = ", ".join(name for name, able in served.abilities.items() if able)
        log.info(
            "%s (%s): %s; %s",
            served.title,
            served.model.name,
            able,
            served.describe()["calibration"],
        )
    host = socket.gethostname() if config.host in ("0.0.0.0", "::") else config.host
    host = f"[{host}]" if ":" in host else host
    fragment = "" if config.token is None else f"/#token={config.token}"
    log.info("open %s://%s:%d%s", scheme, host, port, fragment)
    if not config.is_local and scheme == "http":
        log.warning(
            "images and the token travel unencrypted; give a --certificate, or use an SSH tunnel"
        )
