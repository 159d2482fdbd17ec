"""Files of the Hugging Face hub at a pinned revision, with an immediate error if there is no
network.

Used by encoders (weights) and tokenizers (vocabularies). A revision is always a full commit hash: a
branch or a tag may move, and one configuration would then give two models. A commit never changes,
so a cached file is used without network access.
"""

import contextlib
import functools
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from medvl.common.files import sha256 as _digest
from medvl.errors import WeightsError

HUB_PREFIX = "hf-hub:"
"""Prefix of the name of a repository on the hub, as in open_clip and timm."""
_HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PROBE_SECONDS = 5.0
_log = logging.getLogger(__name__)


def is_hub_id(name: str) -> bool:
    """Return whether `name` is OWNER/NAME, as repositories on the hub are called."""
    return _HUB_ID.fullmatch(name) is not None


def is_commit(revision: str | None) -> bool:
    """Return whether `revision` is a full commit hash of 40 hexadecimal digits."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def fetch(hub_id: str, filename: str, revision: str | None, *, sha256: str | None = None) -> Path:
    """Return the local path of a file on the hub, downloaded if it is not cached.

    Args:
        hub_id: repository, as OWNER/NAME.
        filename: path of the file in the repository.
        revision: full commit hash.
        sha256: expected hash of the file's content; not checked if None.

    Raises:
        WeightsError: "out_of_range" if the revision is not a full commit hash, "not_found" if the
            file is not available (offline, access denied, no such file), "mismatch" if its hash
            differs. Without a network this takes seconds, not the half minute of the hub client's
            own retries.
    """
    if not is_commit(revision):
        message = (
            f"{hub_id}: expected a commit hash of 40 hexadecimal digits as revision, got "
            f"{revision!r}"
        )
        raise WeightsError(f"{message}; pass one or a local path", "out_of_range", field="revision")
    path = _cached(hub_id, filename, revision) or _download(hub_id, filename, revision)
    if sha256 is not None and _digest(path) != sha256:
        where = f"{filename} of {hub_id} at revision {revision}"
        advice = "delete the cached copy and download it again"
        raise WeightsError(
            f"{where}: expected sha256 {sha256}, got {_digest(path)}; {advice}", "mismatch"
        )
    return path


def fetch_snapshot(hub_id: str, revision: str | None, files: Sequence[str]) -> Path:
    """Return the local folder of a repository on the hub, with those files that match one of the
    patterns `files`.

    `revision` is a commit, branch or tag; None is the default branch, whose latest commit is
    downloaded, or without a network the latest that is cached. The commit is logged: name it to get
    the same model again.

    Raises WeightsError "not_found" if the repository is not available (offline, access denied, no
    such name).
    """
    import huggingface_hub
    from huggingface_hub import constants

    where = f"{hub_id}{f' at revision {revision}' if revision else ''}"
    get = functools.partial(huggingface_hub.snapshot_download, hub_id, allow_patterns=list(files))
    if not constants.HF_HUB_OFFLINE:
        with hub_errors(f"{where} cannot be downloaded"):
            revision = (
                huggingface_hub.HfApi()
                .model_info(hub_id, revision=revision, timeout=_PROBE_SECONDS)
                .sha
            )
            _log.info("%s%s is commit %s", HUB_PREFIX, where, revision)
            return Path(get(revision=revision))
    with hub_errors(f"{where} is not in the local cache and HF_HUB_OFFLINE is set"):
        return Path(get(revision=revision, local_files_only=True))


@contextlib.contextmanager
def hub_errors(message: str, advice: str = "") -> Iterator[None]:
    """Raise WeightsError "not_found" with `message` for errors of the hub's client and of the
    network.
    """
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    try:
        yield
    except (EntryNotFoundError, HfHubHTTPError, HFValidationError, ConnectionError) as error:
        raise WeightsError(f"{message} ({type(error).__name__}){advice}", "not_found") from error
    except (
        Exception
    ) as error:  # errors of the HTTP client, which depends on the hub library's version
        if type(error).__module__.split(".")[0] not in {
            "httpx",
            "httpx2",
            "httpcore",
            "httpcore2",
            "requests",
        }:
            raise
        raise WeightsError(
            f"{message}: hub unreachable ({type(error).__name__}){advice}", "not_found"
        ) from error


def _cached(hub_id: str, filename: str, revision: str | None) -> Path | None:
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(
            huggingface_hub.hf_hub_download(
                hub_id, filename, revision=revision, local_files_only=True
            )
        )
    except EntryNotFoundError:
        return None


def _download(hub_id: str, filename: str, revision: str | None) -> Path:
    import huggingface_hub
    from huggingface_hub import constants

    where = f"{filename} of {hub_id} at revision {revision}"
    command = f"hf download {hub_id} {filename} --revision {revision}"
    remedy = f"run `{command}` on another machine and pass the path of the local copy"
    if constants.HF_HUB_OFFLINE:
        raise WeightsError(
            f"{where} is not in the local cache and HF_HUB_OFFLINE is set; {remedy}", "not_found"
        )
    with hub_errors(f"{where} cannot be downloaded", f"; {remedy}"):
        url = huggingface_hub.hf_hub_url(hub_id, filename, revision=revision)
        # fails at once; the download retries
        huggingface_hub.get_hf_file_metadata(url, timeout=_PROBE_SECONDS)
        return Path(huggingface_hub.hf_hub_download(hub_id, filename, revision=revision))
