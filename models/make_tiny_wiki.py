"""Make models/tiny-wiki: a tokenizer for pieces of names, and a tiny policy trained by imitation.

    python models/make_tiny_wiki.py [override ...]      about 20 minutes on two cores

All training text is made up (envs/wiki/facts.py), so the policy knows no real page.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that the script runs from any folder

from offbyone.environments import load  # noqa: E402
from rl.model.tiny import CONTROL_TOKENS, MARKUP_TOKENS, byte_letters  # noqa: E402

TARGET = ROOT / "models" / "tiny-wiki"
VOCABULARY = 512  # pieces without special tokens
DEMONSTRATIONS = 6000  # conversations that the tokenizer is trained on
# Words, single digits, white space, the rest. A name has the same pieces in every context, so that
# the policy can copy it token by token.
PIECES = r"[A-Za-z]+|[0-9]|\s+|[^A-Za-z0-9\s]+"
KEPT = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def texts() -> Iterator[str]:
    """Yield the text of made-up episodes, with tool calls as JSON."""
    env = load("wiki-search", levels=[1, 2, 3])
    for messages in islice(env.demonstrations(Random(1)), DEMONSTRATIONS):
        for message in messages:
            calls = message.get("tool_calls") or []
            yield from [message.get("content") or "", *(json.dumps(c["function"]) for c in calls)]


def make_tokenizer() -> Tokenizer:
    """Return byte-level BPE over the pieces, with Qwen3's special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=byte_letters(), show_progress=False
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in MARKUP_TOKENS])
    return tokenizer


def main() -> None:
    """Write the folder and keep its README."""
    TARGET.mkdir(exist_ok=True)
    make_tokenizer().save(str(TARGET / "tokenizer.json"))
    with tempfile.TemporaryDirectory() as output:
        command = [sys.executable, "train.py", "experiment=teach-wiki-search", "run_name=taught"]
        subprocess.run([*command, f"output_dir={output}", *sys.argv[1:]], cwd=ROOT, check=True)
        (exported,) = Path(output).glob("taught/checkpoints/step_*/hf")
        for path in exported.iterdir():
            if path.name in KEPT or path.suffix in {".safetensors", ".jinja"}:
                shutil.copy(path, TARGET / path.name)


if __name__ == "__main__":
    main()
