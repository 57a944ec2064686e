"""Check by its config.json that a model is of a kind that can be trained here."""

import json
from pathlib import Path

# Heads that predict no next token. Any other name is left to transformers.
_OTHER_HEADS = (
    *("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"),
    *("ForQuestionAnswering", "ForSpeechSeq2Seq", "ForImageClassification"),
)


def check_trainable(folder: Path) -> None:
    """Raise ValueError if the model predicts no next token or its weights are quantised.

    vLLM or the trainer would refuse it later, with a longer message.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kinds = [str(kind) for kind in config.get("architectures") or ()]
    wrong = [kind for kind in kinds if kind.endswith(_OTHER_HEADS)]
    if config.get("is_encoder_decoder") or wrong:
        kind = ", ".join(wrong or kinds) or config.get("model_type")
        raise ValueError(
            f"{folder} holds a {kind}, which is no causal language model: choose one that "
            "continues text (architectures of config.json: ...ForCausalLM)"
        )
    if quantised := config.get("quantization_config"):
        how = quantised.get("quant_method", "somehow")
        raise ValueError(
            f"{folder} holds weights that are quantised ({how}), and what is trained must be "
            "whole: use the model in bfloat16 that it was made from"
        )
