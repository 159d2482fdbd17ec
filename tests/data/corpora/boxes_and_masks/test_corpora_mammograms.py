"""VinDr-Mammo and EMBED on fixtures in the published layouts and on their phantoms, and the
background that is cut away.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.box_corpora import box, convert, samples_of, write_phantom
from helpers.errors import raises
from helpers.mimic_files import textured

from medvl.data.annotations import crop_regions, decode_runs, encode_runs
from medvl.data.convert.options import ShardOptions
from medvl.data.corpora.boxes_and_masks.embed_mammo import EmbedMammo
from medvl.data.corpora.boxes_and_masks.vindr_mammo import VinDrMammo, most_suspicious
from medvl.data.images.read import find_foreground
from medvl.data.privacy import Deidentifier
from medvl.data.shards.source import ShardSource
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import create_image_encoder
from medvl.errors import CorpusError
from medvl.models.card import image_kind
from medvl.models.checkpoint import load, save
from medvl.models.downstream.classifier import Classifier
from medvl.phantom import World, read_truth
from medvl.phantom.layouts.mammography import Breast, Lesion, draw_breast, sample_breast

# Background


@pytest.mark.parametrize("side", ["L", "R"])
def test_the_breast_is_the_foreground_not_the_marker(side: str) -> None:
    breast = Breast(side, 0.5, 1, 5, (Lesion("mass", 0.5, 0.0, 0.03),))
    pixels, ((left, top, right, bottom),) = draw_breast(breast, "CC", 640)
    area = find_foreground(pixels)
    assert area is not None
    x, y, width, height = area
    outside = np.ones(pixels.shape, bool)
    outside[y : y + height, x : x + width] = False
    assert set(np.unique(pixels[outside])) == {2, 230}, "background and the marker"
    assert width < 0.55 * pixels.shape[1]
    assert 0.65 * 640 < height < 0.8 * 640
    assert x <= left < right <= x + width
    assert y <= top < bottom <= y + height
    assert x == 0 if side == "L" else x + width == pixels.shape[1]


def test_images_without_a_background_stay_whole() -> None:
    pixels = np.full((100, 80), 200, np.uint8)
    assert find_foreground(pixels) == (0, 0, 80, 100)
    assert find_foreground(np.zeros((100, 80), np.uint8)) is None
    assert find_foreground(np.repeat(pixels[:, :, None], 3, axis=2)) == (0, 0, 80, 100)
    textured_HW = textured(3, 64, 64)
    assert find_foreground(textured_HW.astype(np.uint8)) is not None


def test_regions_move_with_the_crop() -> None:
    mask_HW = np.zeros((10, 8), bool)
    mask_HW[4:6, 3:5] = True
    extra = {
        "boxes": [box("Mass", 3, 4, 2, 2)],
        "phrases": [{"label": "Mass", "text": "A mass.", "boxes": [box("Mass", 3, 4, 2, 2)]}],
        "shapes": [{"shape": "polygon", "points": [3, 4, 5, 6]}],
        "masks": [{"label": "Mass", "runs": encode_runs(mask_HW)}],
        "image_width": 8,
        "image_height": 10,
        "other": 1,
    }
    cropped = crop_regions(extra, (2, 3, 5, 6), (8, 10))
    assert cropped["boxes"] == [box("Mass", 1, 1, 2, 2)] == cropped["phrases"][0]["boxes"]
    assert cropped["shapes"] == [{"shape": "polygon", "points": [1, 1, 3, 3]}]
    assert (decode_runs(cropped["masks"][0]["runs"], 6, 5) == mask_HW[3:9, 2:7]).all()
    assert (cropped["image_width"], cropped["image_height"], cropped["other"]) == (5, 6, 1)
    place = {"x": 2, "y": 3, "width": 5, "height": 6, "image_width": 8, "image_height": 10}
    assert cropped["crop"] == place


def test_the_option_is_stored_where_it_is_used() -> None:
    assert "crop_background" not in ShardOptions().stored()
    assert ShardOptions(crop_background=True).stored()["crop_background"] is True


def test_masks_of_another_size_move_with_the_crop(tmp_path: Path) -> None:
    """SIIM's masks refer to images of 1024 pixels; the phantom's have 64."""
    write_phantom("siim", tmp_path / "corpus", 12, 64, 41)
    convert(tmp_path / "corpus", "siim", tmp_path / "plain")
    convert(tmp_path / "corpus", "siim", tmp_path / "cropped", "--crop-background")
    splits = ("train", "validate", "test")
    plain = {one.key: one for one in samples_of(tmp_path / "plain", *splits)}
    checked = 0
    for sample in samples_of(tmp_path / "cropped", *splits):
        for whole, part in zip(
            plain[sample.key].extra["masks"], sample.extra["masks"], strict=True
        ):
            crop = sample.extra["crop"]
            size = (sample.extra["image_height"], sample.extra["image_width"])
            mask_HW = decode_runs(whole["runs"], 1024, 1024)
            expected = mask_HW[crop["y"] : crop["y"] + size[0], crop["x"] : crop["x"] + size[1]]
            assert (decode_runs(part["runs"], *size) == expected).all()
            checked += 1
    assert checked


# VinDr-Mammo

EXAM, OTHER, IMAGE, SECOND, THIRD = (letter * 32 for letter in "abcde")
BREASTS = f"""study_id,series_id,image_id,laterality,view_position,height,width,breast_birads,breast_density,split
{EXAM},s,{IMAGE},L,CC,100,80,BI-RADS 4,DENSITY C,training
{EXAM},s,{SECOND},L,MLO,100,80,BI-RADS 4,DENSITY C,training
{OTHER},s,{THIRD},R,CC,100,80,BI-RADS 1,DENSITY A,test
"""
FOUND = f"""image_id,height,width,finding_categories,finding_birads,xmin,ymin,xmax,ymax
{IMAGE},100,80,"['Mass', 'Skin Thickening']",BI-RADS 4,10.5,20,30,40
{IMAGE},100,80,['Mass'],BI-RADS 3,70,20,90,40
{SECOND},100,80,['No Finding'],,,,,
"""


def write_vindr(root: Path, breasts: str = BREASTS, found: str = FOUND) -> Path:
    (root / "breast-level_annotations.csv").write_text(breasts)
    (root / "finding_annotations.csv").write_text(found)
    return root


def test_findings_are_of_images_and_categories_of_breasts(
    tmp_path: Path, deid: Deidentifier
) -> None:
    plan = VinDrMammo(root=write_vindr(tmp_path)).plan(deid)
    first, second, third = plan.iter_samples()
    assert plan.label_names == (
        "Mass", "No Finding", "Skin Thickening", "Breast BI-RADS 1", "Breast BI-RADS 4",
        "Breast density A", "Breast density C",
    )  # fmt: skip
    of_breast = {"Breast BI-RADS 4", "Breast density C"}
    assert positives(first) == {"Mass", "Skin Thickening"} | of_breast
    assert positives(second) == {"No Finding"} | of_breast
    assert positives(third) == {"No Finding", "Breast BI-RADS 1", "Breast density A"}
    assert first.extra["boxes"] == [
        {**box("Mass", 10.5, 20, 19.5, 20), "birads": "4"},
        {**box("Skin Thickening", 10.5, 20, 19.5, 20), "birads": "4"},
    ]
    assert (second.extra["laterality"], second.view, third.split) == ("L", "MLO", "test")
    assert first.patient == second.patient == deid.patient(EXAM)
    assert first.image == tmp_path / "images" / EXAM / f"{IMAGE}.dicom"
    assert plan.warnings == {"box_malformed": 1, "studies_are_patients": 3}


def positives(sample) -> set[str]:
    return {name for name, value in sample.labels.items() if value}


@pytest.mark.parametrize(
    ("breasts", "found", "expected"),
    [
        (BREASTS.replace("BI-RADS 1", "BI-RADS 9"), FOUND, ("malformed", "breast_birads")),
        (BREASTS.replace(",R,", ",X,"), FOUND, ("malformed", "study_id")),
        (BREASTS.replace(OTHER, "../o"), FOUND, ("malformed", "study_id")),
        (BREASTS, FOUND.replace("['Mass'],", "Mass,"), ("malformed", "finding_categories")),
        (BREASTS, FOUND.replace(SECOND, "f" * 32), ("mismatch",)),
    ],
)
def test_damaged_vindr_tables_raise(
    breasts: str, found: str, expected: tuple[str, ...], tmp_path: Path, deid: Deidentifier
) -> None:
    with raises(CorpusError, *expected):
        VinDrMammo(root=write_vindr(tmp_path, breasts, found)).plan(deid)


def test_vindr_phantom_boxes_are_around_the_lesions(tmp_path: Path, deid: Deidentifier) -> None:
    write_phantom("vindr-mammo", tmp_path / "corpus", 6, 160, 52)
    convert(tmp_path / "corpus", "vindr-mammo", tmp_path / "shards", "--short-side", "160")
    truth = {deid.image(Path(row["path"]).stem): row for row in read_truth(tmp_path / "corpus")}
    boxes = 0
    for folder in (tmp_path / "shards").iterdir():
        source = ShardSource(folder)
        for place in range(len(source)):
            sample, pixels_HW = source.sample(place), source.pixels(place)
            crop, row = sample.extra["crop"], truth[sample.key]
            assert pixels_HW.shape == (crop["height"], crop["width"]), "smaller than the short side"
            assert crop["width"] < 0.9 * row["width"]
            assert (crop["image_width"], crop["image_height"]) == (row["width"], row["height"])
            expected = [(left - crop["x"], top - crop["y"]) for left, top, _, _ in row["boxes"]]
            assert [(one["x"], one["y"]) for one in sample.extra["boxes"]] == expected
            for one in sample.extra["boxes"]:
                x, y = round(one["x"]), round(one["y"])
                inside = pixels_HW[y : y + int(one["height"]), x : x + int(one["width"])]
                assert inside.max() > 190, "also in MONOCHROME1"
                boxes += 1
    assert boxes > 4
    assert image_kind("vindr-mammo").modalities == ("MG",)


def test_a_model_of_cut_shards_cuts_original_images(tmp_path: Path) -> None:
    write_phantom("vindr-mammo", tmp_path / "corpus", 2, 160, 52)
    command = ("--image-format", "png")
    convert(tmp_path / "corpus", "vindr-mammo", tmp_path / "shards", *command)
    source = ShardSource(tmp_path / "shards/train")
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    encoder = create_image_encoder("resnet_tiny", image_size=32)
    model = Classifier.on(encoder, ("Mass",), EvalTransform(size=32))
    save(model, checkpoint, {"train_manifest": source.manifest.to_json()})
    trained = load(checkpoint).transform
    lines = (tmp_path / "shards-private/sources.tsv").read_text().splitlines()
    paths = dict(line.split("\t") for line in lines)
    plain = EvalTransform(**trained.settings())
    for place in range(len(source)):
        expected = plain(source.pixels(place))
        assert torch.equal(trained(paths[source.key(place)]), expected)
        assert not torch.equal(plain(paths[source.key(place)]), expected)


# EMBED

IMAGES = """empi_anon,acc_anon,study_date_anon,anon_dicom_path,FinalImageType,ViewPosition,ImageLateralityFinal,ROI_coords
100,9000000000000001.0,2014-02-03,/mnt/NAS/cohort_1/100/1/s/a.dcm,2D,MLO,L,"[[20, 10, 40, 30]]"
100,9000000000000001.0,2014-02-03,/mnt/NAS/cohort_1/100/1/s/b.dcm,2D,CC,R,nan
100,9000000000000001.0,2014-02-03,/mnt/NAS/cohort_1/100/1/s/c.dcm,cview,CC,R,
100,9000000000000000,2013-02-03,images/cohort_1/100/0/s/d.dcm,2D,SPOT,R,
"""
CLINICAL = """empi_anon,acc_anon,side,asses,tissueden,massshape,path_severity,RACE_DESC
100,9000000000000001,L,B,3.0,,,X
100,9000000000000001,L,M,3.0,R,0.0,X
100,9000000000000001,R,A,3.0,,,X
100,9000000000000000,B,N,2.0,,,X
100,9000000000000000,nan,P,2.0,,,X
200,9000000000000000,R,K,2.0,,,X
"""


def write_embed(root: Path, images: str = IMAGES, clinical: str = CLINICAL) -> Path:
    (root / "tables").mkdir(exist_ok=True)
    (root / "images").mkdir(exist_ok=True)
    (root / "tables/EMBED_OpenData_metadata_reduced.csv").write_text(images)
    (root / "tables/EMBED_OpenData_clinical.csv").write_text(clinical)
    return root


def test_findings_are_joined_by_patient_exam_and_side(tmp_path: Path, deid: Deidentifier) -> None:
    plan = EmbedMammo(root=write_embed(tmp_path)).plan(deid)
    left, right, earlier = plan.iter_samples()
    assert positives(left) == {"Breast BI-RADS 5", "Breast density C"}
    assert len(left.labels) == 11
    assert left.extra["findings"] == [
        {"birads": "2"}, {"birads": "5", "mass_shape": "R", "path_severity": "0"},
    ]  # fmt: skip
    assert left.extra["boxes"] == [box("ROI", 10, 20, 20, 20)]
    assert (positives(right), right.extra["boxes"]) == (
        {"Breast BI-RADS 0", "Breast density C"}, []
    )  # fmt: skip
    assert positives(earlier) == {"Breast BI-RADS 3", "Breast density B"}, "both rows, one is blank"
    assert (earlier.order, left.order, earlier.view, left.view) == (0, 1, None, "MLO")
    assert left.image == tmp_path / "images/cohort_1/100/1/s/a.dcm"
    assert left.study == right.study == deid.study("100", "9000000000000001")
    assert plan.excluded == {"image_type": 1}
    assert plan.warnings == {"assessments_of_breast_differ": 2, "unknown_view": 1}
    wide = EmbedMammo(root=tmp_path, image_types=("2D", "cview")).plan(deid)
    assert len(wide.records) == 4
    assert most_suspicious(["1", "0", "3"]) == "0"
    assert most_suspicious([]) is None


def test_breasts_without_a_row_have_no_labels(tmp_path: Path, deid: Deidentifier) -> None:
    clinical = "".join(CLINICAL.splitlines(keepends=True)[:3])
    plan = EmbedMammo(root=write_embed(tmp_path, clinical=clinical)).plan(deid)
    _, right, earlier = plan.iter_samples()
    assert right.labels == earlier.labels == {}
    assert plan.warnings["no_clinical_row"] == 2


@pytest.mark.parametrize(
    ("images", "clinical", "expected"),
    [
        (IMAGES.replace("[[20, 10, 40, 30]]", "[[40, 10, 20, 30]]"), CLINICAL, ("malformed", "ROI_coords")),
        (IMAGES.replace("[[20, 10, 40, 30]]", "[[20, 10, 40]]"), CLINICAL, ("malformed", "ROI_coords")),
        (IMAGES.replace("[[20, 10, 40, 30]]", "[[20, 10, a, 40]]"), CLINICAL, ("malformed", "ROI_coords")),
        (IMAGES.replace("ROI_coords", "x").replace("acc_anon", "acc"), CLINICAL, ("missing", "acc_anon")),
        (IMAGES.replace("9000000000000000,", "9.0E+15,"), CLINICAL, ("malformed", "acc_anon")),
        (IMAGES.replace("images/cohort_1/100/0", "images/../0"), CLINICAL, ("malformed", "anon_dicom_path")),
        (IMAGES.replace("MLO,L", "MLO,X"), CLINICAL, ("malformed", "ImageLateralityFinal")),
        (IMAGES, CLINICAL.replace(",M,", ",Q,"), ("malformed", "asses")),
        (IMAGES, CLINICAL.replace(",L,M", ",U,M"), ("malformed", "side")),
    ],
)  # fmt: skip
def test_damaged_embed_tables_raise(
    images: str, clinical: str, expected: tuple[str, ...], tmp_path: Path, deid: Deidentifier
) -> None:
    with raises(CorpusError, *expected):
        EmbedMammo(root=write_embed(tmp_path, images, clinical)).plan(deid)


def test_embed_phantom_has_the_breasts_of_the_world(tmp_path: Path, deid: Deidentifier) -> None:
    write_phantom("embed-mammo", tmp_path / "corpus", 6, 64, 53)
    plan = EmbedMammo(root=tmp_path / "corpus").plan(deid)
    breasts = {
        deid.study(str(10_000_000 + patient.index), str(5 * 10**15 + 10 * patient.index + exam)): {
            side: sample_breast(patient, 53, exam, side) for side in "LR"
        }
        for patient in World(53).patients(6)
        for exam in range(min(2, len(patient.studies)))
    }
    for sample in plan.iter_samples():
        breast = breasts[sample.study][sample.extra["laterality"]]
        assert sample.extra["breast_birads"] == str(breast.birads)
        assert sample.labels[f"Breast BI-RADS {breast.birads}"] == 1
        assert sample.extra["breast_density"] == "ABCD"[breast.density - 1]
        assert len(sample.extra["boxes"]) == len(breast.lesions)
        severities = [one.get("path_severity") for one in sample.extra["findings"]]
        masses = sum(lesion.kind == "mass" for lesion in breast.lesions)
        assert severities.count("0") == masses
