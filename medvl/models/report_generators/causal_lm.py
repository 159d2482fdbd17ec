"""A causal language model of `transformers` that reads images: LLaVA-Rad (Chaves et al., arXiv
2403.08002) and MAIRA-2 (Bannur et al., arXiv 2406.04449) are of this kind.

    image encoder -> patches -> projector -> embeddings in place of a marker in the prompt -> report

Letters: B samples, R rows that are written, P tokens of the prompt with its images, T tokens of the
report, N = P + T, D width of the language model, V words.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, Unpack

import torch
from torch import Tensor, nn

from medvl.common.config_io import check_choice, check_within
from medvl.common.untrusted import parse_json, read_json
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform, Kernel
from medvl.data.transforms.prompt import Prompt, text_ids
from medvl.encoders import ImageEncoder, create_image_encoder
from medvl.encoders.base import add_lora
from medvl.errors import ConfigError, WeightsError
from medvl.models.base import EncoderArguments, Parts, stored_features
from medvl.models.fusion_encoders.parts.encoder import Tokens
from medvl.models.registry import register_system
from medvl.models.report_generators.base import IGNORED, ReportConfig, ReportGenerator
from medvl.models.report_generators.parts.prefix import insert_images, places
from medvl.schema import Batch, Inputs

FAMILIES = ("gemma", "gemma2", "llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` whose layers have the names of `ADAPTED`."""
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Layers with LoRA: every linear layer but the output, as in LLaVA-Rad."""
_DEPTHS = {"linear": 1, "mlp2x": 2, "mlp4x": 4}
_SECTIONS = ("indication", "history", "comparison", "technique")


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
    projector: Literal["linear", "mlp2x", "mlp4x"] = "mlp2x"
    """Map from patches to the language model: one linear layer; two or four with GELU between."""
    language_weights: str | None = None
    """Folder of a causal language model of `transformers` (`config.json` and safetensors) to start
    from. A checkpoint has weights of its own.
    """
    language: str = ""
    """Settings of the language model as JSON; by default those of `language_weights`."""
    trained: Literal["projector", "lora", "all"] = "lora"
    """What is trained of the projector and the language model: the first stage of LLaVA-Rad trains
    the projector alone, the second one also LoRA.
    """
    lora_rank: int = 64
    lora_alpha: int = 128
    lora_dropout: float = 0.05
    image_token_id: int | None = None
    """Id of the image's marker in prompts; None: the first one behind the vocabulary."""
    instruction: str = "Describe the findings of the chest radiograph."
    """Text behind the images, where a model has a tokenizer."""
    prompt: tuple[str, ...] = ()
    """Sections of the study between image and instruction: indication, history, comparison,
    technique.
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
        check_choice(self.trained, ("projector", "lora", "all"), "trained")
        check_within(self, "[0, 1)", "lora_dropout")
        check_within(self, "(0, inf)", "lora_rank", "lora_alpha", "prompt_tokens", "max_tokens")
        for name in self.prompt:
            check_choice(name, _SECTIONS, "prompt")


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
    """Patches of an image through a projector, in place of the marker of a prompt; a causal
    language model writes behind it.

    `Batch.prompt_ids_BT` are prompts with one image marker a row (`image_token_id`); without them,
    the image and the instruction are the prompt. Every token of `Batch.ids_BT` is a target. Prompt
    and report are tokenised apart, so that no token crosses their border; padding is masked by the
    length of texts, so the closing token is learned whatever its id.
    """

    Config = CausalLMConfig
    reads_features = True
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
        width = int(language.config.hidden_size)
        layers: list[nn.Module] = [nn.Linear(image_encoder.patch_dim, width)]
        for _ in range(_DEPTHS[config.projector] - 1):
            layers += [nn.GELU(), nn.Linear(width, width)]
        self.projector = nn.Sequential(*layers)
        if config.trained == "projector":
            language.requires_grad_(False)
        elif config.trained == "lora":
            add_lora(
                language,
                config.lora_rank,
                config.lora_alpha,
                ADAPTED,
                dropout=config.lora_dropout,
            )
        self.inputs = Inputs(prompt=self._prompt())

    @classmethod
    def build(
        cls, config: CausalLMConfig, *, pretrained: bool, tokenizer: Tokenizer | None
    ) -> Self:
        """Raises ConfigError without a language model or for another family, WeightsError where its
        weights do not fit.
        """
        language = _open_language(config)
        arguments: Mapping[str, Any] = config.image_arguments
        image_encoder = create_image_encoder(
            config.image_encoder, pretrained=pretrained, image_size=config.image_size, **arguments
        )
        words = int(language.config.vocab_size)
        if tokenizer is not None and tokenizer.vocab_size > words:
            message = f"the tokenizer has {tokenizer.vocab_size} ids, the language model {words}"
            raise ConfigError(message, "mismatch", field="tokenizer")
        settings = json.dumps(language.config.to_diff_dict(), sort_keys=True)
        config = dataclasses.replace(
            config, language=settings, language_weights=None, vocab_size=words
        )
        transform = EvalTransform(size=config.image_size, fit=config.fit, resize=config.resize)
        return cls(config, image_encoder, language, transform=transform, tokenizer=tokenizer)

    @property
    def image_token_id(self) -> int:
        """Id of the image's marker in prompts."""
        if self.config.image_token_id is not None:
            return int(self.config.image_token_id)
        return int(self.language.config.vocab_size)

    def _prompt(self) -> Prompt | None:
        """Return the writer of prompts: image, sections with their names, instruction."""
        if self.tokenizer is None:
            return None
        return Prompt(
            tokenizer=self.tokenizer,
            before=(self.image_token_id,),
            headings={
                name: text_ids(self.tokenizer, f" {name.upper()}: ") for name in self.config.prompt
            },
            after=text_ids(self.tokenizer, f" {self.config.instruction} "),
            max_tokens=self.config.prompt_tokens,
        )

    def read(self, batch: Batch) -> Tokens:
        if batch.regions_BPD is not None:
            features = stored_features(batch, self.image_encoder.patch_dim)
        else:
            features = self.image_encoder(batch.image_BCHW)
        image = Tokens(self.projector(features.patches_BPD), None)
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

    def words_and_targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        place_T = torch.arange(batch.ids_BT.shape[1], device=batch.ids_BT.device)
        may_be_cut_T = place_T == self.config.max_tokens - 1
        ignored_BT = ~batch.mask_BT | may_be_cut_T
        return batch.ids_BT, batch.ids_BT.masked_fill(ignored_BT, IGNORED)

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


def _open_language(config: CausalLMConfig) -> Any:
    """Return the language model of the settings: with the weights of a folder, or random ones."""
    import transformers

    if config.language_weights is None:
        if not config.language:
            message = "causal_lm needs a language model; give language_weights=FOLDER"
            raise ConfigError(message, "missing", field="language_weights")
        settings = parse_json(config.language)
        _check_family(settings)
        kind = settings.pop("model_type")
        made = transformers.AutoConfig.for_model(kind, **settings)
        return transformers.AutoModelForCausalLM.from_config(made, attn_implementation="sdpa")
    folder = Path(config.language_weights)
    try:
        _check_family(read_json(folder / "config.json", WeightsError))
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            use_safetensors=True,
            local_files_only=True,
            dtype=torch.float32,
            attn_implementation="sdpa",
            output_loading_info=True,
        )
    except OSError as error:
        message = f"{folder} is no folder with config.json and safetensors of a language model"
        raise WeightsError(message, "not_found", field="language_weights") from error
    language, report = loaded
    wrong = [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]
    if wrong:
        message = (
            f"{folder}: {len(wrong)} weights are missing, unknown or of another shape: {wrong[0]}"
        )
        raise WeightsError(message, "mismatch", field="language_weights")
    return language


def _check_family(settings: Any) -> None:
    kind = settings.get("model_type") if isinstance(settings, dict) else None
    if kind not in FAMILIES:
        message = f"expected a model_type among {', '.join(FAMILIES)}, got {kind}"
        raise ConfigError(message, "unsupported", field="language_weights")
