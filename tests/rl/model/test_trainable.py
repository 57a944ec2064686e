"""Models of a wrong kind are refused before anything starts."""

import json

import pytest

from rl.model.folder import check_trainable


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"architectures": ["BertForMaskedLM"]}, r"holds a BertForMaskedLM, which is no causal"),
        ({"architectures": ["T5Model"], "is_encoder_decoder": True}, "holds a T5Model, which is"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"are quantised \(gptq\), .* use the"),
    ],
)
def test_a_model_of_a_wrong_kind_is_refused(config, sentence, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=sentence):
        check_trainable(tmp_path)


@pytest.mark.parametrize(
    "config", [{}, {"architectures": ["Qwen3ForCausalLM"]}, {"architectures": ["GPT2LMHeadModel"]}]
)
def test_any_other_is_left_to_transformers(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_trainable(tmp_path)
