"""Reading of requests: forms of limited size, kept in memory, and their fields."""

import asyncio
import dataclasses
import math
from collections.abc import AsyncGenerator, Callable

from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from medvl.serve.config import ServeConfig
from medvl.serve.guard import Refused

MAX_TEXTS, MAX_TEXT_LENGTH = 32, 500
_MOST_FRAMES = 20_000


class _InMemoryParser(MultiPartParser):
    """Starlette's parser, which would write files of more than 1 MB to a temporary file."""

    spool_max_size = 1 << 40


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ImageRequest:
    """Fields of a request about an image."""

    data: bytes
    """Content of the file."""
    frame: int
    """Frame of a multi-frame DICOM file."""
    window: tuple[float, float] | None
    """Center and width of the window that the image is rendered with; None: the file's own."""
    texts: tuple[str, ...]
    """Findings, a phrase, or a question."""


async def read_request(request: Request, config: ServeConfig, count: Callable[[int], None]) -> ImageRequest:
    """Read a form with the file `image` and the fields frame, center, width and any number of `text`.

    `count` is called with the number of bytes that have arrived.

    Raises `Refused`: 413 over the limit, 408 when it takes too long or stops, 415 for another type, 400 for a damaged
    form; and what `count` raises.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise Refused(415, "wrong_type", "expected multipart/form-data with the file `image`")
    length = request.headers.get("content-length", "")
    if length.isdigit() and len(length) < 20 and int(length) > config.max_bytes:
        raise _too_large(config)
    parser = _InMemoryParser(
        request.headers, _bounded(request, config, count), max_files=1, max_fields=MAX_TEXTS + 4, max_part_size=8192
    )
    try:
        async with asyncio.timeout(config.upload_seconds):
            form = await parser.parse()
    except TimeoutError:
        limits = f"{config.upload_seconds:g} seconds, and without a pause of {config.stall_seconds:g}"
        raise Refused(408, "slow", f"the request did not arrive within {limits}") from None
    except (MultiPartException, KeyError, ValueError):
        raise Refused(400, "malformed", "the form is damaged, or has too many or too long fields") from None
    except ClientDisconnect:
        raise Refused(400, "truncated", "the connection was closed") from None
    try:
        return await _fields(form)
    finally:
        await form.close()


async def _bounded(request: Request, config: ServeConfig, count: Callable[[int], None]) -> AsyncGenerator[bytes, None]:
    received, stream = 0, request.stream()
    while True:
        async with asyncio.timeout(config.stall_seconds):
            chunk = await anext(stream, None)
        if chunk is None:
            return
        received += len(chunk)
        if received > config.max_bytes:
            raise _too_large(config)
        count(len(chunk))
        yield chunk


def _too_large(config: ServeConfig) -> Refused:
    return Refused(413, "too_large", f"the upload is over the limit of {config.max_megabytes} MB")


async def _fields(form: FormData) -> ImageRequest:
    image = form.get("image")
    if not isinstance(image, UploadFile):
        raise Refused(400, "missing", "expected a file in the field `image`")
    data = await image.read()
    texts = [text.strip() for text in form.getlist("text") if isinstance(text, str) and text.strip()]
    if len(texts) > MAX_TEXTS or any(len(text) > MAX_TEXT_LENGTH for text in texts):
        message = f"expected at most {MAX_TEXTS} texts of {MAX_TEXT_LENGTH} characters"
        raise Refused(413, "too_large", message)
    center, width = (_number(form, name) for name in ("center", "width"))
    if (center is None) != (width is None) or (width is not None and width <= 0):
        raise Refused(400, "out_of_range", "a window needs a center and a width above 0")
    frame = _number(form, "frame") or 0
    if not 0 <= frame < _MOST_FRAMES:
        raise Refused(400, "out_of_range", "expected a frame of 0 or more")
    window = None if center is None or width is None else (center, width)
    return ImageRequest(data=data, frame=int(frame), window=window, texts=tuple(dict.fromkeys(texts)))


def _number(form: FormData, name: str) -> float | None:
    value = form.get(name)
    if value is None or value == "":
        return None
    try:
        number = float(value) if isinstance(value, str) else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise Refused(400, "wrong_type", f"expected a number in the field `{name}`")
    return number
