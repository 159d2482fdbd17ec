"""Likelihood of the references by the model that writes the reports: what their perplexity is of.

Each token is predicted from the images, the prompt and the true tokens before it. The same text
behind images and prompt of another patient is a baseline: a model whose perplexity is equal for
both does not read them.

References are cut at the length of the model's texts, as in training, and their tokens, words and
bytes are counted after that.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.data.reports.sentences import join_texts
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.text import REPORT_SECTIONS, choose_sections
from medvl.eval.report_generation.generate import ImageLoader
from medvl.eval.report_generation.metrics import words
from medvl.eval.report_generation.protocol import GeneratedReport, other_patients
from medvl.models.base import evaluating
from medvl.models.fusion_encoders.parts.encoder import Tokens
from medvl.models.report_generators.base import IGNORED, ReportGenerator
from medvl.models.report_generators.cxrmate import CXRMate
from medvl.schema import Batch


@torch.no_grad()
def add_likelihoods(
    model: nn.Module,
    loader: ImageLoader,
    reports: Sequence[GeneratedReport],
    sections: Sequence[str],
) -> list[GeneratedReport]:
    """Return reports with the likelihoods of their references.

    Reports stay as they are where the system gives none (MedViLL), where CXRMate writes two
    sections and only one is evaluated, and where an image cannot be read.
    """
    both = isinstance(model, CXRMate) and model.config.sections
    if not isinstance(model, ReportGenerator) or (both and {*sections} != {*REPORT_SECTIONS}):
        return list(reports)
    # A tokenizer that was given as an object may write longer texts than the model's.
    longest = int(model.config.max_tokens)
    tokenizer = model.require_tokenizer("the likelihood of references").with_max_tokens(longest)
    samples = {}
    for position in range(len(loader.source)):
        sample = loader.source.sample(position)
        samples[sample.key] = sample
    likelihood_of: dict[str, dict[str, float]] = {}
    with evaluating(model):
        for batch in loader:
            rows = [samples[key] for key in batch.keys]
            texts = [
                [sample.sections.get(name, "") for name in REPORT_SECTIONS]
                if both
                else [join_texts(choose_sections(sample.sections, sections))]
                for sample in rows
            ]
            batch = _with_texts(batch, tokenizer, *zip(*texts, strict=True)).to(model.device)
            patients = {sample.key: sample.patient for sample in rows}
            likelihood_of |= _likelihoods(model, batch, patients)
    return [
        dataclasses.replace(report, likelihood=likelihood_of.get(report.key)) for report in reports
    ]


def _likelihoods(
    model: ReportGenerator, batch: Batch, patients: Mapping[str, str]
) -> dict[str, dict[str, float]]:
    row_K = model.trained_rows(batch)
    if not len(row_K):
        return {}
    kept = batch.rows(row_K.tolist())
    ids_BT, target_BT = model.words_and_targets(kept)
    known_BT = target_BT != IGNORED
    prefix = model.read(kept)
    losses = {"loss": _losses(model, ids_BT, target_BT, prefix)}
    other = other_patients([patients[key] for key in kept.keys])
    if other is not None:
        other_B = torch.tensor(other, device=model.device)
        losses["loss_of_other_image"] = _losses(model, ids_BT, target_BT, prefix.rows(other_B))
    texts = model.texts_of(target_BT.masked_fill(~known_BT, 0), known_BT)
    tokens_B = known_BT.sum(dim=1).tolist()
    return {
        key: {
            "tokens": float(tokens_B[row]),
            "words": float(len(words(text))),
            "bytes": float(len(text.encode())),
            **{name: float(loss_B[row]) for name, loss_B in losses.items()},
        }
        for row, (key, text) in enumerate(zip(kept.keys, texts, strict=True))
    }


def _losses(model: ReportGenerator, ids_BT: Tensor, target_BT: Tensor, image: Tokens) -> Tensor:
    """(B,): sum of the cross-entropies of the targets of each row, in nats."""
    scores_BVT = model.score_targets(ids_BT, image).float().transpose(1, 2)
    loss_BT = F.cross_entropy(scores_BVT, target_BT, ignore_index=IGNORED, reduction="none")
    return loss_BT.sum(dim=1).cpu()


def _with_texts(
    batch: Batch,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    second_texts: Sequence[str] | None = None,
) -> Batch:
    """Return a batch with other texts, and second ones."""
    ids_BT, mask_BT = tokenizer(list(texts))
    has_text_B = torch.tensor([bool(words(text)) for text in texts])
    batch = dataclasses.replace(batch, ids_BT=ids_BT, mask_BT=mask_BT, has_text_B=has_text_B)
    if second_texts is None:
        return batch
    ids_BT, mask_BT = tokenizer(list(second_texts))
    has_text_B = torch.tensor([bool(words(text)) for text in second_texts])
    return dataclasses.replace(
        batch, second_ids_BT=ids_BT, second_mask_BT=mask_BT, has_second_text_B=has_text_B
    )
