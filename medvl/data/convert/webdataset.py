"""Webdataset tars without a manifest as shards: the conversion, and its use by evaluations."""

import hashlib
import json
import logging
import shutil
from pathlib import Path

from medvl.common.files import RunLock, subfolder
from medvl.data.convert.conversion import PrivateFolder
from medvl.data.convert.options import ShardOptions, ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.corpora.registry import FileAccess
from medvl.data.corpora.webdataset_tars import WebdatasetTars
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import MANIFEST
from medvl.data.storage.cache import Cache
from medvl.data.storage.webdataset_tars import TarFields, check_tars, describe_tars, expand_tars
from medvl.errors import ConfigError

_SPLIT = "test"

_log = logging.getLogger(__name__)


def cached_shards(pattern: str, fields: TarFields | None = None) -> Path:
    """Return a folder of shards with the samples of webdataset tars; it is made on first use, and
    kept in the cache.

    Every sample is treated as its own patient, so training patients or articles in the tars cannot
    be detected; a warning is logged. The folder is identified by the names and sizes of the tars.

    Raises ConfigError, ShardError, StorageError and CorpusError as
    `medvl.data.corpora.webdataset_tars.WebdatasetTars.plan`.
    """
    tars = expand_tars([pattern])
    fields = fields or TarFields()
    check_tars(tars)
    sizes = [(str(tar), tar.stat().st_size) for tar in tars]
    names = [fields.image, fields.text, fields.key_end, *fields.where]
    identity = hashlib.sha256(json.dumps([sizes, *names]).encode()).hexdigest()
    out = subfolder(Cache.from_environment().make_private(), "webdataset") / identity[:32]
    _log.warning(
        "%s: tars without a manifest; patients or articles that the model was trained on are "
        "not noticed",
        describe_tars(tars),
    )
    with RunLock(out.with_name(f"{out.name}-lock"), error=ConfigError, field="data"):
        if not (out / _SPLIT / MANIFEST).is_file():
            deid = Deidentifier(hashlib.sha256(b"webdataset tars").digest())
            access = FileAccess(copies=PrivateFolder(out).create() / "copies")
            tars_of = WebdatasetTars(tars=(pattern,), members=fields, splits=(f"{_SPLIT}=1",))
            plan = tars_of.plan(deid, access)
            write_shards(
                plan,
                deid,
                ShardRun(out=out, max_skipped=0.05),
                ShardOptions(color=True, keep_textless=True),
            )
            shutil.rmtree(PrivateFolder(out).path)
    return out / _SPLIT
