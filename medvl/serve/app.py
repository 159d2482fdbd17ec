"""The application: a page, and an API of forms and JSON that the page uses.

    GET  /api/models      the served models
    POST /api/view        the image for display, with its window
    POST /api/scores      findings            (text=... for each)
    POST /api/heatmap     a map of one text   (text=...)
    POST /api/answer      a question          (text=...)
    POST /api/report      a generated report
    POST /api/neighbors   the most similar images of the gallery

Every POST is a form with the file `image`, see `medvl.serve.requests`; the file is not kept after
the response. Errors are `{"error": {"code", "message"}}`.
"""

import contextlib
import functools
import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from importlib import resources
from typing import Any

import torch
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from medvl.errors import DicomError, ImageError, MedvlError
from medvl.inference.models import Expected
from medvl.phantom.example import draw_example
from medvl.serve import requests
from medvl.serve.config import ServeConfig
from medvl.serve.engine import Engine, Pending
from medvl.serve.guard import Guard, Refused, address_of
from medvl.serve.models import Encoded, Gallery, ServedModel, each_model
from medvl.serve.requests import ImageRequest, read_request

_log = logging.getLogger("medvl.serve")
_STATIC = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "viewer.js": "text/javascript; charset=utf-8",
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
                    fields = await read_request(request, self._config, count)
                    with self._engine.place(address):
                        return JSONResponse(await answer(fields))
            except Refused as refused:
                return refused.response()
            except MedvlError as error:
                return _bad_input(error)
            except Exception as error:
                return _unexpected(error)

        return respond

    async def view(self, request: ImageRequest) -> Any:
        """Return the image for display."""
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
        decoded = await self._engine.decode(lambda: requests.decode(request))

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
        decoded = await self._engine.decode(lambda: requests.decode(request))

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
    kind = "image" if isinstance(error, DicomError | ImageError) else "input"
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
