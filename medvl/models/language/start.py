"""An old text encoder under a new vocabulary."""

from typing import Any

from medvl.encoders import TextEncoder, create_text_encoder
from medvl.encoders.presets import TEXT_PRESETS
from medvl.encoders.pretrained import Pretrained, read_source
from medvl.errors import WeightsError

_TABLE = "word_embeddings.weight"


def load_under_new_vocabulary(encoder: TextEncoder, name: str, source: Pretrained) -> None:
    """Load weights of an encoder with another vocabulary; the table of words of `encoder` stays as it is.

    Raises WeightsError where the weights are not available, have no table of words, or do not fit.
    """
    preset = TEXT_PRESETS.get(name)
    published, note = (preset.weights, preset.note) if preset else (None, "")
    file, tensors = read_source(name, source, published, note)
    tables = [tensor for key, tensor in tensors.items() if key.endswith(_TABLE)]
    if not tables:
        raise WeightsError(f"{file} has no table of words ({_TABLE})", "mismatch")
    arguments: dict[str, Any] = {**encoder.config, "name": name, "vocab_size": tables[0].shape[0]}
    old = create_text_encoder(**arguments, pretrained=source).state_dict()
    own = encoder.state_dict()
    encoder.load_state_dict({key: own[key] if key.endswith(_TABLE) else old[key] for key in own})
