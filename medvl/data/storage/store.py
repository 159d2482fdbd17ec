"""Requests to object stores and web servers through fsspec, repeated where that helps.

A request that fails for reasons of the network (broken and refused connections, timeouts,
incomplete responses, status 408, 425, 429 and 5xx) is repeated with pauses of half a second, one,
two, ... up to `MAX_PAUSE`. Errors that a repetition cannot resolve are raised at once: missing
files, refused access, expired credentials. No exception of a library leaves this module: those
quote addresses that servers redirect to, with signatures in them.
"""

import errno
import functools
import importlib
import importlib.util
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

from medvl.errors import ConfigError, StorageError

_log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

PACKAGES = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "hf": "huggingface_hub",
    "https": "aiohttp",
    "http": "aiohttp",
}
"""Schemes of addresses, and the package that reads each; the extra `medvl[remote]` has them."""
BLOCK = 8 * 2**20
"""Bytes of one request for a whole file."""
THREADS = 16
"""Concurrent requests of one process."""
RETRIES = 8
"""Repetitions of a failed request; the variable MEDVL_REMOTE_RETRIES sets another number."""
FIRST_PAUSE = 0.5
MAX_PAUSE = 20.0
"""Pauses between repetitions in seconds: the first, doubled each time, and the longest. With 8
repetitions, a request outlasts a failure of about a minute.
"""
_WHOLE = 2**30  # bytes that a file of unknown size is given time for
_CONNECT = 10.0  # seconds to connect
# a request may take 30 seconds and one for every 64 KiB
_SILENCE = 30.0
_LEAST_RATE = 64 * 2**10

Kind = Literal["missing", "denied", "refused", "network"]
_DENIED_STATUS = (401, 403, 407)
_MISSING_STATUS = (404, 410)
_REPEAT_STATUS = (408, 416, 425, 429)
_REFUSED_ERRNO = (
    errno.EINVAL,
    errno.ENOSYS,
    errno.EPERM,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EISDIR,
)
_DENIED_NAMES = (
    "Credential",
    "TokenRetrieval",
    "ProfileNotFound",
    "RefreshError",
    "Authentication",
    "GatedRepo",
)
_ADVICE = {
    "denied": "the store refuses access: check that the credentials in the environment have not "
    "expired, may read this "
    "address, and that this machine's clock is right; then run the same command again",
    "refused": "the store refuses the request: check the address, the region and the credentials",
    "network": "the store does not answer, or closes connections: check the network and the "
    "address, and run the same "
    "command again",
}


def read(url: str, offset: int | None = None, size: int | None = None) -> bytes:
    """Return a file, or `size` bytes from `offset`.

    Raises FileNotFoundError; StorageError `truncated` where responses remain incomplete, `denied`,
    `network`.
    """
    if offset is None or size is None:
        return _repeat(url, lambda files, path: _cat(files, path, size=_WHOLE))
    end = offset + size

    def read_once(files: Any, path: str) -> bytes:
        data = _cat(files, path, size=size, start=offset, end=end)
        if len(data) > size:  # the whole file
            _note_whole_files(url)
            data = data[offset:end]
        if len(data) < size:
            raise _ShortError(f"{url}: expected {size} bytes from {offset}, got {len(data)}")
        return data

    return _repeat(url, read_once)


_whole_senders: set[str] = set()


def sends_ranges(url: str) -> bool:
    """Return whether the server has sent the requested part of a file in all requests so far."""
    return url.split("/")[2] not in _whole_senders


def _note_whole_files(url: str) -> None:
    if sends_ranges(url):
        _whole_senders.add(url.split("/")[2])
        _log.warning(
            "%s sends whole files instead of parts of them: reading its shards without a cache "
            "is slow",
            url,
        )


def size(url: str) -> int:
    """Return the size of a file. Raises FileNotFoundError or StorageError."""
    info = _repeat(url, lambda files, path: files.info(path))
    if info.get("type") == "directory":
        raise FileNotFoundError(errno.ENOENT, "is a folder", url)
    if info.get("size") is None:
        raise StorageError(
            f"{url}: the server does not report the size of the file; use another server",
            "unsupported",
        )
    return int(info["size"])


def list_files(url: str) -> dict[str, int]:
    """Return the size of every file below a folder, by its relative path; none if there is no
    folder.
    """

    def list_once(files: Any, path: str) -> dict[str, int]:
        root = path.rstrip("/") + "/"
        try:
            entries = files.find(path, detail=True)
        except FileNotFoundError:
            return {}
        if isinstance(entries, list):  # adlfs, of a path that is a file
            return {}
        return {
            name.removeprefix(root): int(info["size"])
            for name, info in entries.items()
            if name.startswith(root)
        }

    return _repeat(url, list_once)


def stream(url: str, total: int, threads: int = 4) -> Iterator[bytes]:
    """Yield a file of `total` bytes in blocks, `threads` requests at a time. Raises as `read`
    does.
    """
    if total > BLOCK and sends_ranges(url):
        yield read(url, 0, BLOCK)
    if not sends_ranges(url):
        yield read(url)[BLOCK if total > BLOCK else 0 :]
        return
    rest = range(BLOCK if total > BLOCK else 0, total, BLOCK)

    def block(offset: int) -> bytes:
        return read(url, offset, min(BLOCK, total - offset))

    yield from map(block, rest) if threads == 1 else map_threads(block, rest, threads)


def write(url: str, path: Path) -> None:
    """Upload a local file; a store shows it when it is complete. Raises StorageError."""
    size = path.stat().st_size

    def put_once(files: Any, remote: str) -> None:
        if files.async_impl:
            _wait(files, files._put_file, str(path), remote, timeout=_deadline(size))
        else:
            files.put_file(str(path), remote)

    _repeat(url, put_once)


def remove(url: str) -> None:
    """Delete a file. Raises FileNotFoundError or StorageError."""
    _repeat(url, lambda files, path: files.rm_file(path))


def map_threads(
    function: Callable[[T], R], items: Iterable[T], threads: int = THREADS
) -> Iterator[R]:
    """Yield `function` of each item in order, computed in threads that are at most `2 * threads`
    items ahead.
    """
    pool = ThreadPoolExecutor(threads)
    waiting: list[Any] = []
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= 2 * threads:
                yield waiting.pop(0).result()
        while waiting:
            yield waiting.pop(0).result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _ShortError(Exception):
    """A response ended early."""


_opened: dict[tuple[int, str], Any] = {}
_opening = threading.Lock()


def _filesystem(url: str) -> tuple[Any, str]:
    """Return the file system of an address and the path in it: one for each process and scheme,
    used by all threads.
    """
    scheme = url.partition("://")[0]
    opened = _opened.get((os.getpid(), scheme))
    if opened is None:
        with _opening:
            opened = _opened.get((os.getpid(), scheme)) or _open(scheme)
            _opened[os.getpid(), scheme] = opened
    return opened, opened._strip_protocol(url)


def _open(scheme: str) -> Any:
    import fsspec  # slow to import, and the command line imports this module

    if importlib.util.find_spec(PACKAGES[scheme]) is None:
        message = f"{scheme}:// needs the package {PACKAGES[scheme]}: pip install 'medvl[remote]'"
        raise ConfigError(message, "missing", field="address")
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    opener = {"s3": _open_s3, "gs": _open_google, "az": _open_azure, "abfs": _open_azure}.get(
        scheme
    )
    if opener is not None:
        return opener(scheme, options)
    if scheme in ("http", "https"):
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT, sock_read=_SILENCE)
        stated = fsspec.config.conf.get(scheme, {})
        options["client_kwargs"] = {
            "timeout": timeout,
            "trust_env": True,
            **stated.get("client_kwargs", {}),
        }
    return fsspec.filesystem(scheme, **options)


# The libraries of the three clouds repeat requests themselves, two of them with pauses of up to
# half a minute. Requests are repeated here instead, in one place. gcsfs and adlfs have no public
# option for it, so the two private attributes below are the only ones in use, and the tests run
# both libraries against stand-ins of the services. `_strip_protocol`, `_cat_file` and `_put_file`
# are part of fsspec's interface for asynchronous file systems.


def _open_s3(scheme: str, options: dict[str, Any]) -> Any:
    import fsspec

    limits: dict[str, Any] = {
        "connect_timeout": _CONNECT,
        "read_timeout": _SILENCE,
        "max_pool_connections": 2 * THREADS,
    }
    limits["retries"] = {"total_max_attempts": 1}
    stated = fsspec.config.conf.get(scheme, {})
    files = fsspec.filesystem(
        scheme, **options, config_kwargs=limits | stated.get("config_kwargs", {})
    )
    files.retries = 1
    return files


def _open_google(scheme: str, options: dict[str, Any]) -> Any:
    """Open the JSON API; fsspec's default first asks another service for the kind of bucket,
    which can hang.
    """
    opened = importlib.import_module("gcsfs.core").GCSFileSystem
    files = opened(**options, requests_timeout=_SILENCE)
    # the method without its decorator
    files._request = functools.partial(opened._request.__wrapped__, files)
    return files


def _open_azure(scheme: str, options: dict[str, Any]) -> Any:
    import fsspec

    try:
        files = fsspec.filesystem(
            scheme, **options, connection_timeout=_CONNECT, read_timeout=_SILENCE
        )
    except ValueError:  # quotes what it was given
        message = (
            f"{scheme}:// needs an account: set AZURE_STORAGE_ACCOUNT_NAME and a key, or "
            f"a connection string"
        )
        raise ConfigError(message, "missing", field="address") from None
    files.service_client._config.retry_policy.total_retries = 0
    return files


def _deadline(size: int) -> float:
    return 2 * _SILENCE + size / _LEAST_RATE


def _wait(files: Any, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Run a function of an asynchronous file system in its thread, at most for `timeout`
    seconds.
    """
    from fsspec.asyn import sync

    return sync(files.loop, function, *arguments, **options)


def _cat(files: Any, path: str, *, size: int, **limits: int) -> bytes:
    if files.async_impl:
        data: bytes = _wait(files, files._cat_file, path, timeout=_deadline(size), **limits)
        return data
    with files.open(path, "rb", cache_type="none") as file:
        file.seek(limits.get("start", 0))
        content: bytes = file.read(size) if limits else file.read()
        return content


def _repeat(url: str, request: Callable[[Any, str], T]) -> T:
    files, path = _filesystem(url)
    retries = int(os.environ.get("MEDVL_REMOTE_RETRIES", RETRIES))
    for attempt in range(retries + 1):
        try:
            return request(files, path)
        except (StorageError, ConfigError):
            raise
        except Exception as error:
            kind = _kind_of(error)
            described = _describe(error)
            is_short = isinstance(error, _ShortError)
        if kind == "missing":
            raise FileNotFoundError(errno.ENOENT, "does not exist in the store", url)
        if kind in ("denied", "refused"):
            raise StorageError(f"cannot use {url} ({described}): {_ADVICE[kind]}", "denied")
        if attempt < retries:
            time.sleep(min(MAX_PAUSE, FIRST_PAUSE * 2**attempt) * random.uniform(0.75, 1.25))
    if is_short:
        message = f"{described}, {retries + 1} times: upload the file again, or check the network"
        raise StorageError(message, "truncated")
    raise StorageError(
        f"cannot use {url} ({described}, {retries + 1} times): {_ADVICE['network']}", "network"
    )


def _kind_of(error: Exception) -> Kind:
    """Return why a request failed. Raises the error itself if it is not a network error."""
    cause: Any = error.__cause__
    hides_cause = isinstance(error, FileNotFoundError) and isinstance(cause, Exception)
    if hides_cause and type(cause).__module__.startswith(("aiohttp", "asyncio", "builtins")):
        # fsspec reports every failure to ask a web server for a size as a missing file
        return _kind_of(cause)
    if _code(error) == "InvalidRange":
        return "network"
    prefix = str(error).partition(":")[0]  # gcsfs raises these two without a status
    status = {"Forbidden": 403, "Bad Request": 400}.get(prefix) or _status(error)
    names = [kind.__name__ for kind in type(error).__mro__]
    if isinstance(error, FileNotFoundError) or status in _MISSING_STATUS:
        return "missing"
    if isinstance(error, PermissionError) or status in _DENIED_STATUS or any(
        part in name for name in names for part in _DENIED_NAMES
    ):  # fmt: skip
        return "denied"
    if status is not None:
        return "network" if status >= 500 or status in _REPEAT_STATUS else "refused"
    if isinstance(error, OSError) and error.errno in _REFUSED_ERRNO:
        return "refused"
    module = type(error).__module__.partition(".")[0]
    libraries = (
        *("aiohttp", "aiobotocore", "botocore", "urllib3", "requests", "httpx", "httpcore"),
        *("google", "gcsfs", "azure", "adlfs"),
    )
    if isinstance(error, OSError | TimeoutError | EOFError | _ShortError) or module in libraries:
        return "network"
    raise error


def _status(error: Exception) -> int | None:
    for holder in (error, getattr(error, "response", None)):
        for name in ("status", "status_code", "code"):
            value = getattr(holder, name, None)
            if isinstance(value, int) and 100 <= value < 600:
                return value
    return None


def _code(error: Exception) -> str | None:
    """Return the code of an error of S3, such as ExpiredToken."""
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
    return code if isinstance(code, str) and code.isalnum() else None


def _describe(error: Exception) -> str:
    """Return a description of an error without the library's text, which may quote an address
    with a signature.
    """
    if isinstance(error, _ShortError):
        return str(error)
    status = _status(error)
    details = [type(error).__name__, _code(error), None if status is None else f"status {status}"]
    return ", ".join(detail for detail in details if detail)
