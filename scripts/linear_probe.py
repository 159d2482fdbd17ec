"""What labels alone would give: a logistic regression for each finding on the frozen image features of a checkpoint.

    python scripts/linear_probe.py --checkpoint runs/convirt/best --train shards/train --valid shards/validate \\
        --test shards/test

This is the ceiling of the checkpoint's zero-shot scores: the same images through the same encoder, but judged by a
classifier that was fitted to the training labels instead of by sentences. The strength of the penalty is chosen on the
validation images. AUROC with intervals bootstrapped over patients.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import medvl
from medvl.data.loader import open_loader
from medvl.data.shards import ShardSource
from medvl.data.splits import check_disjoint
from medvl.data.text import WholeText
from medvl.errors import MedvlError
from medvl.eval import LabelPolicy, bootstrap_auroc
from medvl.schema import COMPETITION_FINDINGS
from medvl.train.validate import evaluating

PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)


def main() -> None:
    """Encode once, fit, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--train", type=Path, required=True, help="folder of shards to fit on")
    parser.add_argument("--valid", type=Path, required=True, help="folder of shards to choose the penalty on")
    parser.add_argument("--test", type=Path, required=True, help="folder of shards to judge on")
    options = parser.parse_args()
    model = medvl.load(options.checkpoint)
    sources = {
        "train": ShardSource(options.train),
        "valid": ShardSource(options.valid),
        "test": ShardSource(options.test),
    }
    check_disjoint({name: source.manifest.patients for name, source in sources.items()}, "the data of the probe")
    train, valid, test = (Features(model, source) for source in sources.values())
    mean_D, std_D = train.x_ND.mean(dim=0), train.x_ND.std(dim=0) + 1e-6
    for features in (train, valid, test):
        features.x_ND = (features.x_ND - mean_D) / std_D
    probes = [fit(train.x_ND, train.y_NL, penalty) for penalty in PENALTIES]
    worth = [float(np.nanmean(bootstrap_auroc(valid.scores(probe), valid.y_NL, resamples=0)[0])) for probe in probes]
    best = int(np.argmax(worth))
    print(f"{len(train.y_NL)} images to fit, {len(test.y_NL)} to judge; penalty {PENALTIES[best]:g}")
    report(test, test.scores(probes[best]))


class Features:
    """Image features and labels of a folder of shards."""

    def __init__(self, model: Any, source: ShardSource) -> None:
        loader = open_loader(
            source,
            batch=128,
            image=model.transform,
            text=WholeText(),
            tokenizer=model.tokenizer,
            train=False,
            max_skipped=0,
        )
        with evaluating(model):
            batches = [(model.image_encoder(batch.image_BCHW).pooled_BD.float(), batch.labels_BL) for batch in loader]
        self.x_ND = torch.cat([features for features, _ in batches])
        self.names = source.label_names
        self.y_NL = LabelPolicy().resolve(torch.cat([labels for _, labels in batches]).numpy(), self.names).labels_NL
        self.patients = [source.sample(position).patient for position in range(len(source))]

    def scores(self, probe: tuple[Tensor, Tensor]) -> np.ndarray:
        """Logits (N, L)."""
        weight_LD, bias_L = probe
        return F.linear(self.x_ND, weight_LD, bias_L).numpy()


def fit(x_ND: Tensor, y_NL: np.ndarray, penalty: float) -> tuple[Tensor, Tensor]:
    """Weights and biases of one logistic regression a label, by L-BFGS; labels of NaN are left out."""
    known_NL = torch.from_numpy(~np.isnan(y_NL))
    target_NL = torch.from_numpy(np.nan_to_num(y_NL)).float()
    weight_LD = torch.zeros(y_NL.shape[1], x_ND.shape[1], requires_grad=True)
    bias_L = torch.zeros(y_NL.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weight_LD, bias_L], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss_NL = F.binary_cross_entropy_with_logits(F.linear(x_ND, weight_LD, bias_L), target_NL, reduction="none")
        loss = ((loss_NL * known_NL).sum(dim=0) / known_NL.sum(dim=0)).sum() + penalty / 2 * weight_LD.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return weight_LD.detach(), bias_L.detach()


def report(test: Features, scores_NL: np.ndarray) -> None:
    """AUROC a finding, and the mean over the five of the CheXpert competition where they are there."""
    auroc_L, low_L, high_L = bootstrap_auroc(scores_NL, test.y_NL, groups=test.patients)
    for name, auroc, low, high in zip(test.names, auroc_L, low_L, high_L, strict=True):
        print(f"{name:28s} {auroc:.3f} [{low:.3f}, {high:.3f}]")
    columns = [test.names.index(name) for name in COMPETITION_FINDINGS if name in test.names]
    if columns:
        print(f"{'mean of the five':28s} {auroc_L[columns].mean():.3f}")


if __name__ == "__main__":
    try:
        main()
    except MedvlError as error:
        sys.exit(f"error: {error}")
