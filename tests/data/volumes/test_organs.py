"""Organs beside volumes: masks of TotalSegmentator, shards, loader, and what is refused."""

import dataclasses
import json
import shutil
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.contrastive_systems import fvlm
from helpers.errors import raises
from helpers.volume_shards import volume_shards

from medvl.cli import main as cli
from medvl.common.untrusted import ANYWHERE
from medvl.data import OrganOptions, RandomSentence, VolumeTransform, WholeText
from medvl.data.convert.organs import add_organs
from medvl.data.corpora.registry import FileAccess, corpus_class
from medvl.data.loading.loader import open_loader
from medvl.data.loading.sources import ConcatSource
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import Index
from medvl.data.shards.source import ShardSource
from medvl.data.shards.verify import verify_folder
from medvl.data.tokenizer.tokenizer import train_wordpiece
from medvl.data.volumes.nifti import read_nifti
from medvl.data.volumes.options import VolumeFile, VolumeOptions
from medvl.data.volumes.organs import MAP, find_organ_masks, organ_box, prepared_organs, read_organs
from medvl.data.volumes.reading import prepared
from medvl.data.volumes.volume import Volume
from medvl.errors import ConfigError, CorpusError, MedvlError, ShardError, VolumeError
from medvl.inference.answers import encode_images
from medvl.phantom.layouts.volumes import write_nifti
from medvl.phantom.population.volumes import sample_chest_ct
from medvl.phantom.rendering.volumes import organ_numbers
from medvl.schema import ORGANS, Inputs

SHAPE = (16, 32, 32)
FILE = VolumeFile()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Volumes of five patients and their organs."""
    home = tmp_path_factory.mktemp("organs")
    command = ["phantom", "ct-rate", "--out", str(home / "ct"), "--patients", "5", "--organ-masks"]
    cli.main([*command, "--shape", "16", "32", "32", "--reconstructions", "1"])
    convert(home, "whole")
    return home


def numbers(seed: int = 0) -> np.ndarray:
    return organ_numbers(sample_chest_ct((seed, 0)), SHAPE)


def write_flipped(path: Path, number_DHW: np.ndarray) -> None:
    """Write an array on the same grid, with x from right to left and z from head to feet."""
    affine = np.diag([11.25, -11.25, -18.75, 1])
    affine[:3, 3] = -11.25 * 31, 0, 18.75 * 15
    stored = np.flip(number_DHW.transpose(2, 1, 0), (0, 2))
    nibabel.save(nibabel.Nifti1Image(stored, affine), path)


def organs_of(number_DHW: np.ndarray) -> np.ndarray:
    """Return the organs of numbers of TotalSegmentator 2, written out."""
    out = np.zeros(number_DHW.shape, np.uint8)
    for organ, values in enumerate(((10, 11, 12, 13, 14), (51, 61), (15,), (52,)), 1):
        out[np.isin(number_DHW, values)] = organ
    return out


def test_a_map_and_files_of_structures_are_the_same_organs(tmp_path: Path) -> None:
    number_DHW = numbers()
    write_nifti(tmp_path / "scan.nii.gz", np.full(SHAPE, 40, np.int16))
    (tmp_path / "maps").mkdir()
    write_flipped(tmp_path / "maps" / "scan.nii.gz", number_DHW)
    files = {
        "heart": (51,),
        "esophagus": (15,),
        "aorta": (52,),
        "lung": (10, 11, 12, 13, 14),
        "liver": (5,),
    }
    (tmp_path / "files" / "scan").mkdir(parents=True)
    for name, values in files.items():
        mask = np.isin(number_DHW, values).astype(np.uint8)
        write_nifti(tmp_path / "files" / "scan" / f"{name}.nii.gz", mask)
    volume = read_nifti(tmp_path / "scan.nii.gz")
    for root, found in (("maps", {MAP}), ("files", {*files} - {"liver"})):
        masks = find_organ_masks(tmp_path / root, tmp_path / "scan.nii.gz")
        assert masks.keys() == found
        organs = read_organs(masks, volume, FILE, "totalsegmentator2", ANYWHERE)
        assert np.array_equal(organs, organs_of(number_DHW)), "in the orientation of the volume"
    assert set(np.unique(organs)) == {0, 1, 2, 3, 4}
    assert find_organ_masks(tmp_path / "maps", Path("other.nii.gz")) == {}
    (tmp_path / "files" / "scan" / "lung.nii.gz").rename(
        tmp_path / "files" / "scan" / "lung_upper_lobe_left.nii.gz"
    )
    masks = find_organ_masks(tmp_path / "files", tmp_path / "scan.nii.gz")
    with raises(VolumeError, "incomplete"):
        read_organs(masks, volume, FILE, "totalsegmentator2", ANYWHERE)


def test_masks_are_as_oblique_as_their_volume(tmp_path: Path) -> None:
    turn = np.eye(4)
    turn[:2, :2] = [[np.cos(0.4), -np.sin(0.4)], [np.sin(0.4), np.cos(0.4)]]
    path = tmp_path / "mask.nii"
    nibabel.save(nibabel.Nifti1Image(numbers().transpose(2, 1, 0), turn), path)
    volume = read_nifti(path, max_oblique=30)
    organs = read_organs({MAP: path}, volume, FILE, "totalsegmentator2", ANYWHERE)
    assert np.array_equal(organs, organs_of(volume.hu_DHW))


def test_organs_are_resampled_and_cut_as_their_volume() -> None:
    """Of a volume that is its own mask, on the same voxels."""
    organs = organs_of(numbers())
    volume = Volume(hu_DHW=organs.astype(np.int16) * 100, spacing=(18.75, 11.25, 11.25))
    options = VolumeOptions(spacing=(9.375, 11.25, 3.75), size=(40, 30, 90), antialias=False)
    found = prepared_organs(organs, volume, options)
    near = prepared(volume, options).hu_DHW
    assert found.shape == near.shape == (40, 30, 90)
    same = found[4:36] == np.rint(near[4:36] / 100)
    assert same.mean() > 0.97, "but for borders, which are interpolated in the volume"
    assert not found[:4].any()
    ((first, last), _, _) = organ_box(organs)
    assert organs[first].any()
    assert organs[last - 1].any()
    assert organ_box(np.zeros(SHAPE, np.uint8)) is None


def test_masks_on_another_grid_and_unknown_labels_are_refused(tmp_path: Path) -> None:
    write_nifti(tmp_path / "scan.nii.gz", np.full(SHAPE, 40, np.int16))
    volume = read_nifti(tmp_path / "scan.nii.gz")
    path = tmp_path / "mask.nii.gz"

    def read(labels: str = "totalsegmentator2", file: VolumeFile = FILE) -> np.ndarray:
        return read_organs({MAP: path}, volume, file, labels, ANYWHERE)

    write_nifti(path, numbers()[:8])
    with raises(VolumeError, "mismatch", "organ_masks"):
        read()
    for spacing, place in ((20.0, 0.0), (18.75, 30.0)):  # mm along z
        affine = np.diag([-11.25, -11.25, spacing, 1.0])
        affine[2, 3] = place
        nibabel.save(nibabel.Nifti1Image(numbers().transpose(2, 1, 0), affine), path)
        with raises(VolumeError, "mismatch", "organ_masks"):
            read()
    with raises(VolumeError, "mismatch", "organ_masks"):
        read(file=VolumeFile(rescale=(1.0, 0.0), orientation="LPS", spacing=(11.25, 11.25, 18.75)))
    write_nifti(path, numbers())
    with raises(VolumeError, "unknown_label", "organ_labels"):
        read("organs")
    write_nifti(path, organs_of(numbers()))
    assert np.array_equal(read("organs"), organs_of(numbers()))
    path.write_bytes(path.read_bytes()[:100])
    with raises(VolumeError, "truncated"):
        read()


def convert(home: Path, out: str, *more: str, masks: Path | None = None) -> None:
    command = ["shards", "ct-rate", "--root", str(home / "ct"), "--out", str(home / out)]
    masks = masks or home / "ct" / "organ_masks"
    cli.main([*command, "--organ-masks", str(masks), "--workers", "1", *more])


def test_shards_hold_organs_and_texts(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of both releases and of a scan that lies feet first; one has no mask, one another grid."""
    masks = home / "masks"
    shutil.copytree(home / "ct" / "organ_masks", masks)
    files = sorted(masks.glob("train_*"))
    files[-3].unlink()
    write_nifti(files[1], numbers()[:8])
    texts = {"train_2_a": {"lung": "Both lungs are clear.", "heart": {"text": "x", "normal": True}}}
    (home / "texts.json").write_text(json.dumps(texts))
    options = ["--max-skipped", "1", "--organ-descriptions", str(home / "texts.json")]
    convert(home, "shards", *options, masks=masks)
    printed = capsys.readouterr().out
    assert "1 mismatch" in printed
    assert "1 no_organ_mask" in printed
    found, of_file = 0, False
    for split in ("train", "validate", "test"):
        folder = home / "shards" / split
        if not folder.is_dir():
            continue
        assert not verify_folder(folder).problems
        source = ShardSource(folder)
        assert source.manifest.options["organs"] == {
            "labels": "totalsegmentator2",
            "files": ["descriptions"],
        }
        for row in range(len(source)):
            organs = source.organs(row)
            stored = source.sample(row).extra["organs"]
            if organs is None:
                assert "box" not in stored
                continue
            found += 1
            assert organs.shape == source.volume(row).hu_DHW.shape
            hu = source.volume(row).hu_DHW
            assert np.median(hu[organs == 1]) < -700, "lung"
            assert abs(np.median(hu[organs == 2]) - 45) < 30, "blood"
            assert stored["box"] == organ_box(organs)
            assert np.array_equal(source.organs(row, slice(3, 9)), organs[3:9])
            if stored["texts"].get("lung", {}).get("description") == "Both lungs are clear.":
                assert stored["texts"]["heart"]["normal"]
                assert stored["texts"]["lung"].get("normal") is not None
                of_file = True
    assert found > 3
    assert of_file, "the texts of the file are in place of the findings"


def test_masks_and_texts_that_belong_to_nothing_are_refused(home: Path) -> None:
    deid = Deidentifier(b"0" * 32)
    plan = corpus_class("ct-rate")(root=home / "ct").plan(deid)

    def refused(kind: type[MedvlError], code: str, field: str, **options: Path) -> None:
        options = {"organ_masks": home / "ct" / "organ_masks", **options}
        with raises(kind, code, field):
            add_organs(plan, OrganOptions(**options), FileAccess())

    (home / "empty").mkdir()
    (home / "odd.json").write_text('{"a": ["b"]}')
    refused(CorpusError, "missing", "organ_masks", organ_masks=home / "empty")
    refused(ConfigError, "not_found", "organ_masks", organ_masks=home / "nowhere")
    refused(ConfigError, "not_found", "organ_descriptions", organ_descriptions=home / "no.json")
    refused(ConfigError, "malformed", "organ_conclusions", organ_conclusions=home / "odd.json")
    with raises(ConfigError, "missing", "organ_masks"):
        OrganOptions(organ_conclusions=home / "odd.json")
    assert add_organs(plan, OrganOptions(), FileAccess()) is plan


def test_damaged_organs_are_found(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "train"
    shutil.copytree(home / "whole" / "train", folder)
    source = ShardSource(folder)
    index = next(folder.glob("*.index"))
    tar = index.with_suffix(".tar")
    offset, size = next(
        map(int, line.split("\t")[2:])
        for line in index.read_text().splitlines()
        if "organs" in line
    )
    data = bytearray(tar.read_bytes())
    data[offset + size - 1] ^= 1
    tar.write_bytes(bytes(data))
    with raises(ShardError, "mismatch"):
        source.organs(0)
    assert verify_folder(folder).problems
    text = index.read_text().replace("\torgans\t", "\torgan\t", 1)
    for damaged in (text, "\n".join(text.replace("organ\t", "organs\t").splitlines()[:2])):
        with raises(ShardError, "malformed"):
            Index.read(index, damaged.encode())


def test_batches_have_organs_and_their_texts(home: Path) -> None:
    train = ShardSource(home / "whole" / "train")
    source = ConcatSource([train, ShardSource(home / "whole" / "test")])
    tokenizer = train_wordpiece(["There is no lung nodule."] * 3)
    rows = len(source)
    transform = VolumeTransform(size=(8, 24, 40), organs=True)
    (batch,) = open_loader(
        source,
        batch=rows,
        image=transform,
        text=WholeText(sections=("conclusion", "description")),
        tokenizer=tokenizer,
        train=False,
        inputs=Inputs(organs=True),
    )
    assert batch.image_BCDHW.shape == (rows, 1, 8, 24, 40)
    assert batch.organ_mask_BDHW.dtype == torch.uint8
    for row in range(rows):
        organs = source.organs(row)
        cut = transform.cut(organs.shape, box=organ_box(organs))
        assert np.array_equal(batch.organ_mask_BDHW[row], transform.fill(organs, cut, 0))
        stored = source.sample(row).extra["organs"]["texts"]
        for column, organ in enumerate(ORGANS):
            assert (
                batch.organ_normal_BO[row, column] == stored.get(organ, {"normal": True})["normal"]
            )
            assert batch.organ_mask_BOT[row, column].any()
    drawn = open_loader(
        train,
        batch=2,
        image=VolumeTransform(size=(8, 24, 24), shift=(2, 2, 2), organs=True),
        text=RandomSentence(sections=("description",)),
        tokenizer=tokenizer,
        train=True,
        inputs=Inputs(organs=True),
    )
    assert next(iter(drawn)).organ_ids_BOT.shape[:2] == (2, 4)


def test_files_and_their_masks_are_embedded_as_shards(home: Path) -> None:
    model = fvlm(tokenizer=train_wordpiece(["There is no lung nodule."] * 3), vocab_size=None)
    file = next((home / "ct").glob("**/train_1_*.nii.gz"))
    model.transform = dataclasses.replace(
        model.eval().transform, organ_masks=home / "ct" / "organ_masks"
    )
    image_BCDHW = VolumeTransform(size=model.transform.size)(file)
    organs = model.transform.read(file)
    cut = model.transform(organs)
    assert cut.image_BCDHW.shape == image_BCDHW.shape
    assert cut.organ_mask_BDHW.dtype == torch.uint8
    with torch.no_grad():
        expected = model.embed_images(cut.image_BCDHW, cut.organ_mask_BDHW)
        found = encode_images(model, model.transform([file]))
    assert torch.equal(found.global_NE, expected.global_NE)
    assert torch.equal(model.encode_image(cut.image_BCDHW, cut.organ_mask_BDHW), F.normalize(
        expected.global_NE))  # fmt: skip
    with raises(VolumeError, "unsupported"):
        model.transform(organs.hu_DHW)


def test_shards_without_organs_are_refused_by_a_loader_that_needs_them(tmp_path: Path) -> None:
    source = ShardSource(volume_shards(tmp_path, 2, reconstructions=1))
    with raises(ConfigError, "missing", "organ_masks"):
        open_loader(
            source,
            batch=2,
            image=VolumeTransform(size=SHAPE, organs=True),
            text=WholeText(),
            tokenizer=train_wordpiece(["a"]),
            train=False,
        )
