"""Tars that other projects wrote for webdataset (PMC-OA, BIOMEDICA, open_clip's), as a corpus.

Images stay in the tars until they are converted. A sample's key is the hash of corpus, tar and key,
as the tars of one data set often number their samples alike.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from medvl.common.untrusted import ANYWHERE
from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts, listed
from medvl.data.corpora.common.tables import Plan, Record
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.privacy import Deidentifier
from medvl.data.reports.cleaning import first_text
from medvl.data.splits import check_name, hash_split, parse_fractions
from medvl.data.storage.location import Location, RemotePath
from medvl.data.storage.webdataset_tars import (
    TarCounts,
    TarFields,
    describe_tars,
    expand_tars,
    member_value,
    read_tar,
)
from medvl.errors import ConfigError, CorpusError
from medvl.schema import Sample

SECTION = "caption"
"""Section of the texts."""
_VALUES = 20  # values of a field that are counted one by one
_REASON = 60  # characters of the name of a count


@register_corpus("webdataset")
@dataclasses.dataclass(frozen=True, kw_only=True)
class WebdatasetTars(Corpus):
    """Convert webdataset tars without a manifest (PMC-OA, BIOMEDICA, open_clip's): .jpg .txt .json
    of each sample.
    """

    tars: tuple[str, ...]
    """paths or addresses of the tars, with webdataset's braces: 'pmc/{00000..00042}.tar'."""
    name: str = "webdataset"
    """name of the corpus."""
    group: str | None = None
    """member or field of the JSON that names the patient or article, such as json:pmcid. Splits are
    disjoint by it; without it, each sample is a group of its own, and shared patients or articles
    cannot be noticed.
    """
    splits: tuple[str, ...] = ("train=0.98", "validate=0.01", "test=0.01")
    """fractions of the splits."""
    keep_field: tuple[str, ...] = ()
    """fields of the JSON that samples keep, such as json:article_license."""
    max_samples: int | None = None
    """maximum number of samples, from the first tar on; default all."""
    members: TarFields
    """names of the members."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Read tars as webdataset does, and plan their samples; images stay in the tars.

        Raises:
            ConfigError: a pattern, the name or the fractions cannot be used, or two tars have one
                name.
            ShardError: a tar is missing or damaged.
            StorageError: a remote store cannot be reached.
            CorpusError: there is no sample.
        """
        check_name(self.name, "name")
        fractions = parse_fractions(self.splits)
        tars = expand_tars(self.tars)
        repeated = [tar for tar, count in Counter(tar.name for tar in tars).items() if count > 1]
        if repeated:
            message = (
                f"several tars are named {repeated[0]}, which keys depend on; convert them "
                f"one by one, or rename them"
            )
            raise ConfigError(message, "conflict", field="tars")
        if self.max_samples is not None and self.max_samples < 1:
            message = f"max_samples must be at least 1, got {self.max_samples}"
            raise ConfigError(message, "out_of_range", field="max_samples")
        reader = _Reader(deid, access, self, fractions)
        records = Records(map(Record, itertools.chain.from_iterable(map(reader.samples, tars))))
        if not records:
            detail = f"{listed(reader.rows.left_out) or 'none read'}; {reader.counts}"
            message = (
                f"{describe_tars(tars)}: no sample is left ({detail}); check the suffixes of "
                f"image and text"
            )
            raise CorpusError(message, "empty")
        reader.warnings["members_with_dots_not_read"] = reader.counts.nested
        return Plan(self.name, records, (), reader.rows, +reader.warnings, ANYWHERE)

    def notes(self, plan: Plan) -> list[str]:
        """Return a warning about patients that are not noticed, where no group is given."""
        if self.group is not None:
            return []
        return [
            "No --group was given: patients or articles shared by splits, or with other shards, "
            "are not noticed."
        ]


class _Reader:
    def __init__(
        self,
        deid: Deidentifier,
        access: FileAccess,
        corpus: WebdatasetTars,
        fractions: Mapping[str, float],
    ) -> None:
        self.deid = deid
        self.access = access
        self.name = corpus.name
        self.fields = corpus.members
        self.group = corpus.group
        self.keep_field = corpus.keep_field
        self.max_samples = corpus.max_samples
        self.fractions = fractions
        self.rows = RowCounts("samples")
        self.counts = TarCounts()
        self.warnings = Counter[str]()

    def samples(self, tar: Location) -> Iterator[Sample]:
        """Yield the samples of a tar."""
        if self._is_full():
            return
        name = tar.name
        if isinstance(tar, RemotePath) and not tar.sends_ranges():
            tar = self.access.local_copy(tar)
        before = self.counts.samples
        count = 0
        fields = (self.group, *self.keep_field)
        for members in read_tar(tar, self.fields, *fields, counts=self.counts, places=True):
            count += 1
            sample = self._sample(name, members)
            if sample is not None:
                self.rows.kept += 1
                yield sample
            if self._is_full():
                self.rows.read += count
                return
        samples = self.counts.samples - before
        self.rows.read += samples
        self.rows.exclude("no_image_or_text", samples - count)

    def _is_full(self) -> bool:
        return self.max_samples is not None and self.rows.kept >= self.max_samples

    def _sample(self, tar: str, members: Mapping[str, Any]) -> Sample | None:
        identity = f"{self.name} {tar} {members['__key__']}"
        try:
            unmet = self.fields.unmet(members)
            if unmet is not None:
                self.rows.exclude(self._reason(unmet))
                return None
            text = first_text(self.fields.texts_of(members), self.warnings)
            extra = {
                name.partition(":")[2] or name: value
                for name in self.keep_field
                if (value := member_value(members, name)) is not None
            }
            group = (
                None
                if self.group is None
                else (member_value(members, self.group) or "").strip() or None
            )
        except ValueError:
            self.rows.skip("text_unreadable")
            return None
        image = self.fields.image_of(members)
        if image is None:
            self.rows.exclude("no_image")
            return None
        if self.group is not None and group is None:
            self.warnings["no_group"] += 1
        key = self.deid.image(identity)
        patient = self.deid.patient(identity if group is None else f"{self.name} {group}")
        return Sample(
            key=key,
            corpus=self.name,
            split=hash_split(patient, self.fractions),
            patient=patient,
            study=self.deid.study(patient, identity),
            image=image,
            sections={SECTION: text} if text else {},
            extra=extra,
        )

    def _reason(self, unmet: str) -> str:
        """Return the reason for a sample that does not meet `where`: field and value, of so many
        values that one reads them.
        """
        field = unmet.partition("=")[0]
        known = sum(reason.startswith(f"{field}=") for reason in self.rows.left_out)
        return unmet[:_REASON] if known < _VALUES else f"{field}=others"
