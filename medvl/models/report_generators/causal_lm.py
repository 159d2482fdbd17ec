"""A causal language model of `transformers` that reads images: LLaVA-Rad (Chaves et al., arXiv
2403.08002) and MAIRA-2 (Bannur et al., arXiv 2406.04449) are of this kind.

    image encoder -> patches -> projector -> embeddings in place of a marker in the prompt -> report

Letters: B samples, R rows that are written, P tokens of the prompt with its images, T tokens of the
report, N = P + T, D width of the language model, V words, O options.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from medvl.common.config_io import check_choice, check_within
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.data.transforms.operations import Kernel
from medvl.encoders import ImageEncoder, create_image_encoder
from medvl.errors import ConfigError
from medvl.models.base import EncoderArguments, Parts, evaluating, stored_features
from medvl.models.fusion_encoders.parts.encoder import Tokens
from medvl.models.registry import register_system
from medvl.models.report_generators.base import (
    IGNORED,
    Prompt,
    ReportConfig,
    ReportGenerator,
    text_ids,
)
from medvl.models.report_generators.parts.prefix import (
    ADAPTED,
    encode_some,
    image_patches,
    insert_images,
    language_files,
    language_sha256,
    open_language,
    packed_states,
    places,
    random_language,
    settings_of,
    study_images,
    word_scores,
)
from medvl.models.text_decoding import Decoding
from medvl.schema import Batch, Inputs

_DEPTHS = {"linear": 1, "mlp2x": 2, "mlp4x": 4}
_PRIOR = ("prior findings", "prior impression")
_SECTIONS = ("findings", "indication", "history", "comparison", "technique")
_BASE = "language."
"""Begin of the names of the language model's weights."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalLMConfig(ReportConfig):
    """Settings of LLaVA-Rad, whose language model is Vicuna-7B."""

    image_encoder: str = "timm:vit_base_patch16_224"
    image_arguments: EncoderArguments = dataclasses.field(default_factory=dict)
    image_size: int = 224
    fit: Literal["crop", "pad", "squash"] = "crop"
    resize: Kernel = "bicubic"
    """Kernel of the resize for inference."""
    frozen_image: bool = True
    """Keep the image encoder as it is; its stored output can then replace images."""
    views: int = 1
    """Maximum number of images of a study, which limits memory; 2 in MAIRA-2. 0: none, to write one
    section of a report from others, such as the impression from the findings.
    """
    prior: bool = False
    """Also read the patient's previous image and report, which may be missing, as MAIRA-2."""
    projector: Literal["linear", "mlp2x", "mlp4x"] = "mlp2x"
    """Map from patches to the language model: one linear layer; two or four with GELU between."""
    language_weights: str | None = None
    """Folder of a causal language model of `transformers` (`config.json` and safetensors) to start
    from. Its tokenizer is not read: give the same folder as the tokenizer.
    """
    language: str = ""
    """Settings of the language model as JSON, for random weights; by default those of
    `language_weights`.
    """
    frozen_language: bool = False
    """Keep the language model as it is: the first stage of LLaVA-Rad trains the projector alone."""
    lora_language: int = 64
    """Rank of low-rank updates (LoRA) of the language model, scaled by 2, in place of a training
    of its weights; 0: none.
    """
    lora_dropout: float = 0.05
    store_language: bool = True
    """Whether checkpoints have the weights of the language model. Without, they have its low-rank
    updates, and need the folder `language_weights`, which is compared with a hash.
    """
    language_sha256: str = ""
    """Hash of the folder `language_weights`, in checkpoints without its weights."""
    packed_tokens: int = 0
    """Above 0: in training, samples are put side by side into rows of at most this many tokens,
    without padding. Values do not change.
    """
    image_token_id: int | None = None
    """Id of the image's marker in prompts; None: the first one behind the vocabulary."""
    instruction: str = "Describe the findings of the chest radiograph."
    """Text behind the images, where a model has a tokenizer."""
    prompt: tuple[str, ...] = ()
    """Sections of the study between image and instruction: findings, indication, history,
    comparison, technique.
    """
    prompt_tokens: int = 128
    """Maximum number of tokens of each section that is read."""
    max_tokens: int = 256
    """Including the closing token."""
    vocab_size: int | None = None
    """Embeddings of the language model."""

    def __post_init__(self) -> None:
        check_choice(self.fit, ("crop", "pad", "squash"), "fit")
        check_choice(self.projector, tuple(_DEPTHS), "projector")
        check_within(self, "[0, 1)", "lora_dropout")
        check_within(self, "[0, inf)", "views", "lora_language", "packed_tokens")
        check_within(self, "(0, inf)", "prompt_tokens", "max_tokens")
        for name in self.prompt:
            check_choice(name, _SECTIONS, "prompt")
        if not self.views and (self.prior or not self.prompt):
            message = "without images a text is written from sections of the prompt; set prompt"
            raise ConfigError(message, "conflict", field="views")
        if self.frozen_language and self.lora_language:
            message = "frozen_language excludes low-rank updates; set lora_language to 0"
            raise ConfigError(message, "conflict", field="lora_language")
        if not self.store_language and not (self.frozen_language or self.lora_language):
            message = "a language model that is trained must be stored; set store_language to True"
            raise ConfigError(message, "conflict", field="store_language")
        if not self.store_language and self.language_weights is None:
            message = "checkpoints without the language model need its folder; set language_weights"
            raise ConfigError(message, "missing", field="language_weights")


class _Writer:
    """A `NextToken` over the cache of `transformers`. The prompts are padded on the left, so that
    their last column is the token before the report.
    """

    def __init__(self, language: Any, prefix: Tokens) -> None:
        from transformers import DynamicCache

        self._language = language
        self._prefix = prefix
        self._mask_RN = prefix.real_BN()
        self._cache: Any = DynamicCache(config=language.config)

    def first(self) -> Tensor:
        return self._run(inputs_embeds=self._prefix.states_BND, place_RN=places(self._mask_RN))

    def next(self, ids_R: Tensor, parent_R: Tensor) -> Tensor:
        self._cache.reorder_cache(parent_R)
        mask_RN = self._mask_RN[parent_R]
        self._mask_RN = torch.cat([mask_RN, torch.ones_like(mask_RN[:, :1])], dim=1)
        return self._run(input_ids=ids_R[:, None], place_RN=places(self._mask_RN)[:, -1:])

    def _run(self, *, place_RN: Tensor, **inputs: Tensor) -> Tensor:
        logits_R1V: Tensor = self._language(
            **inputs,
            attention_mask=self._mask_RN.long(),
            position_ids=place_RN,
            cache=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits_R1V[:, -1]


@register_system("causal_lm")
class CausalLM(ReportGenerator):
    """Patches of images through a projector, in place of the marker of a prompt; a causal language
    model writes behind it.

    `Batch.prompt_ids_BT` are prompts with one image marker a row (`image_token_id`); without them,
    the image and the instruction are the prompt. Every token of `Batch.ids_BT` is a target: the
    model's tokenizer has no first token. Prompt and report are tokenised apart, so that no token
    crosses their border; padding is masked by the length of texts, so the closing token is learned
    whatever its id. The closing token is the tokenizer's `eos_token`: take the folder of a chat
    model as it is published.

    A sample with the section "question" has that as its prompt, and its text is the answer
    (`answer`, `score_options`).
    """

    Config = CausalLMConfig
    reads_features = True
    lora_layers: ClassVar = {"language": ADAPTED}
    image_encoder: ImageEncoder
    language: Any

    def __init__(
        self,
        config: CausalLMConfig,
        image_encoder: ImageEncoder,
        language: Any,
        **parts: Unpack[Parts],
    ) -> None:
        super().__init__(config, **parts)
        self.image_encoder = image_encoder
        if config.frozen_image:
            image_encoder.freeze()
        self.language = language
        self._width = int(language.config.hidden_size)
        layers: list[nn.Module] = [nn.Linear(image_encoder.patch_dim, self._width)]
        for _ in range(_DEPTHS[config.projector] - 1):
            layers += [nn.GELU(), nn.Linear(self._width, self._width)]
        self.projector = nn.Sequential(*layers)
        if not config.views:
            self.projector.requires_grad_(False)
        if config.frozen_language:
            language.requires_grad_(False)
        self.inputs = Inputs(
            other_views=max(0, config.views - 1),
            prior_image=config.prior,
            prompt=self._prompt(),
        )
        self.reads_images = config.views > 0
        self._from_folder = False
        self.register_state_dict_post_hook(_leave_weights)
        self.register_load_state_dict_pre_hook(_keep_weights)

    @classmethod
    def build(
        cls, config: CausalLMConfig, *, pretrained: bool, tokenizer: Tokenizer | None
    ) -> Self:
        """Raises ConfigError without a language model or for another family, WeightsError where its
        weights do not fit.
        """
        language = _language(config)
        arguments: Mapping[str, Any] = config.image_arguments
        image_encoder = create_image_encoder(
            config.image_encoder, pretrained=pretrained, image_size=config.image_size, **arguments
        )
        words = int(language.config.vocab_size)
        if tokenizer is not None and tokenizer.vocab_size > words:
            message = f"the tokenizer has {tokenizer.vocab_size} ids, the language model {words}"
            raise ConfigError(message, "mismatch", field="tokenizer")
        from_checkpoint = config.store_language and config.language_sha256 != ""
        if config.store_language:
            config = dataclasses.replace(
                config,
                language=settings_of(language),
                language_weights=None,
                language_sha256="",
                vocab_size=words,
            )
        else:
            folder = Path(str(config.language_weights))
            config = dataclasses.replace(
                config, language="", language_sha256=language_sha256(folder), vocab_size=words
            )
        transform = EvalTransform(size=config.image_size, fit=config.fit, resize=config.resize)
        written = None if tokenizer is None else tokenizer.for_writing()
        model = cls(config, image_encoder, language, transform=transform, tokenizer=written)
        model._from_folder = from_checkpoint
        return model

    @classmethod
    def loaded_config(cls, config: CausalLMConfig) -> CausalLMConfig:
        """Return the configuration of a loaded model, which has all weights."""
        return super().loaded_config(dataclasses.replace(config, store_language=True))

    @classmethod
    def outside_files(cls, config: CausalLMConfig) -> list[Path]:
        """Return the files of weights that a checkpoint of these settings leaves out."""
        if config.store_language:
            return []
        return language_files(Path(str(config.language_weights)))

    def outside_weights(self) -> dict[str, Tensor]:
        """Return the weights of a model that its checkpoint left out."""
        if not self._from_folder:
            return {}
        return {name: each for name, each in self.state_dict().items() if name.startswith(_BASE)}

    @property
    def image_token_id(self) -> int:
        """Id of the image's marker in prompts."""
        if self.config.image_token_id is not None:
            return int(self.config.image_token_id)
        return int(self.language.config.vocab_size)

    def _prompt(self) -> Prompt | None:
        """Return the writer of prompts: image, sections with their names, instruction; or the
        question in its place.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            return None
        first = () if tokenizer.cls_id == tokenizer.sep_id else (tokenizer.cls_id,)
        names = (*(_PRIOR if self.config.prior else ()), *self.config.prompt, "question")
        return Prompt(
            tokenizer=tokenizer,
            before=(*first, self.image_token_id),
            headings={name: text_ids(tokenizer, f" {name.capitalize()}: ") for name in names},
            after=text_ids(tokenizer, f" {self.config.instruction} "),
            answer=text_ids(tokenizer, " Answer: "),
            max_tokens=self.config.prompt_tokens,
        )

    def question_prompt(self, question: str) -> tuple[int, ...]:
        """Return the ids of a prompt with the image's marker and a question. Raises ConfigError
        without a tokenizer.
        """
        self.require_tokenizer("questions")
        prompt = self.inputs.prompt
        assert prompt is not None, "a model with a tokenizer writes prompts"
        return tuple(prompt({"question": question}, None))

    def read(self, batch: Batch) -> Tokens:
        image = self._images(batch)
        ids_BT = batch.prompt_ids_BT
        mask_BT = batch.prompt_mask_BT
        if ids_BT is None:
            prompt = self.inputs.prompt
            ids = [self.image_token_id] if prompt is None else [*prompt({}, None)]
            ids_BT = torch.tensor(ids, device=image.states_BND.device).expand(len(batch), -1)
            mask_BT = torch.ones_like(ids_BT, dtype=torch.bool)
        assert mask_BT is not None, "a batch with a prompt has its mask"
        is_marker_BT = ids_BT == self.image_token_id
        words_BTD = self._words(ids_BT.masked_fill(is_marker_BT, 0))
        return insert_images(Tokens(words_BTD, mask_BT), is_marker_BT, image, left=True)

    def _images(self, batch: Batch) -> Tokens:
        """Return the tokens of all images of each row; none for a writer that reads no image."""
        if not self.reads_images:
            words = self.language.get_input_embeddings().weight
            return Tokens(words.new_zeros(len(batch.ids_BT), 0, self._width), None)
        if batch.regions_BPD is not None:
            features = stored_features(batch, self.image_encoder)
            image = Tokens(self.projector(features.patches_BPD), None)
        else:
            image = self._encode(batch.image_BCHW)
        image = study_images(
            batch, image, self._encode_some, views=self.config.views, prior=self.config.prior
        )
        # Questions that share an image share its earlier image too.
        return image if batch.image_of_B is None else image.rows(batch.image_of_B)

    def _encode(self, image: Tensor) -> Tokens:
        return Tokens(self.projector(image_patches(self.image_encoder, image)), None)

    def _encode_some(self, image: Tensor, has_B: Tensor | None, kind: str) -> Tokens:
        return encode_some(self._encode, image, has_B, self._width)

    def words_and_targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        place_T = torch.arange(batch.ids_BT.shape[1], device=batch.ids_BT.device)
        may_be_cut_T = place_T == self.config.max_tokens - 1
        ignored_BT = ~batch.mask_BT | may_be_cut_T
        return batch.ids_BT, batch.ids_BT.masked_fill(ignored_BT, IGNORED)

    def word_loss(self, ids_BT: Tensor, target_BT: Tensor, image: Tokens) -> Tensor:
        if not self.config.packed_tokens:
            return super().word_loss(ids_BT, target_BT, image)
        known_BT = target_BT != IGNORED
        # The last target is no input; where a text has none, its first token is one.
        place_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        length_B = torch.where(known_BT, place_T, 0).amax(dim=1)
        words_BTD = self._words(ids_BT).to(image.states_BND.dtype)
        real_BP = image.real_BN()
        texts = [
            torch.cat([image.states_BND[row][real_BP[row]], words_BTD[row, :length]])
            for row, length in enumerate(length_B.tolist())
        ]
        states = packed_states(self.language, texts, self.config.packed_tokens)
        behind = [
            state[len(state) - length - 1 :][known_BT[row, : length + 1]]
            for row, (state, length) in enumerate(zip(states, length_B.tolist(), strict=True))
        ]
        scores_SV = word_scores(self.language, torch.cat(behind))
        return F.cross_entropy(scores_SV.float(), target_BT[known_BT], reduction="sum")

    def score_targets(self, ids_BT: Tensor, image: Tokens) -> Tensor:
        return self._logits(ids_BT[:, :-1], image, ids_BT.shape[1])

    def score_words(self, ids_BT: Tensor, image: Tokens) -> Tensor:
        return self.score_targets(ids_BT, image)

    def score_next(self, ids_BT: Tensor, image: Tokens) -> Tensor:
        return self._logits(ids_BT, image, ids_BT.shape[1])

    def _logits(self, ids_BT: Tensor, image: Tokens, keep: int) -> Tensor:
        """Return the scores behind the last `keep` tokens of prompts and reports."""
        words_BTD = self._words(ids_BT)
        states_BND = torch.cat([image.states_BND, words_BTD.to(image.states_BND.dtype)], dim=1)
        # Padding behind a report is not masked: what precedes it does not attend to it.
        mask_BN = torch.cat([image.real_BN(), torch.ones_like(ids_BT, dtype=torch.bool)], dim=1)
        scores_BTV: Tensor = self.language(
            inputs_embeds=states_BND,
            attention_mask=mask_BN.long(),
            position_ids=places(mask_BN),
            use_cache=False,
            logits_to_keep=keep,
        ).logits
        return scores_BTV

    def _words(self, ids_BT: Tensor) -> Tensor:
        words_BTD: Tensor = self.language.get_input_embeddings()(ids_BT)
        return words_BTD

    def writer(self, image: Tokens, first_id: int) -> _Writer:
        return _Writer(self.language, image)

    @property
    def longest_text(self) -> int:
        return int(self.config.max_tokens)

    def never_written(self) -> list[int]:
        """Return the unknown word, and ids that the tokenizer does not have."""
        tokenizer = self.require_tokenizer("writing")
        return [
            *super().never_written(),
            *range(tokenizer.vocab_size, int(self.language.config.vocab_size)),
        ]

    def answer(
        self, image_BCHW: Tensor, questions: Sequence[str], *, decoding: Decoding | None = None
    ) -> list[str]:
        """Return an answer to each question about its image, greedy by default.

        Raises ConfigError in training mode, without a tokenizer, and for unequal numbers of images
        and questions.
        """
        batch = self._questions(image_BCHW, questions)
        generated = self.write_reports(batch, decoding=decoding or Decoding())
        return self.texts_of(generated.ids_BT, generated.mask_BT)

    @torch.no_grad()
    def score_options(
        self,
        image_BCHW: Tensor,
        questions: Sequence[str],
        options: Sequence[Sequence[str]],
        *,
        length: Literal["mean", "sum"] = "mean",
    ) -> list[Tensor]:
        """Return the log-likelihoods (O,) of the options of each question about its image.

        Args:
            image_BCHW: an image for each question.
            questions: texts; letters of options are part of a question where options are letters.
            options: texts of answers, any number for a question.
            length: "mean" divides the sum over an option's tokens by their number, its closing
                token included, so that long options are not worse than short ones.

        Raises ConfigError without a tokenizer, and for unequal numbers of images, questions and
        lists of options.
        """
        tokenizer = self.require_tokenizer("scores of options")
        check_choice(length, ("mean", "sum"), "length")
        if len(options) != len(questions):
            message = f"expected options of {len(questions)} questions, got {len(options)}"
            raise ConfigError(message, "mismatch", field="options")
        batch = self._questions(image_BCHW, questions)
        counts = [len(each) for each in options]
        if not sum(counts):
            return [torch.empty(0) for _ in counts]
        ids_NT, mask_NT = tokenizer([option for each in options for option in each])
        ids_NT = ids_NT.to(self.device)
        row_N = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        with evaluating(self):
            prefix = self.read(batch).rows(row_N.to(self.device))
            log_NTV = self.score_targets(ids_NT, prefix).float().log_softmax(dim=2)
        log_NT = log_NTV.gather(2, ids_NT[:, :, None]).squeeze(2).cpu() * mask_NT
        log_N = log_NT.sum(dim=1)
        if length == "mean":
            log_N = log_N / mask_NT.sum(dim=1)
        return list(log_N.split(counts))

    def _questions(self, image_BCHW: Tensor, questions: Sequence[str]) -> Batch:
        """Return the batch of images with questions as prompts."""
        tokenizer = self.require_tokenizer("questions")
        rows = [torch.tensor(self.question_prompt(each)) for each in questions]
        ids_BT = pad_sequence(rows, True, padding_value=tokenizer.pad_id)
        length_B = torch.tensor([len(row) for row in rows])
        text_BT = torch.full((len(rows), 1), tokenizer.sep_id)
        batch = self.make_batch(
            image_BCHW, [""] * len(rows), text_BT, torch.ones_like(text_BT, dtype=torch.bool)
        )
        batch.prompt_ids_BT = ids_BT.to(self.device)
        batch.prompt_mask_BT = (torch.arange(ids_BT.shape[1]) < length_B[:, None]).to(self.device)
        return batch


def _language(config: CausalLMConfig) -> Any:
    """Return the language model of the settings: with the weights of a folder, or random ones."""
    if config.language_weights is not None:
        return open_language(Path(config.language_weights), config.language_sha256)
    if not config.language:
        message = "causal_lm needs a language model; give language_weights=FOLDER"
        raise ConfigError(message, "missing", field="language_weights")
    return random_language(config.language, config.vocab_size)


def _left_out(model: Any, names: Iterable[str], prefix: str) -> list[str]:
    """Return the names of weights of the language model that a checkpoint does not have: all but
    low-rank updates with `store_language` False, and the output where it is the table of words.
    """
    output = f"{prefix}{_BASE}lm_head.weight"
    is_tied = bool(model.language.config.tie_word_embeddings)
    all_stored = bool(model.config.store_language)
    return [
        name
        for name in names
        if (is_tied and name == output)
        or (not all_stored and name.startswith(f"{prefix}{_BASE}") and ".lora_" not in name)
    ]


def _leave_weights(
    model: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    for name in _left_out(model, [*state], prefix):
        del state[name]


def _keep_weights(model: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    """Complete a state that is loaded with the model's own weights."""
    # These models have no persistent buffers.
    own = dict(model.named_parameters(prefix.removesuffix("."), remove_duplicate=False))
    for name in _left_out(model, own, prefix):
        state.setdefault(name, own[name].detach())
