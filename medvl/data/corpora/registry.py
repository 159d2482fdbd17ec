"""The base class of corpora, their names, and the classes behind the names.

A corpus registers itself when its module is imported:

    @register_corpus("vindr-cxr")
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class VinDrCXR(Corpus):
        ...

`medvl shards NAME` is made from the class. medvl's own modules are imported on first use. Another
package adds corpora with the entry point group `medvl.corpora`, for example in its pyproject.toml:

    [project.entry-points."medvl.corpora"]
    my-corpus = "my_package.my_corpus:MyCorpus"
"""

import abc
import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

from medvl.common.files import new_file, private_folder
from medvl.common.registry import Registry
from medvl.common.untrusted import InputFolders
from medvl.data.storage.location import RemotePath
from medvl.data.storage.store import stream
from medvl.errors import ConfigError

if TYPE_CHECKING:
    from medvl.data.corpora.common.tables import Plan
    from medvl.data.privacy import Deidentifier

_CORPORA = "medvl.data.corpora"
_MODULES = {
    "mimic-cxr": f"{_CORPORA}.reports.mimic_cxr",
    "chexpert": f"{_CORPORA}.labels.chexpert",
    "chexpert-plus": f"{_CORPORA}.reports.chexpert_plus",
    "rexgradient": f"{_CORPORA}.reports.rexgradient",
    "candid-ptx": f"{_CORPORA}.reports.candid_ptx",
    "bimcv-covid19": f"{_CORPORA}.reports.bimcv_covid19",
    "roco": f"{_CORPORA}.figures.roco",
    "medicat": f"{_CORPORA}.figures.medicat",
    "melinda": f"{_CORPORA}.figures.melinda",
    "openi": f"{_CORPORA}.reports.openi",
    "r2gen-annotation": f"{_CORPORA}.reports.r2gen_annotation",
    "medvill-jsonl": f"{_CORPORA}.reports.medvill_jsonl",
    "m3ae-arrow": f"{_CORPORA}.figures.m3ae_arrow",
    "padchest": f"{_CORPORA}.reports.padchest",
    "padchest-gr": f"{_CORPORA}.reports.padchest_gr",
    "vqa-rad": f"{_CORPORA}.questions.vqa_rad",
    "slake": f"{_CORPORA}.questions.slake",
    "vqa-med": f"{_CORPORA}.questions.vqa_med",
    "path-vqa": f"{_CORPORA}.questions.path_vqa",
    "rexvqa": f"{_CORPORA}.questions.rexvqa",
    "pmc-vqa": f"{_CORPORA}.questions.pmc_vqa",
    "mimic-cxr-vqa": f"{_CORPORA}.questions.mimic_cxr_vqa",
    "diff-vqa": f"{_CORPORA}.questions.diff_vqa",
    "gemex": f"{_CORPORA}.questions.gemex",
    "cxr-qba": f"{_CORPORA}.questions.cxr_qba",
    "chest-imagenome": f"{_CORPORA}.boxes_and_masks.chest_imagenome",
    "rsna": f"{_CORPORA}.boxes_and_masks.rsna",
    "siim": f"{_CORPORA}.boxes_and_masks.siim",
    "qata": f"{_CORPORA}.boxes_and_masks.lvit_layout",
    "mosmed": f"{_CORPORA}.boxes_and_masks.lvit_layout",
    "monuseg": f"{_CORPORA}.boxes_and_masks.lvit_layout",
    "ms-cxr": f"{_CORPORA}.boxes_and_masks.ms_cxr",
    "ms-cxr-t": f"{_CORPORA}.labels.ms_cxr_t",
    "nih-cxr14": f"{_CORPORA}.labels.nih_cxr14",
    "odir": f"{_CORPORA}.labels.odir",
    "covidx": f"{_CORPORA}.labels.covidx",
    "brax": f"{_CORPORA}.labels.brax",
    "vindr-cxr": f"{_CORPORA}.boxes_and_masks.vindr_cxr",
    "vindr-pcxr": f"{_CORPORA}.boxes_and_masks.vindr_pcxr",
    "chestxdet10": f"{_CORPORA}.boxes_and_masks.chestxdet10",
    "chestxdet": f"{_CORPORA}.boxes_and_masks.chestxdet10",
    "object-cxr": f"{_CORPORA}.boxes_and_masks.object_cxr",
    "vindr-mammo": f"{_CORPORA}.boxes_and_masks.vindr_mammo",
    "embed-mammo": f"{_CORPORA}.boxes_and_masks.embed_mammo",
    "ct-rate": f"{_CORPORA}.volumes.ct_rate",
    "rad-chestct": f"{_CORPORA}.volumes.rad_chestct",
    "merlin": f"{_CORPORA}.volumes.merlin",
    "inspect": f"{_CORPORA}.volumes.inspect_ctpa",
    "text": "medvl.data.convert.shard_documents",
    "concepts": f"{_CORPORA}.concepts",
    "webdataset": f"{_CORPORA}.webdataset_tars",
    "generated": "medvl.data.convert.generated",
    "table": f"{_CORPORA}.table",
    "volumes": f"{_CORPORA}.volumes.volume_table",
    "parquet": f"{_CORPORA}.parquet_files",
}
"""Name of a built-in corpus -> module that defines it, in the order of the help."""
_RELEASES = {"roco-non-radiology": "roco", "rocov2": "roco"}
"""Name in a manifest -> corpus that writes it, where the names differ."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FileAccess:
    """Files that a conversion lets a corpus read and write."""

    follow_links: bool = False
    """Also read files that links outside of the folders lead to, as in trees of git-annex."""
    copies: Path | None = None
    """Private folder for copies of remote files, for the time of the conversion."""

    def folders(self, *folders: Path) -> InputFolders:
        """Return the folders of a corpus, from which its files are read."""
        return InputFolders.of(*folders, follow_links=self.follow_links)

    def local_copy(self, file: RemotePath) -> Path:
        """Return a copy of a remote file, which is made once and kept for runs that resume.

        Raises ConfigError when the conversion gives no folder for it, StorageError when the store
        cannot be reached.
        """
        if self.copies is None:
            message = "expected a folder for copies of remote files; give FileAccess(copies=FOLDER)"
            raise ConfigError(message, "missing", field="copies")
        private_folder(self.copies.parent)
        name = f"{hashlib.sha256(file.url.encode()).hexdigest()[:16]}-{file.name}"
        copy = private_folder(self.copies) / name
        size = file.stat().st_size
        if not copy.is_file() or copy.stat().st_size != size:
            with new_file(copy, permissions=0o600, durable=False) as opened:
                opened.writelines(stream(file.url, size))
        return copy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus(abc.ABC):
    """A corpus on disk, in the layout of its release.

    The docstring of a subclass is the help of `medvl shards NAME`. Its documented fields are the
    command's options.
    """

    corpus: ClassVar[str]
    """Name of the command and in manifests, which `register_corpus` sets."""
    labels: ClassVar[tuple[str, ...]] = ()
    """Names of the labels, where the release fixes them."""
    counts: ClassVar[Mapping[str, int]] = {}
    """Counts of the full release, which `medvl verify --full` compares with: images, a split, or
    rows where the corpus counts other rows than images.
    """
    textless: ClassVar[bool] = False
    """Whether images without text are kept: the corpus has labels, boxes, masks or questions."""
    color: ClassVar[bool] = False
    """Whether images are always stored in colour."""
    crop_background: ClassVar[bool] = False
    """Whether images are always cut to their foreground."""
    has_images: ClassVar[bool] = True
    """Whether the command has the options of stored images."""
    has_volumes: ClassVar[bool] = False
    """Whether the command has the options of stored volumes in place of those of images."""

    @abc.abstractmethod
    def plan(self, deid: "Deidentifier", access: FileAccess = FileAccess()) -> "Plan":
        """Return the records of the corpus, from its tables; no image is opened.

        Args: deid: hasher of patients, studies and images. access: files that the conversion
        grants.

        Raises CorpusError when a file is missing or does not match the data card; ConfigError when
        an option is unknown or out of range.
        """

    def keeps_textless(self) -> bool:
        """Return whether images without text are kept with these options."""
        return self.textless

    def excluded_folders(self) -> Sequence[Path]:
        """Return folders of shards whose patients are excluded from the corpus."""
        return ()

    def notes(self, plan: "Plan") -> list[str]:
        """Return lines that the command prints above its counts."""
        return []

    @classmethod
    def full_counts(cls, release: str) -> Mapping[str, int]:
        """Return `counts` of the full release that manifests call `release`."""
        return cls.counts


CORPORA: Registry[Corpus] = Registry(
    "medvl.data.corpora.registry:Corpus",
    kind="corpus",
    modules=_MODULES,
    group="medvl.corpora",
    attribute="corpus",
    decorator="register_corpus",
)
"""The corpora by name."""
list_corpora = CORPORA.names
corpus_class = CORPORA.get

Class = TypeVar("Class", bound=type[Corpus])


def register_corpus(name: str) -> Callable[[Class], Class]:
    """Register the decorated `Corpus` under `name`, the name of its command.

    Raises ConfigError where the name belongs to another class.
    """

    def register(cls: Class) -> Class:
        CORPORA.register(name, cls)
        return cls

    return register


def full_counts(release: str) -> Mapping[str, int]:
    """Return the counts of the full release that manifests call `release`; nothing for others."""
    name = _RELEASES.get(release, release)
    return CORPORA.get(name).full_counts(release) if name in CORPORA.names() else {}
