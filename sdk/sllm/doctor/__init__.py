"""``sllm doctor``: what this machine offers the platform, and what to do where it falls short."""
