"""What SDK and worker make of a function's ``**kwargs``: a caller is refused by the same hint that converts."""

from __future__ import annotations

from typing import Any, Unpack, get_origin

import typing_extensions
from pydantic import BaseModel, ConfigDict


def further(hint: Any) -> Any:
    """The type of ``**kwargs`` of this hint; ``Unpack[…]`` names several, and is not looked into."""
    return Any if get_origin(hint) in (Unpack, typing_extensions.Unpack) else hint


def base(config: ConfigDict, extra: Any) -> type[BaseModel]:
    """What a function's arguments are a model of; those that are not declared are of the type ``extra``."""
    typed = {} if extra is None else {"__pydantic_extra__": dict[str, extra]}
    return type("Base", (BaseModel,), {"__module__": __name__, "__annotations__": typed, "model_config": config})
