"""Recipes that train autoencoders of images and latent diffusion models: settings, loaders of
images alone, of images with texts or of their latents, and preparation.
"""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from medvl.common.files import new_folder, wait_for
from medvl.common.ranks import check_ranks, rank_and_world
from medvl.common.seeding import seeded
from medvl.data.loading.items import SkippedSample
from medvl.data.loading.loader import Loader, check_settings
from medvl.data.loading.sampler import batch_sampler
from medvl.data.loading.sources import has_color, select_samples
from medvl.data.transforms.image import ConVIRTAugmentation, EvalTransform, RandomCrop
from medvl.data.transforms.text import WholeText
from medvl.errors import ShardError
from medvl.models.image_generation.autoencoder import AutoencoderConfig
from medvl.models.image_generation.latent_diffusion import LatentDiffusionConfig
from medvl.schema import Batch
from medvl.train.config import OptimConfig, TrainConfig
from medvl.train.parallel.distributed import choose_device
from medvl.train.recipe import data_advice
from medvl.train.tasks.pretraining import (
    DataLoaders,
    LoaderConfig,
    check_tokenizer,
    describe,
    open_split,
    open_train,
    open_valid,
)

if TYPE_CHECKING:
    from medvl.train.run import Run

_log = logging.getLogger(__name__)
_HALF_LIMIT = 60_000.0
_MIN_CHARACTERS = 7
"""Samples with shorter texts are left out."""
_SCALE_IMAGES = 2_048
"""Images on which the scale of latents is measured."""
_CACHE_WAIT_SECONDS = 24 * 3600.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ImageDataConfig(LoaderConfig):
    """Shards, views and transform for training on images."""

    views: tuple[str, ...] = ()
    """Views to read, such as PA and AP; empty reads all images."""
    image: ConVIRTAugmentation | EvalTransform | RandomCrop
    """Transform of the training images; validation uses the model's own."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GenerationDataConfig(LoaderConfig):
    """Shards, views and texts for training an image generator."""

    views: tuple[str, ...] = ()
    """Views to read, such as PA and AP; empty reads all images."""
    tokenizer: Path | None = None
    """Folder of a tokenizer; None: the tokenizer of the checkpoints that the run starts from, or of
    the text encoder.
    """
    text: WholeText = dataclasses.field(
        default_factory=lambda: WholeText(sections=("impression",), missing="no_text")
    )
    cache: Path | None = None
    """Folder for latents and states of frozen text encoders, computed once before the first step
    and read again by later runs with the same parts and data. They need 2 bytes per value. None
    encodes each batch again.
    """

    def inputs(self) -> Iterator[tuple[str, Path, str]]:
        """Yield (field, folder, file that it must contain) of the folders that the run reads."""
        yield from LoaderConfig.inputs(self)
        if self.tokenizer is not None:
            yield "tokenizer", self.tokenizer, "tokenizer.json"


def open_images(data: ImageDataConfig, model: Any, micro_batch: int) -> DataLoaders:
    """Open the loaders of a run on images alone for this rank.

    Raises ShardError where a folder is damaged, SplitError where training and validation share a
    patient, ConfigError where no image has one of the views.
    """
    from medvl.data.loading.sources import no_text

    train, valid = open_split(data)
    options: dict[str, Any] = {"tokenizer": no_text, "text": WholeText()}
    entries = describe(train.manifest, None if valid is None else valid.manifest, **_chosen(data))
    loader = open_train(
        data, select_samples(train, data.views), micro_batch, image=data.image, **options
    )
    if valid is None:
        return DataLoaders(loader, None, None, entries)
    samples = select_samples(valid, data.views)
    losses = open_valid(data, samples, image=model.transform, keep_imageless=False, **options)
    images = open_valid(data, samples, shared=False, image=model.transform, **options)
    return DataLoaders(loader, losses, images, entries)


def open_generation(
    data: GenerationDataConfig,
    model: Any,
    micro_batch: int,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> DataLoaders:
    """Open the loaders of a latent diffusion run for this rank, and measure the latents' scale
    where it is not known.

    With `data.cache`, rank 0 encodes what is not in the cache yet while the others wait, on a GPU
    unless `device` is "cpu".

    Raises ShardError, SplitError and ConfigError as `open_images`.
    """
    check_tokenizer(model)
    train, valid = open_split(data)
    entries = describe(train.manifest, None if valid is None else valid.manifest, **_chosen(data))
    sources = [None if source is None else _with_texts(source, data) for source in (train, valid)]
    if data.cache is None:
        _measure_scale(data, sources[0], model)
        options: dict[str, Any] = {
            "tokenizer": model.tokenizer,
            "text": data.text,
            "image": model.transform,
        }
        losses = (
            None if valid is None else open_valid(data, sources[1], keep_imageless=False, **options)
        )
        return DataLoaders(
            open_train(data, sources[0], micro_batch, **options), losses, None, entries
        )
    caches = [
        None if source is None else open_cache(data, source, model, device) for source in sources
    ]
    assert caches[0] is not None
    model.measure_scale(
        torch.from_numpy(caches[0].arrays["moments"][:_SCALE_IMAGES].astype(np.float32))
    )
    loader = open_latent_loader(caches[0], batch=micro_batch, train=True, seed=data.seed)
    if caches[1] is None:
        return DataLoaders(loader, None, None, entries)
    losses = open_latent_loader(caches[1], batch=data.valid_batch, train=False, seed=data.seed)
    return DataLoaders(loader, losses, None, entries)


def open_cache(
    data: GenerationDataConfig,
    source: Any,
    model: Any,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> Any:
    """Return the cache of a source's latents and texts; it is computed where `data.cache` does
    not have it yet.
    """
    assert data.cache is not None
    folder = data.cache / _cache_key(data, source, model)
    if rank_and_world()[0] != 0:
        wait_for(folder, _CACHE_WAIT_SECONDS)
    elif not folder.exists():
        data.cache.mkdir(parents=True, exist_ok=True)
        _log.info("encoding %d images and their texts into %s", len(source), folder)
        with new_folder(folder) as new:
            _encode(data, source, model.to(choose_device(device, 0)), new)
            model.to("cpu")
    return LatentCache(folder)


def _chosen(data: Any) -> dict[str, Any]:
    return {"views": list(data.views)} if data.views else {}


def _with_texts(source: Any, data: GenerationDataConfig) -> Any:
    return select_samples(source, data.views, data.text, _MIN_CHARACTERS)


def _cache_key(data: GenerationDataConfig, source: Any, model: Any) -> str:
    """Return a hash of all inputs that determine the content of a cache."""
    parts = (
        [model.autoencoder] if model.config.train_text else [model.autoencoder, model.text_encoder]
    )
    digest = hashlib.sha256()
    settings = [
        source.fingerprint,
        model.transform.settings(),
        repr(data.text),
        model.config.max_tokens,
    ]
    settings += [
        model.config.text_mask,
        model.config.train_text,
        sorted(model.tokenizer.vocabulary.items()),
    ]
    settings.append(has_color(source))
    digest.update(json.dumps(settings, sort_keys=True).encode())
    for part in parts:
        for name, tensor in part.state_dict().items():
            digest.update(
                name.encode() + tensor.detach().float().cpu().contiguous().numpy().tobytes()
            )
    return digest.hexdigest()[:32]


@torch.no_grad()
def _encode(data: GenerationDataConfig, source: Any, model: Any, folder: Path) -> None:
    """Write the files of a `LatentCache`, computed on the model's device."""
    device = model.device
    training = model.training
    model.eval()
    loader = open_valid(
        data, source, shared=False, image=model.transform, text=data.text, tokenizer=model.tokenizer
    )
    keys: list[str] = []
    rows: list[int] = []
    texts: dict[str, int] = {}
    moments: Any = None
    for batch in loader:
        values = (
            model.encode_moments(batch.image_BCHW.to(device))
            .float()
            .clamp(-_HALF_LIMIT, _HALF_LIMIT)
        )
        if moments is None:
            shape = (len(source), *values.shape[1:])
            moments = np.lib.format.open_memmap(folder / "moments.npy", "w+", np.float16, shape)
        moments[len(keys) : len(keys) + len(values)] = values.half().cpu().numpy()
        keys += batch.keys
        rows += [texts.setdefault(text, len(texts)) for text in batch.texts]
    moments.flush()
    np.save(folder / "texts.npy", np.array(rows, np.int32))
    (folder / "keys.json").write_text(json.dumps(keys))
    _encode_texts(list(texts), data.valid_batch, model, folder)
    model.train(training)


def _encode_texts(texts: list[str], batch: int, model: Any, folder: Path) -> None:
    """Write the tokens of distinct texts, and their states under a frozen text encoder."""
    ids_UT, mask_UT = model.tokenizer(texts)
    np.save(folder / "ids.npy", ids_UT.int().numpy())
    lengths_U = (
        mask_UT.sum(dim=1)
        if model.config.text_mask
        else torch.full((len(texts),), model.config.max_tokens)
    )
    np.save(folder / "lengths.npy", lengths_U.int().numpy())
    if model.config.train_text:
        np.save(folder / "lengths.npy", mask_UT.sum(dim=1).int().numpy())
        return
    states: Any = None
    for start in range(0, len(texts), batch):
        rows = slice(start, start + batch)
        values, _ = model.encode_text(ids_UT[rows].to(model.device), mask_UT[rows].to(model.device))
        if states is None:
            shape = (len(texts), *values.shape[1:])
            states = np.lib.format.open_memmap(folder / "states.npy", "w+", np.float16, shape)
        states[rows] = values.half().cpu().numpy()
    states.flush()


@torch.no_grad()
def _measure_scale(data: GenerationDataConfig, source: Any, model: Any) -> None:
    """Measure the latents' scale on the first images, where the model needs it."""
    if float(model.latent_scale):
        return
    loader = open_valid(
        data, source, shared=False, image=model.transform, text=data.text, tokenizer=model.tokenizer
    )
    moments = []
    count = 0
    for batch in loader:
        moments.append(model.encode_moments(batch.image_BCHW))
        count += len(batch)
        if count >= _SCALE_IMAGES:
            break
    model.measure_scale(torch.cat(moments))


# Settings and preparation of recipes.


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoencoderRecipe:
    """All settings of a run."""

    model: AutoencoderConfig
    init_from: Path | None = None
    """Checkpoint of an autoencoder of the same sizes to start from."""
    data: ImageDataConfig
    optim: OptimConfig
    train: TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationRecipe:
    """All settings of a run."""

    model: LatentDiffusionConfig
    """Settings of the system; those of its own type are options of the command line."""
    init_from: Path | None = None
    """Checkpoint of a latent diffusion model to start from, such as an imported Stable
    Diffusion.
    """
    random_unet: bool = False
    """Draw the U-Net at random; `init_from` then gives the autoencoder and the text encoder."""
    autoencoder: Path | None = None
    """Checkpoint of the system `autoencoder`, in place of the autoencoder of `init_from`."""
    text_from: Path | None = None
    """Checkpoint with the text encoder to start from, of any system."""
    pretrained: bool
    """Start the text encoder from its published weights."""
    data: GenerationDataConfig
    optim: OptimConfig
    train: TrainConfig


def autoencoder_run(
    name: str, make_data: str, phantom: str = ""
) -> "Callable[[AutoencoderRecipe], Run]":
    """Return the `prepare` function of a recipe; arguments and errors as for
    `medvl.train.pretraining_run`.
    """

    def prepare(recipe: AutoencoderRecipe) -> "Run":
        """Create the model and the loaders."""
        recipe.data.check(data_advice(name, make_data, phantom, recipe.data.own_data))
        from medvl.models import create_model
        from medvl.train.run import Run

        with seeded(recipe.train.seed):
            model = create_model(recipe.model, init_from=recipe.init_from)
        return Run(
            recipe=name,
            settings=recipe,
            model=model,
            data=open_images(recipe.data, model, recipe.train.micro_batch),
        )

    return prepare


def generation_run(
    name: str, make_data: str, phantom: str = ""
) -> "Callable[[GenerationRecipe], Run]":
    """Return the `prepare` function of a recipe; arguments and errors as for
    `medvl.train.pretraining_run`.

    The function also raises CheckpointError where a checkpoint that the run starts from is missing.
    """

    def prepare(recipe: GenerationRecipe) -> "Run":
        """Create the model and the loaders."""
        recipe.data.check(data_advice(name, make_data, phantom, recipe.data.own_data))
        from medvl.models import create_latent_diffusion
        from medvl.train.run import Run

        with seeded(recipe.train.seed):
            model = create_latent_diffusion(
                recipe.model,
                start=recipe.init_from,
                random_unet=recipe.random_unet,
                autoencoder=recipe.autoencoder,
                text=recipe.text_from,
                tokenizer=recipe.data.tokenizer,
                pretrained=recipe.pretrained,
            )
        return Run(
            recipe=name,
            settings=recipe,
            model=model,
            data=open_generation(recipe.data, model, recipe.train.micro_batch, recipe.train.device),
        )

    return prepare


# Loader of latents and text states that frozen networks computed once, in place of images and
# texts.
#
#     CACHE/moments.npy  float16 (N, 2Z, H, W): mean and log variance of each image's latents
#     CACHE/texts.npy    int32 (N,): the row of each image's text in the next files
#     CACHE/ids.npy      int32 (U, T): the tokens of each distinct text
#     CACHE/lengths.npy  int32 (U,): their number
#     CACHE/states.npy   float16 (U, T, D): states of a frozen text encoder; missing where it is
#                        trained
#     CACHE/keys.json    keys of the images
#
# Files are memory-mapped, so a cache may be larger than memory.

FILES = ("moments", "texts", "ids", "lengths", "states")


@dataclasses.dataclass(kw_only=True, slots=True)
class LatentBatch(Batch):
    """A batch with latents in place of pixels: `image_BCHW` is empty."""

    moments_BCHW: Tensor | None = None
    """float32: mean and log variance of the latents, before scaling."""
    states_BTD: Tensor | None = None
    """float32 states of a frozen text encoder; None where it is trained."""


class LatentCache:
    """A folder of latents, memory-mapped; it takes the place of a loader's source.

    Attributes:
        fingerprint: name of the folder, a hash of what it was computed from.
    """

    label_names: Sequence[str] = ()

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fingerprint = folder.name
        try:
            self.keys: list[str] = json.loads((folder / "keys.json").read_text())
            self.arrays: dict[str, Any] = {
                name: np.load(folder / f"{name}.npy", mmap_mode="r")
                for name in FILES
                if name != "states" or (folder / "states.npy").is_file()
            }
        except (OSError, ValueError) as error:
            message = (
                f"{folder} is not a complete cache of latents ({type(error).__name__}); remove it"
            )
            raise ShardError(message, "malformed") from error

    def __len__(self) -> int:
        return len(self.keys)

    def batch(self, positions: Sequence[int]) -> LatentBatch:
        """Return the batch of these images."""
        texts = self.arrays["texts"][positions]
        lengths = torch.from_numpy(self.arrays["lengths"][texts].astype(np.int64))
        longest = int(lengths.max())
        states = self.arrays.get("states")
        return LatentBatch(
            keys=[self.keys[position] for position in positions],
            image_BCHW=torch.empty(len(positions), 0, 0, 0, dtype=torch.uint8),
            ids_BT=torch.from_numpy(self.arrays["ids"][texts, :longest].astype(np.int64)),
            mask_BT=torch.arange(longest) < lengths[:, None],
            labels_BL=torch.empty(len(positions), 0),
            texts=[""] * len(positions),
            moments_BCHW=torch.from_numpy(self.arrays["moments"][positions].astype(np.float32)),
            states_BTD=None
            if states is None
            else torch.from_numpy(states[texts, :longest].astype(np.float32)),
        )

    def collate(self, positions: Sequence[int]) -> tuple[LatentBatch, list[SkippedSample]]:
        """Return the batch of these images; none is skipped."""
        return self.batch(positions), []


class _Positions(Dataset[int]):
    """Positions of a cache, indexed by (epoch, position)."""

    def __getitem__(self, place: tuple[int, int]) -> int:
        return place[1]


def open_latent_loader(
    cache: LatentCache,
    *,
    batch: int,
    train: bool,
    seed: int = 0,
    rank: int | None = None,
    world: int | None = None,
) -> Loader:
    """Open a loader of latents with the order and resuming of `open_loader`; arguments and
    errors as there.
    """
    rank, world = check_ranks(rank, world, train=train)
    check_settings(len(cache), batch, train, world, 0)
    source: Any = cache
    sampler = batch_sampler(source, batch, seed, rank, world, train=train)
    dataset: Any = _Positions()
    return Loader(source, sampler, dataset, cache.collate, workers=0, max_skipped=0, timeout=0)
