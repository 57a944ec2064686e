"""Which pages fit a query: BM25 over their words (`bm25s`), or nearness of embeddings."""

import hashlib
import os
import re
from collections.abc import Sequence
from threading import Lock
from typing import Protocol

import bm25s
import numpy as np

from envs.cache import cache_folder
from envs.loading import in_one_line

WORD = re.compile(r"\w+")


class Retrieval(Protocol):
    """An index over texts; may be asked from several threads at once."""

    def best(self, query: str, number: int) -> list[int]:
        """Return the positions of the texts that fit, at most `number`, best first."""
        ...


class WordRetrieval:
    """BM25; a text without a word of the query does not fit."""

    def __init__(self, texts: Sequence[str]) -> None:
        """Build the index."""
        self._bm25 = bm25s.BM25()
        self._bm25.index([_words(text) for text in texts], show_progress=False)

    def best(self, query: str, number: int) -> list[int]:
        words = [word for word in _words(query) if word in self._bm25.vocab_dict]
        if not words:
            return []
        scores = self._bm25.get_scores(words)
        return [int(i) for i in _largest(scores, number) if scores[i] > 0]


class EmbeddingRetrieval:
    """Cosine similarity of embeddings, by any model that `sentence-transformers` loads."""

    def __init__(self, texts: Sequence[str], model: str) -> None:
        """Embed the texts, or take them from the cache of an earlier start.

        Args:
            texts: each is cut to the length that the model reads.
            model: a folder, or a name on the hub.

        Raises:
            ValueError: the library or the model cannot be loaded; one sentence.

        """
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise ValueError(
                f"embeddings={model}: the library sentence-transformers is not installed: "
                "pip install 'offbyone[embeddings]', or embeddings=null for BM25"
            ) from error
        try:
            # Policies and vLLM need the accelerators, and a query is a few words.
            self._model = SentenceTransformer(model, device="cpu")
        except Exception as error:  # its own, the hub's and those of the network
            raise ValueError(
                f"embeddings={model}: sentence-transformers cannot load it ({in_one_line(error)}); "
                "name a folder or a model of the hub"
            ) from error
        self._lock = Lock()  # one query at a time: torch's threads are faster than ours
        self._vectors = self._embedded(list(texts))

    def best(self, query: str, number: int) -> list[int]:
        with self._lock:
            vector = self._model.encode_query(
                query, normalize_embeddings=True, show_progress_bar=False
            )
        return [int(i) for i in _largest(self._vectors @ np.asarray(vector), number)]

    def _embedded(self, texts: list[str]) -> np.ndarray:
        """Return [texts, dimension], rows of length 1, kept between runs."""
        kept = cache_folder() / "embeddings" / f"{self._key(texts)}.npy"
        if kept.is_file():
            return np.load(kept)
        vectors = np.asarray(
            self._model.encode_document(texts, normalize_embeddings=True, show_progress_bar=True)
        )
        kept.parent.mkdir(parents=True, exist_ok=True)
        # Written aside: another run may look for it meanwhile, and must not read half of it.
        aside = kept.with_suffix(f".{os.getpid()}.npy")
        np.save(aside, vectors)
        aside.rename(kept)
        return vectors

    def _key(self, texts: list[str]) -> str:
        """Return what changes with the model's weights or a text."""
        digest = hashlib.sha256("\0".join(texts).encode())
        for weights in self._model.parameters():
            digest.update(weights.detach().float().numpy().tobytes())
        return digest.hexdigest()[:16]


def _largest(scores: np.ndarray, number: int) -> np.ndarray:
    return np.argsort(-scores, kind="stable")[:number]


def _words(text: str) -> list[str]:
    return [word.lower() for word in WORD.findall(text.replace("_", " "))]
