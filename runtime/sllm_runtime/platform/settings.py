"""The environment, read once. A daemon subclasses ``Settings``; ``SLLM_<FIELD>`` sets ``<field>``."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, get_origin

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

from sllm_runtime.protocol.errors import InvalidRequest
from sllm_runtime.protocol.limits import MIB

PREFIX = "SLLM_"


class Identity(msgspec.Struct, frozen=True):
    """Who a daemon is on the bus. Stands in a file of mode 0600 that ``sllm up`` hands to it."""

    identity: str
    user: str | None = None
    password: str | None = None
    kind: str = ""
    """Which of ``subjects.RIGHTS`` it has."""

    def __repr__(self) -> str:
        return f"Identity({self.identity!r})"


class Settings(BaseModel):
    """What every daemon reads. ``load`` takes the environment; values given by name win."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
    told_empty: ClassVar[frozenset[str]] = frozenset()
    """Fields of which an empty variable says something; of all others it is as none."""

    home: Path = Field(default_factory=lambda: Path.home() / ".sllm")
    nats_url: str | None = None
    """One URL or several, separated by commas; ``tls://`` demands TLS."""
    nats_ca: Path | None = None
    nats_cert: Path | None = None
    nats_key: Path | None = None
    nats_creds: Path | None = None
    nats_timeout: float = Field(default=10.0, gt=0)
    """Seconds until the first connection is given up."""
    nats_store: Path | None = None
    """Where an embedded server on this machine keeps its streams."""
    identity_file: Path | None = None
    replicas: int = Field(default=1, ge=1, le=5)
    """Copies of each JetStream stream: 1 embedded, 3 on a cluster."""
    bundle_bytes: int = Field(default=4096 * MIB, gt=0)
    """Most bytes of all bundles in JetStream, beyond which a gateway stores none; on somebody else's server also their
    stream's own limit."""
    log_level: str = "info"
    log_json: bool = False

    @field_validator("log_level")
    @classmethod
    def _is_level(cls, level: str) -> str:
        if level.upper() not in logging.getLevelNamesMapping():
            raise ValueError(f"{level!r} is no level of logs; write debug, info, warning or error")
        return level

    @classmethod
    def load(cls, environment: Mapping[str, str] | None = None, **given: Any) -> Self:
        """Settings from ``SLLM_*`` (default: this process's environment). Raises ``InvalidRequest`` that names the
        variable."""
        source = os.environ if environment is None else environment
        values = {
            name: _value(field, source[key])
            for name, field, key in cls._variables()
            if source.get(key) or (name in cls.told_empty and key in source)
        }
        try:
            return cls(**(values | given))
        except ValidationError as error:
            first = error.errors()[0]
            variable = PREFIX + ".".join(str(part) for part in first["loc"]).upper()
            raise InvalidRequest(f"{variable}: {first['msg']}; correct it and start again", field=variable) from error

    @classmethod
    def _variables(cls) -> list[tuple[str, FieldInfo, str]]:
        return [(name, field, PREFIX + name.upper()) for name, field in cls.model_fields.items()]

    def identity(self) -> Identity | None:
        """Who ``identity_file`` says this daemon is. Raises ``InvalidRequest`` if the file is none."""
        if self.identity_file is None:
            return None
        try:
            return msgspec.json.decode(self.identity_file.read_bytes(), type=Identity)
        except (OSError, msgspec.MsgspecError) as error:
            raise InvalidRequest(f"SLLM_IDENTITY_FILE: {self.identity_file} is no identity file: {error}") from error


def _value(field: FieldInfo, text: str) -> Any:
    """Lists, tuples and mappings are JSON in the environment, or (lists) words separated by commas."""
    if get_origin(field.annotation) not in (list, tuple, dict, set, frozenset):
        return text
    try:
        return msgspec.json.decode(text.encode())
    except msgspec.MsgspecError:
        return [word.strip() for word in text.split(",") if word.strip()]
