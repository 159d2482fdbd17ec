"""Models of the server: their abilities, and their results as JSON values.

All methods but `prepare` run in the one thread of `medvl.serve.engine`.
"""

import asyncio
import base64
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from medvl.common.label_names import match_labels
from medvl.data.images.codecs import encode_jpeg, resize_short_side
from medvl.data.reports.sentences import join_texts
from medvl.data.shards.source import ShardSource
from medvl.errors import ConfigError, EvaluationError, ImageError, MedvlError, ShardError
from medvl.eval.core.open import resolve_device
from medvl.eval.grounding.heatmaps import has_volume_patches
from medvl.eval.report_generation.generate import ReportWriter, decode_texts
from medvl.eval.zero_shot_classification.calibration import (
    NOT_MADE,
    Calibration,
    FindingCalibration,
    calibration_for,
    describe_calibration,
)
from medvl.eval.zero_shot_classification.prompts import (
    COMPETING,
    ClassPrompts,
    PromptSet,
    load_prompts,
)
from medvl.inference.answers import CAN_ANSWER, CAN_WRITE, Scorer, encode_images, heatmap
from medvl.inference.models import make_batch, open_model, refuse
from medvl.inference.volumes import reads_volumes
from medvl.models import VQA, DualEncoder
from medvl.models.base import System, evaluating
from medvl.models.checkpoint_folder import find_checkpoint, kind_of
from medvl.models.text_decoding import Decoding
from medvl.schema import Embeddings
from medvl.serve.volumes import volume_map

Encoded = Embeddings | torch.Tensor
"""One encoded image: embeddings of one row, or (1, L) probabilities of a classifier."""
_MAP_SIDE = 256
_PLACES = (
    ("upper left", "upper middle", "upper right"),
    ("left", "middle", "right"),
    ("lower left", "lower middle", "lower right"),
)


class ServedModel:
    """A served model with its prompts and calibration.

    Args:
        title: name on the page.
        model: in eval mode.
        prompts: findings that the page offers.
        calibration: calibration of the model for these prompts, or None.
        uncalibrated: reason for a missing calibration.

    Attributes:
        reads: "image" or "volume".
        is_demo: whether the model is the checkpoint `demo` of the package.
        all_tokens: whether it compares each organ with all patches, in place of those of a mask.
        abilities: whether the model supports scores, heatmap, answer, report and neighbors.
    """

    def __init__(
        self,
        title: str,
        model: System,
        prompts: PromptSet,
        calibration: Calibration | None = None,
        uncalibrated: str = NOT_MADE,
    ) -> None:
        self.title = title
        self.model = model
        self.prompts = prompts
        self.calibration = calibration
        self._uncalibrated = uncalibrated
        self.is_demo = False
        self.all_tokens = False
        self._scorer: Scorer | None = None
        self.reads = "volume" if reads_volumes(model) else "image"
        of_images = self.reads == "image"
        self.abilities = {
            "scores": self._can(self._prepare_scorer),
            "heatmap": self._can(lambda: self.heatmap(_BLACK, "opacity"))
            if of_images
            else has_volume_patches(model),
            "answer": isinstance(model, VQA)
            and model.tokenizer is not None
            and not model.config.earlier_image,
            "report": self._can(lambda: self.report(_BLACK, max_tokens=2)),
            "neighbors": isinstance(model, DualEncoder) and of_images,
        }

    @classmethod
    def open(
        cls,
        source: str | Path,
        prompts: PromptSet | None,
        device: str = "auto",
        calibration: Path | None = None,
        *,
        all_tokens: bool = False,
    ) -> "ServedModel":
        """Load what `medvl.load` takes, with its calibration: the given file, else that beside the
        checkpoint. Without prompts, those of CT-CLIP for volumes and of CheXpert for images.
        With `all_tokens`, a model that reads masks of organs compares each organ with all patches.

        Raises CheckpointError, ConfigError for a model of precomputed regions or, without
        `all_tokens`, of volumes with masks of organs, EvaluationError for a damaged calibration.
        """
        model = open_model(source).to(resolve_device(device))
        reads_organs = getattr(model.transform, "organs", False)
        if reads_organs:
            if not all_tokens:
                raise ConfigError(
                    f"{model.name} reads masks of organs, which uploads do not have; use `medvl "
                    "infer --organ-masks FOLDER`, or --all-tokens to read all of a volume for each "
                    "organ, which it was not trained on",
                    "unsupported",
                    field="checkpoint",
                )
            transform: Any = model.transform
            model.transform = dataclasses.replace(transform, organs=False)
        if prompts is None:
            prompts = load_prompts("ct_clip" if reads_volumes(model) else "chexpert_ensemble")
        checkpoint = find_checkpoint(source)
        folder = Path(source)
        kind = kind_of(source)
        title = str(source)
        if kind == "folder":
            title = (folder if checkpoint != folder else folder.absolute().parent).resolve().name
        found: Calibration | None = None
        reason = "only scores by prompts are calibrated"
        if isinstance(model, DualEncoder):
            own = Path(source) if kind == "demo" else checkpoint
            found, reason = calibration_for(own, prompts, calibration)
        served = cls(title, model, prompts, found, reason)
        served.is_demo = kind == "demo"
        served.all_tokens = reads_organs
        return served

    def describe(self) -> dict[str, Any]:
        """Return title, system, abilities and the state of the calibration."""
        calibration = self.calibration
        state = self._uncalibrated if calibration is None else describe_calibration(calibration)
        return {
            "title": self.title,
            "system": self.model.name,
            "abilities": self.abilities,
            "calibrated": calibration is not None and bool(calibration.findings),
            "calibration": state,
        }

    def prepare(self, pixels: Any) -> torch.Tensor:
        """Return (1, C, H, W) uint8 on the CPU, of a volume (1, 1, D, H, W) int16: an image as the
        model takes it. Any thread may call this.
        """
        image_1CHW: torch.Tensor = self.model.transform(pixels)
        return image_1CHW

    def encode(self, image_BCHW: torch.Tensor) -> list[Encoded]:
        """Return images from `prepare`, encoded in one forward pass: what `scores` and `embedding`
        take, one by one.

        Raises ConfigError for a model that does neither.
        """
        encoded = encode_images(self.model, image_BCHW)
        if isinstance(encoded, torch.Tensor):
            return list(encoded.split(1))
        parts = {field.name: getattr(encoded, field.name) for field in dataclasses.fields(encoded)}
        rows = {name: part.split(1) for name, part in parts.items() if part is not None}
        return [
            Embeddings(**{name: part[index] for name, part in rows.items()})
            for index in range(len(encoded))
        ]

    def scores(self, image: Encoded, texts: Sequence[str]) -> list[dict[str, Any]]:
        """Return the score of each text, or of all findings, in an encoded image, as `medvl.infer`.

        `score` is the model's own value; `probability` is calibrated, None if there is no
        calibration: also for some of the classes of prompts that compete with each other, whose
        calibration belongs to all of them. `uncalibrated` is the reason why the calibration leaves
        a finding out, else None.

        Raises EvaluationError for texts that the prompts cannot score
        (`medvl.inference.prompts_for`).
        """
        findings = self._prepare_scorer()
        known = {
            text: name
            for text in texts
            for name in match_labels(findings.names, [text], synonyms=False)
        }
        names = list(dict.fromkeys(known.get(text, text) for text in texts)) or list(findings.names)
        whole = self.prompts.scoring not in COMPETING or {*names} == {*findings.names}
        own = [name for name in names if not whole or name not in findings.names]
        scorers = [findings] * (len(own) < len(names))
        scorers += [Scorer(self.model, own, prompts=self.prompts)] if own else []
        scores: dict[str, float] = {}
        sentences: dict[str, ClassPrompts] = {}
        for scorer in scorers:
            scores |= zip(scorer.names, scorer.scored(image)[0].tolist(), strict=True)
            sentences |= scorer.sentences
        fitted = self.calibration.findings if self.calibration is not None and whole else {}
        # not of free texts, whose sentences are others
        given = {name: fitted.get(name) for name in findings.names}
        reasons = self.calibration.left_out if self.calibration is not None else {}
        return [
            {
                **_scored(name, scores[name], sentences.get(name), given.get(name)),
                "uncalibrated": reasons.get(name),
            }
            for name in names
        ]

    def heatmap(self, pixels: Any, text: str) -> dict[str, Any]:
        """Return the map of a text over the image: uint8 in base64, 0 outside of the model's crop,
        1 low to 255 high.

        Color begins at the mean of the map, as on the pages of `medvl eval grounding`. Of a
        volume, see `medvl.serve.volumes.volume_map`.
        """
        if self.reads == "volume":
            return volume_map(self.model, pixels, text)
        full_HW = heatmap(self.model, pixels, text)
        height, width = (
            max(1, round(side * min(1.0, _MAP_SIDE / max(full_HW.shape)))) for side in full_HW.shape
        )
        rows, columns = (
            ((np.arange(count) + 0.5) * side / count).astype(int)
            for count, side in zip((height, width), full_HW.shape, strict=True)
        )
        map_HW = full_HW[np.ix_(rows, columns)].astype(np.float64)
        seen_HW = np.isfinite(map_HW)
        if not seen_HW.any():
            raise EvaluationError("the model's crop shows nothing of the image", "empty")
        low, high, mean = (
            float(function(map_HW[seen_HW])) for function in (np.min, np.max, np.mean)
        )
        heat_HW = np.where(seen_HW, np.clip((map_HW - mean) / max(high - mean, 1e-12), 0, 1), 0)
        row, column = np.unravel_index(
            int(np.where(seen_HW, map_HW, -np.inf).argmax()), map_HW.shape
        )
        peak = (float(column + 0.5) / width, float(row + 0.5) / height)
        codes_HW = np.where(seen_HW, 1 + np.rint(254 * heat_HW), 0).astype(np.uint8)
        return {
            "height": height,
            "width": width,
            "map": base64.b64encode(codes_HW.tobytes()).decode(),
            "low": low,
            "mean": mean,
            "high": high,
            "peak": peak,
            "place": _PLACES[min(2, int(3 * peak[1]))][min(2, int(3 * peak[0]))],
        }

    def answer(self, pixels: np.ndarray, question: str) -> dict[str, Any]:
        """Return the answer to a question, as `medvl.answer`, and the model's own probability of
        it.
        """
        if not isinstance(self.model, VQA):
            raise refuse(self.model, "answer questions", CAN_ANSWER)
        with evaluating(self.model):
            predicted = self.model.predict(make_batch(self.model, self._input(pixels), [question]))
        return {"answer": predicted.answers[0], "score": float(predicted.score_B[0])}

    def report(self, pixels: np.ndarray, max_tokens: int | None = None) -> dict[str, Any]:
        """Return a report by greedy search, as `medvl.write_report`, and whether it ended by
        itself.
        """
        model = self.model
        if not isinstance(model, ReportWriter) or model.tokenizer is None:
            raise refuse(self.model, "write reports", CAN_WRITE)
        batch = make_batch(self.model, self._input(pixels))
        with evaluating(self.model):
            text, ended = decode_texts(
                model, model.tokenizer, batch, Decoding(max_tokens=max_tokens)
            )[0]
        return {"report": text, "ended": ended}

    def embed(self, images: Sequence[np.ndarray]) -> torch.Tensor:
        """Return (N, E): normalised embeddings of images, on the CPU."""
        if not isinstance(self.model, DualEncoder):
            raise refuse(self.model, "embed images alone", "use a dual-encoder")
        with evaluating(self.model):
            return F.normalize(
                self.model.embed_images(self._input(images)).global_NE.float(), dim=1
            ).cpu()

    def embedding(self, image: Encoded) -> torch.Tensor:
        """Return (1, E): the normalised embedding of an encoded image, on the CPU."""
        if not isinstance(image, Embeddings):
            raise refuse(self.model, "embed images alone", "use a dual-encoder")
        return F.normalize(image.global_NE.float(), dim=1).cpu()

    def _input(self, images: np.ndarray | Sequence[np.ndarray]) -> torch.Tensor:
        image_BCHW: torch.Tensor = self.model.transform(images).to(self.model.device)
        return image_BCHW

    def _prepare_scorer(self) -> Scorer:
        """Return the scorer of all findings, whose sentences are encoded once."""
        if self._scorer is None:
            self._scorer = Scorer(self.model, prompts=self.prompts)
        return self._scorer

    def _can(self, run: Callable[[], Any]) -> bool:
        try:
            run()
        except MedvlError:
            return False
        return True


_BLACK = np.zeros((64, 64), np.uint8)


def _scored(
    text: str, score: float, sentences: ClassPrompts | None, fitted: FindingCalibration | None
) -> dict[str, Any]:
    """Return a text's score with its calibration and its sentences, as JSON values."""
    return {
        "text": text,
        "score": score,
        "probability": None if fitted is None else fitted.probability(score),
        "images": None if fitted is None else fitted.images,
        "positives": None if fitted is None else fitted.positives,
        "positive": [] if sentences is None else list(sentences.positive),
        "negative": [] if sentences is None else list(sentences.negative),
    }


async def each_model(
    models: Sequence[ServedModel], run: Callable[[ServedModel], Awaitable[Any]]
) -> list[Mapping[str, Any]]:
    """Return the result or the error of every model, so that the failure of one does not hide
    the other's result.
    """

    async def one(served: ServedModel) -> Mapping[str, Any]:
        try:
            return {"title": served.title, "result": await run(served)}
        except MedvlError as error:
            return {"title": served.title, "error": {"code": error.code, "message": str(error)}}

    return list(await asyncio.gather(*(one(served) for served in models)))


# Nearest neighbours of an image among the images of shards, by the embeddings of each model.

_BATCH = 32
_THUMBNAIL = 160
_TEXT = 400


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Gallery:
    """Embeddings of the images of shards, by the title of the model."""

    source: ShardSource
    positions: np.ndarray
    """Position of each embedded image in the source."""
    embeddings: tuple[torch.Tensor | None, ...]
    """(N, E) for each model that embeds images, None for others."""

    @classmethod
    def build(cls, shards: Path, models: Sequence[ServedModel], limit: int) -> "Gallery":
        """Embed at most `limit` images, evenly spread over the shards. Images that cannot be read
        are left out.

        Raises ShardError for damaged shards, ConfigError where no model or no image can be
        embedded.
        """
        source = ShardSource(shards)
        able = [served.abilities["neighbors"] for served in models]
        if not any(able):
            message = (
                "no checkpoint embeds images alone; give that of a dual-encoder, or leave "
                "the gallery out"
            )
            raise ConfigError(message, "unsupported", field="gallery")
        places = np.linspace(0, len(source) - 1, min(limit, len(source))).round().astype(int)
        positions: list[int] = []
        parts: list[list[torch.Tensor]] = [[] for _ in models]
        for start in tqdm(
            range(0, len(places), _BATCH), desc="gallery", unit="batch", disable=None
        ):
            images = []
            for position in places[start : start + _BATCH].tolist():
                try:
                    images.append(source.pixels(position))
                except (ImageError, ShardError):
                    continue
                positions.append(position)
            for served, embeds, part in zip(models, able, parts, strict=True):
                if embeds and images:
                    part.append(served.embed(images))
        if not positions:
            raise ConfigError(f"{shards} has no image that can be read", "empty", field="gallery")
        embeddings = tuple(torch.cat(part) if part else None for part in parts)
        return cls(source=source, positions=np.array(positions), embeddings=embeddings)

    def __len__(self) -> int:
        return len(self.positions)

    def neighbors(self, model: int, image_1E: torch.Tensor, count: int = 6) -> list[dict[str, Any]]:
        """Return the most similar images with a thumbnail, their labels and the beginning of
        their text.
        """
        gallery_NE = self.embeddings[model]
        if gallery_NE is None:
            raise ConfigError(
                "this model does not embed images alone", "unsupported", field="neighbors"
            )
        cosine_N = (gallery_NE @ image_1E.T)[:, 0]
        best = cosine_N.topk(min(count, len(cosine_N)))
        pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        return [self._card(cosine, int(self.positions[index])) for cosine, index in pairs]

    def _card(self, cosine: float, position: int) -> dict[str, Any]:
        sample = self.source.sample(position)
        pixels = self.source.pixels(position)
        text = join_texts(sample.sections.values())
        jpeg = encode_jpeg(resize_short_side(pixels, _THUMBNAIL), 85)
        return {
            "cosine": cosine,
            "position": position,
            "labels": [name for name, value in sample.labels.items() if value == 1],
            "view": sample.view,
            "text": text[:_TEXT] + ("…" if len(text) > _TEXT else ""),
            "image": "data:image/jpeg;base64," + base64.b64encode(jpeg).decode(),
        }
