"""Whether a model tells left from right: true texts against the same texts with left and right exchanged.

    python scripts/side_test.py runs/m3ae/best --data shards/mimic-cxr/test --sections impression
    python scripts/side_test.py runs/m3ae/best --data quickstart/roco-shards/test \\
        --questions quickstart/vqa/test --predictions runs/vqa/eval/vqa/predictions.jsonl

Prints the share of test pairs whose text scores above its mirror with the pair's image, among texts that name a side;
1/2 is chance, and a tie counts one half. Fusion-encoders score by image-text matching, dual-encoders by similarity.
With the predictions of `medvl eval vqa`, also the accuracy on the questions whose text or answer names a side, by
`model_credit` of that file, and on the others. Intervals are 95% bootstrap intervals over patients.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from medvl.data import ShardSource, check_against, swap_laterality
from medvl.errors import ConfigError, EvaluationError, MedvlError
from medvl.eval import bootstrap, open_for_evaluation, question_data
from medvl.models import DualEncoder, FusionModel, System, load, train_manifests
from medvl.schema import Batch, Inputs


def main() -> None:
    """Parse the command line and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="checkpoint of a dual-encoder or a fusion-encoder")
    parser.add_argument("--data", type=Path, required=True, help="shards of pairs that the model was not trained on")
    parser.add_argument("--sections", nargs="*", default=[], help="sections of the text; default the whole text")
    parser.add_argument("--questions", type=Path, help="shards with the questions of --predictions")
    parser.add_argument("--predictions", type=Path, help="predictions.jsonl of `medvl eval vqa`")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    if (options.questions is None) != (options.predictions is None):
        parser.error("give --questions and --predictions together")
    model = load(options.checkpoint).to(options.device)
    source = ShardSource(options.data)
    for training in train_manifests(options.checkpoint):
        if training.salt == source.manifest.salt:
            check_against(training, source.manifest)  # refuses patients of its training data
    above, patients = compare(model, source, options.sections, options.batch, options.workers)
    print(f"{model.name}: true text above its mirror {interval(above, patients)} of {len(above)} pairs")
    if options.questions is not None:
        for name, (credit, images) in answers(options.questions, options.predictions).items():
            print(f"{name}: accuracy {interval(credit, images)} of {len(credit)} questions")


@torch.no_grad()
def compare(
    model: System, source: ShardSource, sections: Sequence[str], batch: int = 64, workers: int = 0
) -> tuple[list[float], list[str]]:
    """Return 1, 0 or, for a tie, 1/2 for each pair whose text names a side, and the patients of these pairs.

    Raises ConfigError if the model scores no pairs, EvaluationError if no text names a side.
    """
    patient = {source.key(place): source.sample(place).patient for place in range(len(source))}
    loader = open_for_evaluation(
        source,
        model.transform,
        model.tokenizer,
        batch=batch,
        workers=workers,
        sections=sections,
        inputs=Inputs(mirrored_text=True),
    )
    above: list[float] = []
    patients: list[str] = []
    for part in loader:
        difference_B = torch.subtract(*score_pairs(model, part.to(model.device))).cpu()
        assert part.has_mirror_B is not None
        named_K = part.has_mirror_B.nonzero().squeeze(1).tolist()
        above += [(float(difference_B[row].sign()) + 1) / 2 for row in named_K]
        patients += [patient[part.keys[row]] for row in named_K]
    if not above:
        raise EvaluationError(f"no text of {source.folder} names a side; choose other --sections", "empty")
    return above, patients


def score_pairs(model: System, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the scores (B,) of each image with its text, and with the mirrored text."""
    assert batch.mirrored_ids_BT is not None
    assert batch.mirrored_mask_BT is not None
    texts = (batch.ids_BT, batch.mask_BT), (batch.mirrored_ids_BT, batch.mirrored_mask_BT)
    if isinstance(model, FusionModel):
        image = model.image_tokens(model.image_input_of(batch), batch.has_image_B)
        logits = [model.match(model.text_tokens(*text), image).float() for text in texts]
        true_B, mirror_B = (logits_B2[:, 1] - logits_B2[:, 0] for logits_B2 in logits)
    elif isinstance(model, DualEncoder):
        images = model.embed_images(batch.image_BCHW)
        true_B, mirror_B = (model.similarity(images, model.embed_ids(*text)).diagonal() for text in texts)
    else:
        raise ConfigError(f"{model.name} scores no pairs: give a dual-encoder or a fusion-encoder", "unsupported")
    return true_B, mirror_B


def answers(questions: Path, predictions: Path) -> dict[str, tuple[list[float], list[str]]]:
    """Return the credits and the images of the predicted questions that name a side, and of the others."""
    data = question_data([ShardSource(questions)])
    rows = map(json.loads, predictions.read_text(encoding="utf-8").splitlines())
    credit = {str(row["id"]): float(row["model_credit"]) for row in rows}
    found: dict[str, tuple[list[float], list[str]]] = {"questions of sides": ([], []), "other questions": ([], [])}
    for question, image in zip(data.questions, data.groups, strict=True):
        if question.id in credit:
            text = f"{question.question} {question.answer}"
            credits, images = found["questions of sides" if swap_laterality(text) != text else "other questions"]
            credits.append(credit[question.id])
            images.append(image)
    if not any(credits for credits, _ in found.values()):
        raise EvaluationError(f"{predictions} has no question of {questions}", "mismatch", field="questions")
    return {name: part for name, part in found.items() if part[0]}


def interval(values: Sequence[float], groups: Sequence[str]) -> str:
    """Return the mean with its 95% interval."""
    value_N = np.array(values)
    result = bootstrap(
        lambda counts_NR: (value_N @ counts_NR / counts_NR.sum(axis=0))[:, None], len(value_N), groups=groups
    )
    return f"{result.value_K[0]:.3f} [{result.low_K[0]:.3f}, {result.high_K[0]:.3f}]"


if __name__ == "__main__":
    try:
        main()
    except MedvlError as error:
        sys.exit(f"error: {error}")
