"""Names of corpora: built-in ones, and those of other packages with their commands."""

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from helpers.errors import raises
from helpers.mimic_files import textured

from medvl.cli import main as cli
from medvl.common.registry import _summaries, entry_points
from medvl.data import FileAccess, corpus_class, encode_png, list_corpora, register_corpus
from medvl.data.corpora import registry
from medvl.data.corpora.labels.chexpert import CheXpert
from medvl.data.storage import store
from medvl.data.storage.location import RemotePath
from medvl.errors import ConfigError

CARDS = Path(__file__).parents[3] / "data_cards"
OUTSIDE = '''
import csv
import dataclasses
from pathlib import Path

from medvl.data import Corpus, FileAccess, Plan, Record, RowCounts, hash_split, register_corpus
from medvl.schema import Sample


@register_corpus("my-corpus")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MyCorpus(Corpus):
    """Convert my corpus, images with captions."""

    counts = {"images": 9}

    root: Path
    """folder of rows.csv"""
    prefix: str = ""
    """words before each caption"""

    def plan(self, deid, access=FileAccess()):
        records, rows = [], RowCounts()
        with (self.root / "rows.csv").open() as file:
            for row in rows.reading(csv.DictReader(file)):
                patient = deid.patient(row["file"])
                sample = Sample(
                    key=deid.image(row["file"]),
                    corpus=self.corpus,
                    split=hash_split(patient, {"train": 1.0}),
                    patient=patient,
                    study=deid.study(row["file"], row["file"]),
                    image=self.root / row["file"],
                    sections={"caption": self.prefix + row["caption"]},
                )
                records.append(Record(sample))
                rows.kept += 1
        return Plan(self.corpus, records, (), rows, folders=access.folders(self.root))
'''
POINTS = """[medvl.corpora]
my-corpus = my_corpus:MyCorpus
absent = my_corpus_that_is_not_there:MyCorpus
renamed = my_corpus:MyCorpus
function = my_corpus:hash_split
chexpert = my_corpus:MyCorpus
"""


@pytest.fixture(autouse=True)
def restored_registry() -> Iterator[None]:
    entry_points.cache_clear()
    yield
    entry_points.cache_clear()
    for name in set(registry.CORPORA.imported) - set(registry.CORPORA.modules):
        del registry.CORPORA.imported[name]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package with five entry points, one of which works; its folder."""
    folder = tmp_path / "site"
    metadata = folder / "my_corpora-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "my_corpus.py").write_text(OUTSIDE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-corpora\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(folder)
    yield folder
    sys.modules.pop("my_corpus", None)


def write_corpus(root: Path, images: int = 3) -> Path:
    root.mkdir()
    for number in range(images):
        (root / f"{number}.png").write_bytes(encode_png(textured(number, 40, 50)))
    rows = [f"{number}.png,image {number}" for number in range(images)]
    (root / "rows.csv").write_text("\n".join(["file,caption", *rows]))
    return root


def test_one_file_of_another_package_is_a_command(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, out = write_corpus(tmp_path / "corpus"), tmp_path / "shards"
    salt = ["--salt-file", str(tmp_path / "salt"), "--new-salt"]
    places = ["--root", str(root), "--out", str(out), "--workers", "1"]
    cli.main(["shards", "my-corpus", *places, *salt, "--prefix", "Figure: "])
    assert "my-corpus: read 3 images: kept 3" in capsys.readouterr().out
    cli.main(["verify", str(out)])
    printed = capsys.readouterr().out
    assert "my-corpus/train: 3 samples of 3 patients in 1 shards, 0 left out: intact" in printed
    assert "not the full release: 3 of 9 images" in printed
    with pytest.raises(SystemExit):
        cli.main(["verify", str(out), "--full"])
    with pytest.raises(SystemExit):
        cli.main(["shards", "my-corpus", "--help"])
    printed = capsys.readouterr().out
    assert "Convert my corpus, images with captions." in printed
    assert "words before each caption" in printed
    assert "--samples-per-shard" in printed


def test_lists_name_the_corpora_of_packages_and_import_none(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list_corpora()[-4:] == ["absent", "function", "my-corpus", "renamed"]
    cli.main(["shards", "--help"])
    line = "my-corpus         The corpus my-corpus of the package my-corpora."
    assert line in capsys.readouterr().out
    assert "my_corpus" not in sys.modules


@pytest.mark.parametrize(
    ("name", "code"),
    [("absent", "unsupported"), ("renamed", "wrong_type"), ("function", "wrong_type")],
)
def test_broken_entry_points_name_their_package(
    package: Path, name: str, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with raises(ConfigError, code) as caught:
        corpus_class(name)
    assert f"corpus {name!r} of the package my-corpora" in str(caught.value)
    with pytest.raises(SystemExit) as ended:
        cli.main(["shards", name, "--out", "out"])
    assert ended.value.code == 1
    assert "the package my-corpora" in capsys.readouterr().err


def test_packages_cannot_replace_a_corpus(package: Path) -> None:
    assert corpus_class("chexpert") is CheXpert
    with raises(ConfigError, "exists", "name"):
        register_corpus("chexpert")(type("Other", (CheXpert,), {}))


def test_an_unknown_corpus_names_the_nearest() -> None:
    with raises(ConfigError, "unknown_name", "name") as caught:
        corpus_class("chexprt")
    assert "chexpert" in str(caught.value)


@pytest.mark.parametrize("name", list_corpora())
def test_every_corpus_is_a_documented_class_under_its_name(name: str) -> None:
    cls = corpus_class(name)
    assert cls.corpus == name
    assert _summaries(registry.CORPORA.modules[name], "register_corpus")[
        name
    ] == registry.CORPORA.summary(name)
    assert registry.CORPORA.summary(name).startswith("Convert ")
    assert dataclasses.fields(cls)


@pytest.mark.parametrize("name", [*list_corpora(), *registry._RELEASES])
def test_data_cards_contain_the_counts_of_verify(name: str) -> None:
    counts = registry.full_counts(name)
    cards = {"chestxdet": "chestxdet10", **registry._RELEASES}
    card = CARDS / f"{cards.get(name, name)}.md"
    for count in counts.values():
        assert f"{count:,}" in card.read_text(encoding="utf-8")


def test_the_names_of_corpora_import_no_corpus() -> None:
    code = (
        "import sys; from medvl.data.corpora import registry;"
        "lines = [registry.CORPORA.summary(name) for name in registry.list_corpora()];"
        "print(len(lines) > 30, 'numpy' in sys.modules,"
        "'medvl.data.corpora.labels.chexpert' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "False"]


def test_remote_files_are_copied_once_into_a_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = fsspec.filesystem("memory")
    monkeypatch.setattr(store, "_filesystem", lambda url: (files, f"/{url.partition('://')[2]}"))
    files.pipe("/lab/a.parquet", b"first")
    remote = RemotePath("s3://lab/a.parquet")
    with raises(ConfigError, "missing", "copies"):
        FileAccess().local_copy(remote)
    access = FileAccess(copies=tmp_path / "private/copies")
    copy = access.local_copy(remote)
    assert copy.read_bytes() == b"first"
    folder = copy.parent
    assert folder.stat().st_mode & 0o077 == folder.parent.stat().st_mode & 0o077 == 0
    copy.write_bytes(b"other")
    assert access.local_copy(remote).read_bytes() == b"other"  # of the same size: kept
    copy.write_bytes(b"fir")
    assert access.local_copy(remote).read_bytes() == b"first"
    files.pipe("/lab/more/a.parquet", b"third")
    assert access.local_copy(RemotePath("s3://lab/more/a.parquet")).read_bytes() == b"third"
    assert len(list(folder.iterdir())) == 2
