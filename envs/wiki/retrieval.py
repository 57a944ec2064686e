"""Rank texts by a query: BM25 over their words (`bm25s`), or similarity of embeddings."""

import hashlib
import os
import re
from collections.abc import Sequence
from threading import Lock

import bm25s
import numpy as np

from envs.loading import cache_folder, in_one_line

WORD = re.compile(r"\w+")


class WordRetrieval:
    """BM25. A text without a word of the query does not match."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._bm25 = bm25s.BM25()
        self._bm25.index([_words(text) for text in texts], show_progress=False)

    def best(self, query: str, number: int) -> list[int]:
        """Return the positions of at most `number` matching texts, best first. Thread-safe."""
        words = [word for word in _words(query) if word in self._bm25.vocab_dict]
        if not words:
            return []
        scores = self._bm25.get_scores(words)
        return [int(i) for i in _largest(scores, number) if scores[i] > 0]


class EmbeddingRetrieval:
    """Cosine similarity of embeddings, with any model that `sentence-transformers` loads."""

    def __init__(self, texts: Sequence[str], model: str) -> None:
        """Embed the texts, or read their embeddings from the cache of an earlier run.

        `model` is a folder or a name on the hub. It reads the beginning of a long text only. Raise
        ValueError if the library or the model cannot be loaded.
        """
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise ValueError(
                f"embeddings={model}: the library sentence-transformers is not installed: "
                "pip install 'offbyone[embeddings]', or embeddings=null for BM25"
            ) from error
        try:
            # On the CPU, because a query is short and vLLM and the trainer need the GPUs.
            self._model = SentenceTransformer(model, device="cpu")
        except Exception as error:  # errors of the library, of the hub and of the network
            raise ValueError(
                f"embeddings={model}: sentence-transformers cannot load it ({in_one_line(error)}); "
                "name a folder or a model of the hub"
            ) from error
        self._lock = Lock()  # one query at a time, because torch uses all cores for each
        self._vectors = self._embedded(list(texts))

    def best(self, query: str, number: int) -> list[int]:
        """Return the positions of the `number` most similar texts, best first. Thread-safe."""
        with self._lock:
            vector = self._model.encode_query(
                query, normalize_embeddings=True, show_progress_bar=False
            )
        return [int(i) for i in _largest(self._vectors @ np.asarray(vector), number)]

    def _embedded(self, texts: list[str]) -> np.ndarray:
        """Return vectors [texts, dimension] of length 1, from the cache if they are in it."""
        kept = cache_folder() / "embeddings" / f"{self._key(texts)}.npy"
        if kept.is_file():
            return np.load(kept)
        vectors = np.asarray(
            self._model.encode_document(texts, normalize_embeddings=True, show_progress_bar=True)
        )
        kept.parent.mkdir(parents=True, exist_ok=True)
        # Write another file and rename it, so that another run never reads half of it.
        aside = kept.with_suffix(f".{os.getpid()}.npy")
        np.save(aside, vectors)
        aside.rename(kept)
        return vectors

    def _key(self, texts: list[str]) -> str:
        """Return a fingerprint of the model's weights and the texts."""
        digest = hashlib.sha256("\0".join(texts).encode())
        for weights in self._model.parameters():
            digest.update(weights.detach().float().numpy().tobytes())
        return digest.hexdigest()[:16]


def _largest(scores: np.ndarray, number: int) -> np.ndarray:
    return np.argsort(-scores, kind="stable")[:number]


def _words(text: str) -> list[str]:
    return [word.lower() for word in WORD.findall(text.replace("_", " "))]
