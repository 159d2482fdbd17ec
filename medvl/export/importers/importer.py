"""Description of one published checkpoint layout."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from medvl.data.tokenizer.files import Cleaning
from medvl.export.importers.encoders_from_shapes import Options
from medvl.export.importers.key_map import KeyRule, MappedTensors, Shapes, ZeroTensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class EntityFile:
    """A file with the entities of a system's training, which its checkpoint does not hold."""

    title: str
    """Name of the published file, and its format."""
    read: Callable[[Any, Path], tuple[Any, Mapping[str, Tensor]]]
    """Function from the system's config and the file to the config with the entities, and further tensors by medvl's
    names."""
    required: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Importer:
    """One published layout."""

    name: str
    title: str
    """System, paper, backbones."""
    source: str
    """Code that defines the layout: repository and commit."""
    table: Sequence[KeyRule]
    image: Options | None = None
    """Arguments of the image encoder that the file does not determine; None if the file has no image encoder."""
    text: Options | None = None
    """The same for the text encoder."""
    system: Callable[[Shapes], Any] | None = None
    """Function from the shapes by medvl's names to the system's config; None: only the encoders are imported."""
    zeros: Sequence[ZeroTensor] = ()
    parts: Sequence[str] = ()
    """Names of the state dicts that the file holds side by side; keys are then `part/key`."""
    text_file: str | None = None
    """Content of a second file with the text encoder; None: there is one file."""
    entities: EntityFile | None = None
    computed: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None
    """Function from the tensors by medvl's names to those that replace them."""
    settle: Callable[[Any, MappedTensors], tuple[Any, MappedTensors]] | None = None
    """Function from the config and the tensors to those after what depends on values, such as tables of positions that
    differ from the computed ones."""
    tokenizer: str | None = None
    """Argument of `load_tokenizer` for tokenizers that an installed package contains."""
    images: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the system's config for the released preparation of images, where they differ from its defaults."""
    has_processor: bool = False
    """Whether its files come with an image processor (`preprocessor_config.json`), which is read if it is beside them.
    """
    cleaning: Cleaning | None = None
    """How the released code cleans texts before its tokenizer; None: not at all."""
    closing: bool = True
    """Whether the released tokenizer ends texts with [SEP]."""
    note: str = ""
    """Known differences from the published system."""

    @property
    def kind(self) -> str:
        """Type of the imported object: "system", or which encoders."""
        if self.system is not None:
            return "system"
        encoders = [name for name, options in (("image", self.image), ("text", self.text)) if options is not None]
        return f"{' and '.join(encoders)} encoder{'s' if len(encoders) > 1 else ''}"
