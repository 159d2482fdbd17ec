"""Description of one published checkpoint layout."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from medvl.export.importers.encoders_from_shapes import Options
from medvl.export.importers.key_map import KeyRule, Shapes, ZeroTensor


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
    two_files: bool = False
    """The image model and the text model are published in a file each."""
    tokenizer: str | None = None
    """Argument of `load_tokenizer` for tokenizers that an installed package contains."""
    note: str = ""
    """Known differences from the published system."""

    @property
    def kind(self) -> str:
        """Type of the imported object: "system", or which encoders."""
        if self.system is not None:
            return "system"
        encoders = [name for name, options in (("image", self.image), ("text", self.text)) if options is not None]
        return f"{' and '.join(encoders)} encoder{'s' if len(encoders) > 1 else ''}"
