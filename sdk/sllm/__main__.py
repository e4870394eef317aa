"""``python -m sllm``: the same as the ``sllm`` command."""

from sllm.cli import main

main()
