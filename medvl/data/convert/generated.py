"""Folders of generated images (`medvl.data.images.generated`) as samples and as a corpus;
`data_cards/generated.md`.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from medvl.data.corpora.common.record_file import Records
from medvl.data.corpora.common.rows import RowCounts
from medvl.data.corpora.common.tables import Plan, Record
from medvl.data.corpora.registry import Corpus, FileAccess, register_corpus
from medvl.data.images.generated import GeneratedImages
from medvl.data.privacy import Deidentifier
from medvl.data.reports.labeler import conventions_named, label_report
from medvl.data.shards.source import ShardSource
from medvl.data.splits import check_name
from medvl.errors import ConfigError, CorpusError, SplitError
from medvl.schema import FINDINGS, ConventionsName, Sample

CORPUS = "generated"


@register_corpus("generated")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated(Corpus):
    """Convert generated images to shards for training, with the generator's hash and training data
    in the manifest.

    Evaluations refuse such shards as test data, and treat a model that is trained on them as
    trained on the generator's training data too.
    """

    labels: ClassVar[tuple[str, ...]] = FINDINGS

    root: Path
    """folder of medvl generate."""
    source: tuple[Path, ...] = ()
    """folders of the shards whose texts are the prompts, for their patients."""
    name: str = CORPUS
    """name of the corpus."""
    split: str = "train"
    """name of the split."""
    conventions: ConventionsName = "chexpert"
    """what counts as positive and as uncertain in a prompt."""

    def plan(self, deid: Deidentifier, access: FileAccess = FileAccess()) -> Plan:
        """Return the records of a folder of generated images.

        The text of an image is its prompt, and its labels are the findings that the prompt states
        (`medvl.data.reports.labeler`). Its patient is that of the prompt, so that images of a test
        patient's report do not train a model that is tested on that patient. Prompts without a
        source are their own patients.

        Raises:
            ConfigError: `source` is missing or has not all prompts.
            CorpusError: the folder is damaged or not complete.
            SplitError: the sources were hashed with another salt.
        """
        check_name(self.name, "name")
        check_name(self.split, "split")
        images = GeneratedImages.open(self.root)
        patients = _patients(images, deid, self.source)
        rows = RowCounts()
        records = Records()
        trained_on = images.train_manifests()
        for number, row in enumerate(rows.reading(images.rows)):
            images.pixels(number)  # raises where they are not those that were generated
            patient = (
                deid.patient(f"prompt {row.prompt}")
                if row.source_key is None
                else patients[row.source_key]
            )
            sample = generated_sample(
                images,
                number,
                patient=patient,
                corpus=self.name,
                split=self.split,
                conventions=self.conventions,
            )
            records.append(Record(sample))
            rows.kept += 1
        return Plan(
            corpus=self.name,
            records=records,
            label_names=FINDINGS,
            rows=rows,
            warnings=Counter(generator_of_unknown_training_data=0 if trained_on else len(images)),
            folders=access.folders(self.root),
            generators=({"sha256": images.generation.generator, "trained_on": trained_on},),
        )


def generated_sample(
    images: GeneratedImages,
    number: int,
    *,
    patient: str,
    corpus: str = CORPUS,
    split: str = "train",
    conventions: ConventionsName = "chexpert",
) -> Sample:
    """Return a generated image as a sample, with the labels of its prompt and `synthetic` in its
    extra fields.
    """
    row = images.rows[number]
    sections: list[str] = list(images.generation.prompt_source.get("sections") or [])
    return Sample(
        key=f"synthetic-{row.pixel_hash[:16]}-{number:06d}",
        corpus=corpus,
        split=split,
        patient=patient,
        study=f"synthetic-{images.generation.generator[:16]}-{number:06d}",
        image=images.folder / row.file,
        sections={sections[0] if len(sections) == 1 else "caption": row.prompt},
        labels=label_report(row.prompt, conventions_named(conventions)),
        extra={
            "synthetic": True,
            "generator": images.generation.generator,
            "prompt_key": row.prompt_key,
            "seed": row.seed,
            "guidance": row.guidance,
            "conventions": conventions,
        },
    )


def _patients(
    images: GeneratedImages, deid: Deidentifier, sources: Sequence[Path]
) -> Mapping[str, str]:
    """Return the patient of each key of the sources. Raises as `plan`."""
    source_keys = {row.source_key for row in images.rows if row.source_key is not None}
    if source_keys and not sources:
        message = (
            f"the prompts of {images.folder} are texts of shards; name these with "
            f"--source, for their patients"
        )
        raise ConfigError(message, "missing", field="source")
    patients = {}
    for folder in sources:
        source = ShardSource(folder)
        if source.manifest.salt != deid.fingerprint:
            raise SplitError(
                f"{folder} was hashed with another salt; give its --salt-file",
                "mismatch",
                field="salt",
            )
        for position in range(len(source)):
            if source.key(position) in source_keys:
                patients[source.key(position)] = source.sample(position).patient
    lacking = len(source_keys) - len(patients)
    if lacking:
        message = (
            f"{lacking} of {len(source_keys)} prompts of {images.folder} are not texts of the "
            f"shards of --source"
        )
        raise CorpusError(message, "not_found", field="source")
    return patients
