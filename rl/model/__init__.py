"""Package that inspects, builds and loads models, their tokenizers and LoRA adapters."""
