"""Source format: GGUF, as llama.cpp writes it, read block by block; tensors get their Hugging Face names back."""
