"""Pages that a query finds, by words and by hand-made embeddings."""

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace

from envs.wiki.corpus import Page
from envs.wiki.index import WikiIndex
from envs.wiki.retrieval import EmbeddingRetrieval, WordRetrieval

TEXTS = ["The owl sleeps", "A boat on water", "Water, water"]
# Words of the same meaning have vectors of the same direction.
MEANINGS = {"[UNK]": (0, 0, 0), "owl": (1, 0, 0), "bird": (1, 0.1, 0), "boat": (0, 1, 0),
            "ship": (0, 1, 0.1), "water": (0, 0.2, 1)}  # fmt: skip


@pytest.fixture
def model(tmp_path, monkeypatch):
    """Return the folder of a sentence-transformers model that sums the vectors of words."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    monkeypatch.setenv("OFFBYONE_CACHE", str(tmp_path / "cache"))
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(MEANINGS)}, "[UNK]"))
    words.normalizer, words.pre_tokenizer = Lowercase(), Whitespace()
    vectors = np.array(list(MEANINGS.values()), dtype=np.float32)
    folder = tmp_path / "model"
    made = sentence_transformers.SentenceTransformer(
        modules=[StaticEmbedding(words, embedding_weights=vectors)], device="cpu"
    )
    made.save(str(folder))
    return str(folder)


def test_words_find_the_texts_that_contain_them():
    retrieval = WordRetrieval(TEXTS)

    assert retrieval.best("owl", 3) == [0]
    assert retrieval.best("boat water", 3) == [1, 2]
    assert retrieval.best("boat water", 1) == [1]
    assert retrieval.best("bird", 3) == []


def test_embeddings_find_the_texts_of_the_same_meaning(model):
    retrieval = EmbeddingRetrieval(TEXTS, model)

    assert retrieval.best("bird", 1) == [0]
    assert retrieval.best("ship", 3) == [1, 2, 0]
    assert retrieval.best("water", 3) == [2, 1, 0]


def test_embeddings_are_made_once_for_a_text_and_a_model(model, tmp_path):
    first = EmbeddingRetrieval(TEXTS, model)
    (kept,) = (tmp_path / "cache" / "embeddings").iterdir()
    np.save(kept, np.load(kept)[::-1])  # so that a read from the cache is visible

    assert first.best("owl", 1) == [0]
    assert EmbeddingRetrieval(TEXTS, model).best("owl", 1) == [2]
    assert EmbeddingRetrieval(TEXTS[::-1], model).best("owl", 1) == [2]
    assert len(list(kept.parent.iterdir())) == 2


def test_the_search_tool_uses_the_embeddings_asked_for(model):
    pages = [Page("Owl", {"Life": "It sleeps"}), Page("Boat", {"Use": "water"})]

    assert WikiIndex(pages, 1).search_pages("bird") == "No page found."
    assert WikiIndex(pages, 1, model).search_pages("bird") == "Owl"


def test_a_model_that_cannot_be_loaded_is_refused_with_one_sentence(tmp_path):
    pytest.importorskip("sentence_transformers")
    with pytest.raises(ValueError, match=r"embeddings=.*none: sentence-transformers cannot load"):
        EmbeddingRetrieval(TEXTS, str(tmp_path / "none"))
