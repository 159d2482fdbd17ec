"""Shards of generated images: their lineage, the leak checks through it, and refusal as test
data.
"""

import dataclasses
import json
from pathlib import Path

import pytest
from helpers.errors import raises
from helpers.generated_images import write_generated
from helpers.mimic_files import textured
from helpers.shard_plans import OPTIONS, make_plan

from medvl.data.convert.generated import Generated
from medvl.data.convert.options import ShardRun
from medvl.data.convert.pipeline import write_shards
from medvl.data.loading.sources import ConcatSource, Subset, check_real
from medvl.data.privacy import Deidentifier
from medvl.data.shards.format import Manifest
from medvl.data.shards.source import ShardSource
from medvl.data.shards.verify import check_against, verify_folder
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import create_image_encoder
from medvl.errors import ConfigError, CorpusError, ShardError, SplitError
from medvl.eval import open_for_evaluation
from medvl.eval.core.full_pass import FullPass
from medvl.eval.core.open import open_source
from medvl.models import Classifier
from medvl.models.card import model_card
from medvl.models.checkpoint import save
from medvl.models.checkpoint_folder import train_manifests
from medvl.train.tasks.pretraining import LoaderConfig, open_split


def make_classifier() -> Classifier:
    encoder = create_image_encoder("resnet_tiny", image_size=32)
    return Classifier.on(encoder, ("Edema",), EvalTransform(size=32))


DEID = Deidentifier(b"0" * 32)
PROMPTS = ("Small left pleural effusion.", "No pleural effusion.")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Real shards of three sets of patients, images generated after training on the first from
    prompts of the second, and their shards.
    """
    root = tmp_path_factory.mktemp("generated")
    real = make_plan(root / "images")
    found = {}
    for number, name in enumerate(("seen", "prompts", "other")):
        records = [
            dataclasses.replace(
                each, sample=dataclasses.replace(each.sample, patient=f"{name}{place // 2}")
            )
            for place, each in enumerate(real.records[4 * number : 4 * number + 4])
        ]
        part = dataclasses.replace(real, records=records)
        write_shards(part, DEID, ShardRun(out=root / name, workers=1), OPTIONS)
        found[name] = root / name / "train"
    keys = [ShardSource(found["prompts"]).key(position) for position in (0, 1)]
    write_generated(
        root / "images-from-text",
        [textured(number, 32, 32) for number in (100, 101)],
        PROMPTS,
        source_keys=keys,
        manifests=[Manifest.read(found["seen"])],
    )
    found["root"] = root / "images-from-text"
    made = Generated(root=found["root"], source=(found["prompts"],)).plan(DEID)
    write_shards(made, DEID, ShardRun(out=root / "synthetic", workers=1), OPTIONS)
    return {**found, "synthetic": root / "synthetic" / "train"}


def test_samples_carry_prompt_labels_and_origin(folders):
    assert verify_folder(folders["synthetic"], decode=True).problems == ()
    source = ShardSource(folders["synthetic"])
    samples = sorted((source.sample(n) for n in range(2)), key=lambda sample: sample.key[-1])
    assert [sample.sections for sample in samples] == [{"impression": prompt} for prompt in PROMPTS]
    assert [sample.labels.get("Pleural Effusion") for sample in samples] == [1, 0]
    assert {sample.patient for sample in samples} == {"prompts0"}
    assert all(
        sample.extra["synthetic"] is True and sample.extra["generator"] == "ab" * 32
        for sample in samples
    )


def test_labels_of_prompts_follow_the_conventions(tmp_path):
    write_generated(tmp_path, [textured(5, 32, 32)], ["Probable left pleural effusion."])
    found = {}
    for name in ("chexpert", "indexed"):
        (record,) = Generated(root=tmp_path, conventions=name).plan(DEID).records
        found[record.sample.extra["conventions"]] = record.sample.labels["Pleural Effusion"]
    assert found == {"chexpert": -1, "indexed": 1}
    with raises(ConfigError, "unknown_name", "conventions"):
        Generated(root=tmp_path, conventions="radiologists").plan(DEID)


def test_the_manifest_has_the_generator_and_its_training_data(folders):
    manifest, seen = (Manifest.read(folders[name]) for name in ("synthetic", "seen"))
    assert [generator["sha256"] for generator in manifest.generators] == ["ab" * 32]
    assert [each.patients for each in manifest.lineage()] == [("prompts0",), ("seen0", "seen1")]
    assert Manifest.parse(json.loads(manifest.to_text()), "copy") == manifest
    assert "generators" not in seen.to_json()


@pytest.mark.parametrize("broken", [[{"sha256": "a"}], [{"sha256": 1, "trained_on": []}], ["a"], 5])
def test_damaged_generators_are_refused(folders, broken):
    content = Manifest.read(folders["synthetic"]).to_json() | {"generators": broken}
    with raises(ShardError, "malformed"):
        Manifest.parse(content, "manifest.json")


def test_training_on_the_images_counts_as_training_on_the_generators_data(folders, tmp_path):
    synthetic = Manifest.read(folders["synthetic"])
    for name in ("seen", "prompts"):
        with raises(SplitError, "leak"):
            check_against(synthetic, Manifest.read(folders[name]))
    check_against(synthetic, Manifest.read(folders["other"]))

    model = make_classifier()
    save(model, tmp_path, {"train_manifest": synthetic.to_json()})
    assert [each.corpus for each in train_manifests(tmp_path)] == ["generated", "lab"]
    for name in ("seen", "prompts"):
        with raises(SplitError, "leak"):
            open_source(folders[name], [tmp_path])
    assert len(open_source(folders["other"], [tmp_path])) == 4


def test_lineage_goes_through_two_generators(folders):
    """A generator that was trained on another generator's images has seen that one's training
    data too.
    """
    first = Manifest.read(folders["synthetic"])
    second = dataclasses.replace(
        first, generators=({"sha256": "c", "trained_on": [first.to_json()]},)
    )
    assert [each.patients for each in second.lineage()][-1] == ("seen0", "seen1")
    assert "training of a generator of images | " not in model_card("clip", {}, [], {})
    card = model_card("clip", {}, [second.to_json()], {})
    assert card.count("training of a generator of images |") == 2


def test_real_and_synthetic_shards_train_together(folders):
    both = ConcatSource([ShardSource(folders["seen"]), ShardSource(folders["synthetic"])])
    assert both.manifest.generators == Manifest.read(folders["synthetic"]).generators
    with raises(SplitError, "leak"):  # a patient of the prompts
        check_against(both.manifest, Manifest.read(folders["prompts"]))
    config = LoaderConfig(train=folders["synthetic"], valid=folders["other"])
    assert len(open_split(config)[0]) == 2
    with raises(SplitError, "synthetic", "data.valid"):
        open_split(LoaderConfig(train=folders["other"], valid=folders["synthetic"]))


def test_synthetic_images_are_refused_as_test_data(folders):
    synthetic, real = ShardSource(folders["synthetic"]), ShardSource(folders["other"])
    with raises(SplitError, "synthetic", "data"):
        open_source(folders["synthetic"])
    assert len(open_source(folders["synthetic"], synthetic=True)) == 2
    transform = make_classifier().transform
    for source in (synthetic, Subset(synthetic, [0]), ConcatSource([real, synthetic])):
        with raises(SplitError, "synthetic", "data"):
            FullPass(open_for_evaluation(source, transform, batch=2, workers=0))
    check_real(real)


def test_prompts_need_the_shards_that_they_come_from(folders, tmp_path):
    with raises(ConfigError, "missing", "source"):
        Generated(root=folders["root"]).plan(DEID)
    with raises(CorpusError, "not_found", "source"):
        Generated(root=folders["root"], source=(folders["other"],)).plan(DEID)
    with raises(SplitError, "mismatch", "salt"):
        Generated(root=folders["root"], source=(folders["prompts"],)).plan(Deidentifier(b"1" * 32))
    folder = write_generated(tmp_path / "free", [textured(1, 32, 32)], ["Edema."]).folder
    free = Generated(root=folder).plan(DEID)
    assert free.records[0].sample.sections == {"caption": "Edema."}
    assert free.warnings["generator_of_unknown_training_data"] == 1


def test_replaced_images_are_refused(tmp_path):
    images = write_generated(tmp_path, [textured(number, 32, 32) for number in (1, 2)], ["a", "b"])
    (tmp_path / images.rows[0].file).write_bytes((tmp_path / images.rows[1].file).read_bytes())
    with raises(CorpusError, "mismatch"):
        Generated(root=tmp_path).plan(DEID)
