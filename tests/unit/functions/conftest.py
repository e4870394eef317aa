"""Models are loaded here by transformers, which imports torch's compiler, which makes its cache's directory at once."""

import os
from pathlib import Path

os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path.home() / ".cache" / "sllm-tests" / "inductor"))
