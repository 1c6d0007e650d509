"""What a backbone must be, checked on its folder and config before any weight is read."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any


def require_folder(name: str) -> None:
    """ValueError with the nearest folders when `name` is meant as a path and is not there."""
    path = Path(name).expanduser()
    if path.is_dir():
        return
    a_path = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or path.exists()
    if a_path or ("/" in name and path.parent.is_dir()):
        siblings = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
        near = [str(path.parent / n) for n in difflib.get_close_matches(path.name, siblings, cutoff=0.4)]
        raise ValueError(f"no folder {name!r}; nearest: {', '.join(near) or 'none'}")


def refuse_unsupported(config: Any) -> None:
    """ValueError for a model that one 4D mask does not describe or whose weights cannot be trained.

    config: of transformers. A sliding window as long as the context hides nothing and is accepted.
    """
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise ValueError("it is an encoder-decoder; a decoder-only causal LM is needed")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError("its weights are quantised; give the unquantised model")
    window = getattr(text, "sliding_window", None)
    layers = getattr(text, "layer_types", None)
    types = set(layers or ["full_attention"])
    limit = getattr(text, "max_position_embeddings", 0) or 0
    slides = "sliding_attention" in types if layers else getattr(text, "use_sliding_window", True)
    if window is not None and slides and window < limit:
        raise ValueError(
            f"it attends within a sliding window of {window} tokens; only full attention is supported"
        )
    other = types - {"full_attention", "sliding_attention"}
    if other:
        raise ValueError(f"it has layers of type {sorted(other)}; only full attention is supported")
