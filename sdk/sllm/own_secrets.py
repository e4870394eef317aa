"""``sllm.secret``: what a function reads of its own secrets, where it runs."""

from __future__ import annotations

import os
from pathlib import Path

from sllm_runtime.protocol.errors import InvalidArgument, SecretNotFound
from sllm_runtime.protocol.secrets import SECRETS_DIR, secret_name


def secret(name: str) -> str:
    """The value of a secret that this function names in ``secrets=[…]``, as text. Its bytes are those of the file
    ``$SLLM_SECRETS_DIR/<name>``; ``sllm run`` and ``.local()`` read what that variable says.

    Raises ``SecretNotFound``, ``InvalidArgument`` where it is no text.
    """
    directory = os.environ.get(SECRETS_DIR)
    try:
        if directory is None:
            raise FileNotFoundError
        value = (Path(directory) / secret_name(name)).read_bytes()
    except (FileNotFoundError, ValueError) as error:
        where = f"in {directory}" if directory else f"here: {SECRETS_DIR} is not set"
        text = (
            f"there is no secret {name!a:.80} {where}; name it in secrets=[...] of @model_function, and for `sllm run`"
            f" and .local() have a file of that name in the directory that {SECRETS_DIR} names"
        )
        raise SecretNotFound(text, field="secrets") from error
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        text = f"secret {name} is no text in UTF-8; read its bytes from ${SECRETS_DIR}/{name}"
        raise InvalidArgument(text, field="secrets") from error
