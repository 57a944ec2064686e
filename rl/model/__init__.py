"""Package for models on disk and in memory: pretrained, tiny, tokenizer, LoRA."""
