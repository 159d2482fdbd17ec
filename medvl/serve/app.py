"""The application: a page, and an API of forms and JSON that the page uses; and its process, which
loads the models, embeds the gallery and listens.

    GET  /api/models      the served models
    POST /api/view        the image for display, with its window
    POST /api/scores      findings            (text=... for each)
    POST /api/heatmap     a map of one text   (text=...)
    POST /api/answer      a question          (text=...)
    POST /api/report      a generated report
    POST /api/neighbors   the most similar images of the gallery

Every POST is a form with the file `image`, see `medvl.serve.requests`; for models of volumes it has
all files of a series. No file is kept after the response. Errors are `{"error": {"code",
"message"}}`.
"""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import socket
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from medvl.errors import ConfigError, DicomError, ImageError, MedvlError, VolumeError
from medvl.eval.zero_shot_classification.prompts import load_prompts
from medvl.inference.models import Expected
from medvl.phantom.example import draw_example
from medvl.serve import requests
from medvl.serve.config import ServeConfig
from medvl.serve.engine import Engine, Pending
from medvl.serve.guard import Guard, Refused, address_of
from medvl.serve.models import Encoded, Gallery, ServedModel, each_model
from medvl.serve.requests import ImageRequest, read_request
from medvl.serve.volumes import MOST_FILES, decode_volume, view_volume

_log = logging.getLogger("medvl.serve")
_STATIC = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "viewer.js": "text/javascript; charset=utf-8",
    "volume.js": "text/javascript; charset=utf-8",
}
Answer = Callable[[ImageRequest], Awaitable[Any]]


def create_app(
    models: Sequence[ServedModel], gallery: Gallery | None = None, config: ServeConfig | None = None
) -> Guard:
    """Return the ASGI application that serves models.

    Args:
        models: one, or two that are shown side by side.
        gallery: images for nearest neighbours.
        config: access and limits.
    """
    config = (config or ServeConfig()).with_token()
    engine = Engine(config.waiting, config.max_bytes, config.address_share)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        engine.close()

    app = FastAPI(title="medvl", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.add_exception_handler(404, _not_found)
    app.add_exception_handler(405, _not_found)
    _add_files(app)
    served = _Served(tuple(models), gallery, config, engine)
    app.add_api_route("/api/models", served.describe, methods=["GET"])
    if served.example is not None:
        app.add_api_route("/api/example", served.show_example, methods=["GET"])
    for name in ("view", "scores", "heatmap", "answer", "report", "neighbors"):
        app.add_api_route(f"/api/{name}", served.route(getattr(served, name)), methods=["POST"])
    return Guard(app, config)


class _Served:
    """The routes of the API."""

    def __init__(
        self,
        models: tuple[ServedModel, ...],
        gallery: Gallery | None,
        config: ServeConfig,
        engine: Engine,
    ) -> None:
        self._models = models
        self._gallery = gallery
        self._config = config
        self._engine = engine
        self._pending = {
            id(served): Pending(functools.partial(_encode, served), config.batch, config.batch_wait)
            for served in models
        }
        self._described = [served.describe() for served in models]
        self._of_volumes = models[0].reads == "volume"
        self._modality = getattr(models[0].model.transform, "modality", "CT")
        self._one_volume = asyncio.Semaphore(1)
        is_demo = any(served.is_demo for served in models)
        self.example = draw_example(".png")[0] if is_demo else None
        self._expected = {served.title: Expected.by(served.model) for served in models}

    async def show_example(self) -> Response:
        """Return the synthetic radiograph of the demo as PNG."""
        return Response(self.example, headers={"content-type": "image/png"})

    async def describe(self) -> JSONResponse:
        """Return the served models."""
        prompts = self._models[0].prompts
        return JSONResponse(
            {
                "models": self._described,
                "reads": self._models[0].reads,
                "findings": list(prompts.classes),
                "prompts": prompts.name,
                "example": self.example is not None,
                "gallery": None if self._gallery is None else len(self._gallery),
                "max_bytes": self._config.max_bytes,
            }
        )

    def route(self, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        """Return the route of a function that handles requests about an image."""

        async def respond(request: Request) -> Response:
            address = address_of(request.client)
            try:
                with self._engine.upload(address) as count:
                    most = MOST_FILES if self._of_volumes else 1
                    fields = await read_request(request, self._config, count, most)
                    with self._engine.place(address):
                        return JSONResponse(await self._in_turn(answer, fields))
            except Refused as refused:
                return refused.response()
            except MedvlError as error:
                return _bad_input(error)
            except Exception as error:
                return _unexpected(error)

        return respond

    async def _in_turn(self, answer: Answer, fields: ImageRequest) -> Any:
        """Return the answer; of volumes, one at a time, because each takes much memory."""
        if not self._of_volumes:
            return await answer(fields)
        async with self._one_volume:
            return await answer(fields)

    def _decode(self, request: ImageRequest) -> requests.Decoded:
        """Return the image or the volume of a request."""
        if not self._of_volumes:
            return requests.decode(request)
        volume = decode_volume(request, self._config, self._modality)
        return requests.Decoded(pixels=volume, header=None)

    async def view(self, request: ImageRequest) -> Any:
        """Return the image for display."""
        if self._of_volumes:
            encoder: Any = self._models[0].model
            window = encoder.image_encoder.window
            return await self._engine.decode(
                lambda: view_volume(request, self._config, window, self._expected, self._modality)
            )
        return await self._engine.decode(lambda: requests.view(request, self._expected))

    async def scores(self, request: ImageRequest) -> Any:
        """Return the scores of the findings by each model."""
        return await self._run_encoded(
            request, lambda served, image: served.scores(image, request.texts)
        )

    async def heatmap(self, request: ImageRequest) -> Any:
        """Return a map of one text by each model."""
        text = _only(request)
        return await self._run(request, lambda served, pixels: served.heatmap(pixels, text))

    async def answer(self, request: ImageRequest) -> Any:
        """Return the answers to a question."""
        question = _only(request)
        return await self._run(request, lambda served, pixels: served.answer(pixels, question))

    async def report(self, request: ImageRequest) -> Any:
        """Return a report by each model that writes."""
        return await self._run(request, lambda served, pixels: served.report(pixels))

    async def neighbors(self, request: ImageRequest) -> Any:
        """Return the most similar images of the gallery by each model."""
        gallery = self._gallery
        if gallery is None:
            raise Refused(404, "not_found", "the server was started without a gallery")
        number = {id(served): index for index, served in enumerate(self._models)}
        return await self._run_encoded(
            request,
            lambda served, image: gallery.neighbors(number[id(served)], served.embedding(image)),
        )

    async def _run(self, request: ImageRequest, function: Callable[[ServedModel, Any], Any]) -> Any:
        """Return the result of each model for an image."""
        decoded = await self._engine.decode(lambda: self._decode(request))

        async def run(served: ServedModel) -> Any:
            return await self._engine.infer(lambda: function(served, decoded.pixels))

        return {
            "image": requests.describe(decoded.header, self._expected),
            "models": await each_model(self._models, run),
        }

    async def _run_encoded(
        self, request: ImageRequest, function: Callable[[ServedModel, Encoded], Any]
    ) -> Any:
        """Return the result of each model for an image, which is encoded together with those of
        other requests.
        """
        decoded = await self._engine.decode(lambda: self._decode(request))

        async def run(served: ServedModel) -> Any:
            image_1CHW = await self._engine.decode(lambda: served.prepare(decoded.pixels))
            return await self._engine.together(
                self._pending[id(served)], image_1CHW, lambda row: function(served, row)
            )

        return {
            "image": requests.describe(decoded.header, self._expected),
            "models": await each_model(self._models, run),
        }


def _encode(served: ServedModel, images: list[torch.Tensor]) -> list[Encoded]:
    """Encode images, in one call for those of the same number of channels."""
    encoded: dict[int, Encoded] = {}
    for channels in {image_1CHW.shape[1] for image_1CHW in images}:
        places = [
            place for place, image_1CHW in enumerate(images) if image_1CHW.shape[1] == channels
        ]
        rows = served.encode(torch.cat([images[place] for place in places]))
        encoded |= zip(places, rows, strict=True)
    return [encoded[place] for place in range(len(images))]


def _only(request: ImageRequest) -> str:
    if len(request.texts) != 1:
        raise Refused(400, "missing", "expected one field `text`")
    return request.texts[0]


def _bad_input(error: MedvlError) -> JSONResponse:
    status = {"too_large": 413, "unknown_format": 415}.get(error.code, 422)
    kind = "image" if isinstance(error, DicomError | ImageError | VolumeError) else "input"
    return JSONResponse({"error": {"code": error.code or kind, "message": str(error)}}, status)


def _unexpected(error: Exception) -> JSONResponse:
    """Return the response to an unexpected error; only its place is logged, as its message may
    quote the request.
    """
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown"
    _log.error("%s at %s", type(error).__name__, where)
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return Refused(503, "memory", "not enough memory for this image", 5).response()
    return Refused(
        500, "internal", "an error inside of the server; its log names the place"
    ).response()


async def _not_found(_: Request, error: Exception) -> JSONResponse:
    status = getattr(error, "status_code", 404)
    return Refused(status, "not_found", "expected one of the routes of this server").response()


def _add_files(app: FastAPI) -> None:
    """Add the page and its files, which are read once."""
    folder = resources.files("medvl.serve") / "static"

    def add(path: str, content: bytes, kind: str) -> None:
        async def respond() -> Response:
            return Response(content, headers={"content-type": kind})

        app.add_api_route(path, respond, methods=["GET"])

    for name, kind in _STATIC.items():
        add("/" if name == "index.html" else f"/{name}", (folder / name).read_bytes(), kind)


_MOST_MODELS = 2


def serve(
    checkpoints: Sequence[str | Path],
    *,
    config: ServeConfig | None = None,
    prompts: str = "",
    calibrations: Sequence[Path] = (),
    gallery: Path | None = None,
    gallery_images: int = 5000,
    device: str = "auto",
    all_tokens: bool = False,
    certificate: tuple[Path, Path] | None = None,
) -> None:
    """Serve one checkpoint, or two side by side, until interrupted.

    Args:
        checkpoints: what `medvl.load` takes: folders of checkpoints or of runs, names on the hub.
        config: address, access and limits.
        prompts: prompt set of the findings, by name or path; "" for chexpert_ensemble, and for
            ct_clip with models of volumes.
        calibrations: files of calibrations in the order of the checkpoints; those beside the
            checkpoints by default.
        gallery: folder of shards for nearest neighbours, at most `gallery_images` of them.
        device: auto, cpu or cuda.
        all_tokens: compare each organ with all patches, in models that read masks of organs.
        certificate: files of a TLS certificate and its key, for https.

    Raises as `ServedModel.open` and `Gallery.build`; ConfigError for other numbers of checkpoints,
    or where the address is not available.
    """
    import uvicorn

    from medvl.serve.guard import MOST_CONNECTIONS, limited_protocol

    config = (config or ServeConfig()).with_token()
    models = open_models(
        checkpoints,
        prompts=prompts,
        calibrations=calibrations,
        device=device,
        all_tokens=all_tokens,
    )
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
    all_tokens: bool = False,
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
    prompt_set = load_prompts(prompts) if prompts else None
    given: list[Path | None] = [*calibrations] if calibrations else [None] * len(checkpoints)
    models = [
        ServedModel.open(run, prompt_set, device, path, all_tokens=all_tokens)
        for run, path in zip(checkpoints, given, strict=True)
    ]
    if all_tokens and not any(served.all_tokens for served in models):
        message = "no model reads masks of organs; leave all_tokens out"
        raise ConfigError(message, "unsupported", field="all_tokens")
    if len({served.reads for served in models}) > 1:
        raise ConfigError(
            "expected two models of images or two of volumes, got one of each; serve them apart",
            "conflict",
            field="checkpoint",
        )
    if len({served.title for served in models}) < len(models):
        for number, served in enumerate(models, 1):
            served.title = f"{served.title} ({number})"
    return models


def listen(config: ServeConfig) -> socket.socket:
    """Return a socket that listens at the address: requests before the server has started wait for
    it. Raises ConfigError where the address is not available.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        listener.listen()
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
