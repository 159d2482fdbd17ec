"""CXRMate: a small Llama behind the images of a study, its prior and its context (Nicolson et al.,
arXiv 2307.09758 and 2406.13181).

The architecture is that of CXRMate-RRG24 and CXRMate-ED: tokens of all images as a prefix, and a
decoder of six layers from random weights.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, Unpack

import torch
from torch import Tensor, nn

from medvl.common.config_io import check_choice, check_within
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.operations import Kernel
from medvl.encoders import ImageEncoder, create_image_encoder
from medvl.errors import ConfigError
from medvl.models.base import INIT_STD, EncoderArguments, Parts, stored_features
from medvl.models.fusion_encoders.parts.encoder import Tokens
from medvl.models.fusion_encoders.parts.transformer import Sizes
from medvl.models.registry import register_system
from medvl.models.report_generators.base import (
    IGNORED,
    Prompt,
    ReportConfig,
    ReportGenerator,
    groups_by_part,
)
from medvl.models.report_generators.parts.prefix import (
    PrefixDecoder,
    PrefixState,
    encode_some,
    image_patches,
    insert_images,
    study_images,
)
from medvl.models.text_decoding import Decoding, Generated
from medvl.schema import Batch, Inputs

WORDS = (
    *("image", "section", "no findings", "no impression"),
    *("prior findings", "prior impression"),
    *("indication", "history", "comparison", "technique"),
)
"""Words behind the tokenizer's vocabulary: the image's marker, what divides findings and
impression, what stands for a missing one, and the headings of the prompt.
"""
_TYPES = ("findings", "impression", "image", "prior image", *WORDS[4:])
"""What a token is part of; each has a vector that is added to its tokens."""
_FIRST_HEADING = 4
PROMPT_SECTIONS = WORDS[6:]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CXRMateConfig(ReportConfig):
    """Sizes of CXRMate-ED's decoder. Its image encoder, UniFormer-B of 384 pixels, is not in timm;
    the default has as many tokens (144) at that size.
    """

    image_encoder: str = "timm:convnextv2_base"
    image_arguments: EncoderArguments = dataclasses.field(default_factory=dict)
    image_size: int = 384
    fit: Literal["crop", "pad", "squash"] = "crop"
    resize: Kernel = "bicubic"
    """Kernel of the resize for inference."""
    frozen_image: bool = False
    """Keep the image encoder as it is; its stored output can then replace images."""
    views: int = 5
    """Maximum number of images of a study, which limits memory; 5 in CXRMate. Further ones are
    counted in a warning.
    """
    prior: bool = False
    """Also read the patient's previous image and report, which may be missing."""
    sections: bool = True
    """Write findings and impression in one text: the text of a sample, and its second text
    (`medvl.data.TextPair`). False: one text.
    """
    prompt: tuple[str, ...] = ()
    """Sections of the study that are read with its images: indication, history, comparison,
    technique.
    """
    prompt_tokens: int = 64
    """Maximum number of tokens of each section that is read."""
    width: int = 768
    layers: int = 6
    heads: int = 12
    intermediate: int = 3072
    dropout: float = 0.0
    image_lr_mult: float = 1.0
    """Learning rate of the image encoder, as a multiple of the other parts'."""
    max_tokens: int = 129
    """Longest section in tokens, including the first and the last one."""
    vocab_size: int | None = None
    """None: the value of the tokenizer."""

    def __post_init__(self) -> None:
        check_choice(self.fit, ("crop", "pad", "squash"), "fit")
        check_within(self, "[1, inf)", "views")
        check_within(self, "[0, 1)", "dropout")
        check_within(
            self,
            "(0, inf)",
            "layers",
            "intermediate",
            "image_lr_mult",
            "max_tokens",
            "prompt_tokens",
        )
        for name in self.prompt:
            check_choice(name, PROMPT_SECTIONS, "prompt")
        if self.width % (2 * self.heads):
            message = f"width must be a multiple of twice the heads, got {self.width}"
            raise ConfigError(message, "conflict", field="width")


class _Writer:
    """A `NextToken` of a `CXRMate`: each step computes one token; keys and values are cached."""

    def __init__(self, model: "CXRMate", prefix: Tokens, first_id: int) -> None:
        self._model = model
        self._state: PrefixState = model.decoder.read(prefix)
        self._first_id = first_id
        self._divided_R = torch.zeros_like(self._state.place_R, dtype=torch.bool)

    def first(self) -> Tensor:
        return self._step(torch.full_like(self._state.place_R, self._first_id))

    def next(self, ids_R: Tensor, parent_R: Tensor) -> Tensor:
        self._state = self._state.rows(parent_R)
        self._divided_R = self._divided_R[parent_R]
        return self._step(ids_R)

    def _step(self, ids_R: Tensor) -> Tensor:
        words_RD = self._model.words(ids_R) + self._model.types(self._divided_R.long())
        # What divides the sections is of the findings; what follows it of the impression.
        self._divided_R = self._divided_R | (ids_R == self._model.word_id("section"))
        states_RD, self._state = self._model.decoder.write(words_RD, self._state)
        scores_RV: Tensor = self._model.word_head(states_RD)
        return scores_RV


@register_system("cxrmate")
class CXRMate(ReportGenerator):
    """Images of a study, its prior and its context as a prefix; findings and impression behind it.

    Each image goes through the image encoder by itself; LayerNorm and a linear layer without bias
    map its patches to the decoder. Images of the prior come before the current ones. Tokens have a
    vector for what they are part of. Differences from CXRMate-ED: rows of vectors, types and masks
    are built together, where the released code has them in two orders; missing images are masked,
    where it looks at their first pixel; no emergency tables and no time deltas; the first images of
    a study are read where it has more.

    `Batch.prompt_ids_BT` are the tokens of the context with one image marker a row (`word_id`).
    """

    Config = CXRMateConfig
    reads_features = True
    image_encoder: ImageEncoder

    def __init__(
        self,
        config: CXRMateConfig,
        image_encoder: ImageEncoder,
        vocab_size: int,
        **parts: Unpack[Parts],
    ) -> None:
        super().__init__(config, **parts)
        sizes = Sizes.of(config, config.width)
        self.image_encoder = image_encoder
        if config.frozen_image:
            image_encoder.freeze()
        self.image_norm = nn.LayerNorm(image_encoder.patch_dim)
        self.image_input = nn.Linear(image_encoder.patch_dim, config.width, bias=False)
        self.words = nn.Embedding(vocab_size + len(WORDS), config.width)
        self.types = nn.Embedding(len(_TYPES), config.width)
        self.decoder = PrefixDecoder(sizes)
        self.word_head = nn.Linear(config.width, vocab_size + len(WORDS), bias=False)
        for name, module in self.named_modules():
            if not name.startswith("image_encoder") and isinstance(
                module, nn.Linear | nn.Embedding
            ):
                nn.init.normal_(module.weight, std=INIT_STD)
        self.inputs = Inputs(
            other_views=config.views - 1,
            prior_image=config.prior,
            second_text=config.sections,
            prompt=self._prompt(),
        )

    @classmethod
    def build(cls, config: CXRMateConfig, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        """Raises ConfigError without a vocabulary."""
        if config.vocab_size is None and tokenizer is None:
            message = "cxrmate needs a vocabulary; use create_model(..., tokenizer=FOLDER)"
            raise ConfigError(message, "missing", field="tokenizer")
        arguments: Mapping[str, Any] = config.image_arguments
        image_encoder = create_image_encoder(
            config.image_encoder, pretrained=pretrained, image_size=config.image_size, **arguments
        )
        words = config.vocab_size
        if words is None and tokenizer is not None:
            words = tokenizer.vocab_size
        assert words is not None
        config = dataclasses.replace(config, vocab_size=words)
        transform = EvalTransform(size=config.image_size, fit=config.fit, resize=config.resize)
        return cls(config, image_encoder, words, transform=transform, tokenizer=tokenizer)

    def word_id(self, word: str) -> int:
        """Return the id of one of `WORDS`, such as the image's marker, "image"."""
        return int(self.config.vocab_size) + WORDS.index(word)

    def _prompt(self) -> Prompt | None:
        if self.tokenizer is None or not (self.config.prompt or self.config.prior):
            return None
        prior = ("prior findings", "prior impression") if self.config.prior else ()
        return Prompt(
            tokenizer=self.tokenizer,
            headings={name: (self.word_id(name),) for name in (*prior, *self.config.prompt)},
            after=(self.word_id("image"),),
            max_tokens=self.config.prompt_tokens,
        )

    def read(self, batch: Batch) -> Tokens:
        image = study_images(
            batch,
            self._typed(self._patches(batch), "image"),
            self._encode_some,
            views=self.config.views,
            prior=self.config.prior,
        )
        if batch.prompt_ids_BT is None:
            return image
        ids_BT = batch.prompt_ids_BT
        assert batch.prompt_mask_BT is not None, "a batch with a prompt has its mask"
        type_BT = self._prompt_types(ids_BT)
        prompt = Tokens(self.words(ids_BT) + self.types(type_BT), batch.prompt_mask_BT)
        return insert_images(prompt, ids_BT == self.word_id("image"), image)

    def _patches(self, batch: Batch) -> Tokens:
        if batch.regions_BPD is not None:
            features = stored_features(batch, self.image_encoder)
            assert features.patches_BPD is not None, "stored features have patches"
            return Tokens(self.image_input(self.image_norm(features.patches_BPD)), None)
        return self._encode(batch.image_BCHW)

    def _encode(self, image: Tensor) -> Tokens:
        patches_BPD = image_patches(self.image_encoder, image)
        return Tokens(self.image_input(self.image_norm(patches_BPD)), None)

    def _encode_some(self, image: Tensor, has_B: Tensor | None, kind: str) -> Tokens:
        return self._typed(encode_some(self._encode, image, has_B, self.config.width), kind)

    def _typed(self, tokens: Tokens, name: str) -> Tokens:
        return Tokens(tokens.states_BND + self.types.weight[_TYPES.index(name)], tokens.mask_BN)

    def _prompt_types(self, ids_BT: Tensor) -> Tensor:
        """(B, T) int64: the type of the last heading before a token; before any, that of images."""
        first = int(self.config.vocab_size) + _FIRST_HEADING
        # Headings stand in `WORDS` and `_TYPES` in one order, behind four other entries of each.
        heading_BT = torch.where(ids_BT >= first, ids_BT - int(self.config.vocab_size), 0)
        place_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        last_BT = torch.where(heading_BT > 0, place_T, 0).cummax(dim=1).values
        type_BT = heading_BT.gather(1, last_BT)
        return type_BT.masked_fill(type_BT == 0, _TYPES.index("image"))

    def trained_rows(self, batch: Batch) -> Tensor:
        """Return the rows that have an image and one of the sections."""
        if not self.config.sections or batch.has_second_text_B is None:
            return super().trained_rows(batch)
        ones_B = torch.ones_like(batch.has_second_text_B)
        has_image_B = ones_B if batch.has_image_B is None else batch.has_image_B
        has_text_B = ones_B if batch.has_text_B is None else batch.has_text_B
        return (has_image_B & (has_text_B | batch.has_second_text_B)).nonzero().squeeze(1)

    def words_and_targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if not self.config.sections or batch.second_ids_BT is None:
            return super().words_and_targets(batch)
        return self._both_sections(batch)

    def _both_sections(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return tokens and targets of "BOS findings SECTION impression EOS"; a missing section is
        the word for it.

        After a section that fills `max_tokens`, and may have been cut, the next token is no target.
        """
        assert batch.second_ids_BT is not None, "both sections are texts of a batch"
        assert batch.second_mask_BT is not None, "a batch with a second text has its mask"
        parts = [
            self._section(batch.ids_BT, batch.mask_BT, batch.has_text_B, "no findings"),
            self._section(
                batch.second_ids_BT, batch.second_mask_BT, batch.has_second_text_B, "no impression"
            ),
        ]
        section_B1 = torch.full_like(batch.ids_BT[:, :1], self.word_id("section"))
        first_B1 = batch.ids_BT[:, :1]
        end_B1 = first_B1.new_full(first_B1.shape, self._end_id(batch))
        ids_BT = torch.cat([first_B1, parts[0][0], section_B1, parts[1][0], end_B1], dim=1)
        true_B1 = torch.ones_like(first_B1, dtype=torch.bool)
        real_BT = torch.cat([true_B1, parts[0][1], true_B1, parts[1][1], true_B1], dim=1)
        target_BT = torch.cat(
            [
                first_B1,
                parts[0][0],
                _unless(parts[0][2], section_B1),
                parts[1][0],
                _unless(parts[1][2], end_B1),
            ],
            dim=1,
        )
        order_BT = (~real_BT).long().argsort(dim=1, stable=True)  # padding goes to the end
        length = int(real_BT.sum(dim=1).max())
        ids_BT = ids_BT.gather(1, order_BT)[:, :length]
        target_BT = target_BT.masked_fill(~real_BT, IGNORED).gather(1, order_BT)[:, :length]
        return ids_BT[:, :-1], target_BT[:, 1:]

    def _section(
        self, ids_BT: Tensor, mask_BT: Tensor, has_B: Tensor | None, missing: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids and mask of a section without its first and last token, the word for a
        missing section first; and (B,) bool: whether it may have been cut.
        """
        has_B = torch.ones_like(mask_BT[:, 0]) if has_B is None else has_B
        length_B = mask_BT.sum(dim=1)
        place_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        inner_BT = (place_T > 0) & (place_T < length_B[:, None] - 1) & has_B[:, None]
        missing_B1 = torch.full_like(ids_BT[:, :1], self.word_id(missing))
        return (
            torch.cat([missing_B1, ids_BT], dim=1),
            torch.cat([~has_B[:, None], inner_BT], dim=1),
            (length_B >= self.config.max_tokens) & has_B,
        )

    def _end_id(self, batch: Batch) -> int:
        if self.tokenizer is not None:
            return self.tokenizer.sep_id
        return int(batch.ids_BT[0, int(batch.mask_BT[0].sum()) - 1])

    def score_next(self, ids_BT: Tensor, image: Tokens) -> Tensor:
        is_section_BT = (ids_BT == self.word_id("section")).long()
        divided_BT = (is_section_BT.cumsum(dim=1) - is_section_BT).clamp(max=1)
        words_BTD = self.words(ids_BT) + self.types(divided_BT)
        scores_BTV: Tensor = self.word_head(self.decoder(image, words_BTD))
        return scores_BTV

    def writer(self, image: Tokens, first_id: int) -> _Writer:
        return _Writer(self, image, first_id)

    @property
    def longest_text(self) -> int:
        return (2 if self.config.sections else 1) * (self.config.max_tokens - 1)

    def never_written(self) -> list[int]:
        only_read = ("image", *WORDS[_FIRST_HEADING:])
        words = only_read if self.config.sections else WORDS
        return [*super().never_written(), *(self.word_id(word) for word in words)]

    def write_ids(self, batch: Batch, *, decoding: Decoding) -> Generated:
        """Return texts as `write_reports`, with the words of `WORDS` that divide them."""
        return super().write_reports(batch, decoding=decoding)

    @torch.no_grad()
    def write_reports(self, batch: Batch, *, decoding: Decoding | None = None) -> Generated:
        """Return a text for each image of a batch, findings and impression one after another, or
        several with sampling; its texts are not read.

        Raises ConfigError in training mode, and without a tokenizer.
        """
        generated = self.write_ids(batch, decoding=decoding or Decoding(beams=4))
        plain_BT = generated.mask_BT & (generated.ids_BT < int(self.config.vocab_size))
        return dataclasses.replace(generated, mask_BT=plain_BT)

    @torch.no_grad()
    def write_sections(
        self, batch: Batch, *, decoding: Decoding | None = None
    ) -> list[tuple[str, str]]:
        """Return (findings, impression) for each image of a batch, "" for a missing one. A text
        without a division is of the findings.

        Raises as `write_reports`.
        """
        tokenizer = self.require_tokenizer("writing")
        generated = self.write_ids(batch, decoding=decoding or Decoding(beams=4))
        texts = []
        for ids_T, mask_T in zip(generated.ids_BT.cpu(), generated.mask_BT.cpu(), strict=True):
            ids: Sequence[int] = ids_T[mask_T].tolist()
            divide = self.word_id("section")
            place = ids.index(divide) if divide in ids else len(ids)
            findings, impression = (
                tokenizer.decode([number for number in part if number < self.config.vocab_size])
                for part in (ids[:place], ids[place + 1 :])
            )
            texts.append((findings, impression))
        return texts

    def parameter_groups(self, lr: float, weight_decay: float) -> list[dict[str, Any]]:
        """Return the groups of `groups_by_part`."""
        return groups_by_part(self, self.config.image_lr_mult, lr, weight_decay)


def _unless(cut_B: Tensor, ids_B1: Tensor) -> Tensor:
    return ids_B1.masked_fill(cut_B[:, None], IGNORED)
