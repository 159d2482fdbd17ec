"""Files of the Hugging Face hub at a pinned revision, with an immediate error if there is no network.

Used by encoders (weights) and tokenizers (vocabularies). A revision is always a full commit hash: a branch or a tag may
move, and one configuration would then give two models. A commit never changes, so a cached file is used without network
access.
"""

import re
from pathlib import Path

from medvl.common.files import sha256 as _digest
from medvl.errors import WeightsError

_COMMIT = re.compile(r"[0-9a-f]{40}")
_PROBE_SECONDS = 5.0


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
        WeightsError: "out_of_range" if the revision is not a full commit hash, "not_found" if the file is not available
            (offline, access denied, no such file), "mismatch" if its hash differs. Without a network this takes
            seconds, not the half minute of the hub client's own retries.
    """
    if not is_commit(revision):
        message = f"{hub_id}: expected a commit hash of 40 hexadecimal digits as revision, got {revision!r}"
        raise WeightsError(f"{message}; pass one or a local path", "out_of_range", field="revision")
    path = _cached(hub_id, filename, revision) or _download(hub_id, filename, revision)
    if sha256 is not None and _digest(path) != sha256:
        where, advice = f"{filename} of {hub_id} at revision {revision}", "delete the cached copy and download it again"
        raise WeightsError(f"{where}: expected sha256 {sha256}, got {_digest(path)}; {advice}", "mismatch")
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
    command = f"hf download {hub_id} {filename} --revision {revision}"
    remedy = f"run `{command}` on another machine and pass the path of the local copy"
    if constants.HF_HUB_OFFLINE:
        raise WeightsError(f"{where} is not in the local cache and HF_HUB_OFFLINE is set; {remedy}", "not_found")
    try:
        url = huggingface_hub.hf_hub_url(hub_id, filename, revision=revision)
        huggingface_hub.get_hf_file_metadata(url, timeout=_PROBE_SECONDS)  # fails at once; the download retries
        return Path(huggingface_hub.hf_hub_download(hub_id, filename, revision=revision))
    except (EntryNotFoundError, HfHubHTTPError) as error:
        raise WeightsError(f"{where} cannot be downloaded ({type(error).__name__}); {remedy}", "not_found") from error
    except Exception as error:  # errors of the HTTP client, which depends on the hub library's version
        if type(error).__module__.split(".")[0] not in {"httpx", "httpx2", "httpcore", "httpcore2", "requests"}:
            raise
        raise WeightsError(f"{where}: hub unreachable ({type(error).__name__}); {remedy}", "not_found") from error
