"""Files from the Hugging Face hub, at a pinned revision, with an error at once where there is no network.

Shared by the encoders (weights) and the tokenizers (vocabularies). A revision is always a full commit hash: a branch
or a tag may move, and then two runs of one configuration are two models. A commit never changes, so a file that lies
in the cache is taken without asking the network.
"""

import hashlib
import re
from pathlib import Path

from medvl.errors import WeightsError

_COMMIT = re.compile(r"[0-9a-f]{40}")
_PROBE_SECONDS = 5.0


def is_commit(revision: str | None) -> bool:
    """Whether `revision` is a full commit hash of 40 hexadecimal digits."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def fetch(hub_id: str, filename: str, revision: str | None, *, sha256: str | None = None) -> Path:
    """The local path of `filename` in repository `hub_id` at commit `revision`, downloaded if it is not cached.

    `sha256` is compared with the file's content where it is given.

    Raises `WeightsError` when the revision is not a full commit hash, when the file cannot be had (offline, refused,
    no such file), or when its content differs from `sha256`. Without a network that takes a moment, not the half
    minute of the hub client's own retries.
    """
    if not is_commit(revision):
        raise WeightsError(
            f"{hub_id}: revision {revision!r} is not a full commit hash; give the 40 hexadecimal digits of the commit "
            "that the run shall stand on, or the path of a local copy"
        )
    path = _cached(hub_id, filename, revision) or _download(hub_id, filename, revision)
    if sha256 is not None and _digest(path) != sha256:
        raise WeightsError(
            f"{filename} of {hub_id} at revision {revision} is not the file that was pinned: its sha256 is "
            f"{_digest(path)}, expected {sha256}; delete the cached copy and fetch it again"
        )
    return path


def _cached(hub_id: str, filename: str, revision: str | None) -> Path | None:
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(huggingface_hub.hf_hub_download(hub_id, filename, revision=revision, local_files_only=True))
    except EntryNotFoundError:
        return None


def _download(hub_id: str, filename: str, revision: str | None) -> Path:
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    where = f"{filename} of {hub_id} at revision {revision}"
    remedy = (
        f"fetch it on a connected machine (`hf download {hub_id} {filename} --revision {revision}`) and give the path "
        "of the local copy"
    )
    if constants.HF_HUB_OFFLINE:
        raise WeightsError(f"{where} is not in the local cache and HF_HUB_OFFLINE is set; {remedy}")
    try:
        url = huggingface_hub.hf_hub_url(hub_id, filename, revision=revision)
        huggingface_hub.get_hf_file_metadata(url, timeout=_PROBE_SECONDS)  # fails at once; the download retries
        return Path(huggingface_hub.hf_hub_download(hub_id, filename, revision=revision))
    except (EntryNotFoundError, HfHubHTTPError) as error:
        raise WeightsError(f"{where} cannot be had from the hub ({type(error).__name__}); {remedy}") from error
    except Exception as error:  # the HTTP client's own errors; which client it is changes with the hub's version
        if type(error).__module__.split(".")[0] not in {"httpx", "httpx2", "httpcore", "httpcore2", "requests"}:
            raise
        raise WeightsError(f"{where}: the hub cannot be reached ({type(error).__name__}); {remedy}") from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
