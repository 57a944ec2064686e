"""Models on disk and in memory: pretrained and tiny models, tokenizers, LoRA."""
