"""Models on disk and in memory: tiny, pretrained, tokenizer, LoRA."""
