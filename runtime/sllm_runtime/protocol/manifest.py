"""What a version of a function is: everything the platform needs to know before it runs any of the user's code.

Written by the SDK at deploy, kept in the registry, read by all. ``schema_version`` rises when a reader of the
version before could misunderstand a field; readers accept their own version and the one before.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from sllm_runtime.protocol.quantities import KEPT, Bytes, KeepAlive, Seconds, parse_gpu
from sllm_runtime.protocol.secrets import secret_names

SCHEMA_VERSION: Final = 1
NAME = re.compile(r"^[a-z][a-z0-9-]{0,62}\Z")
VERSION = re.compile(r"^v[0-9]+\Z")
"""What names a version where an adapter's name could stand."""
ENV_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]{0,127}\Z")

MAX_PLACE: Final = 2048
"""Characters of where a model or an adapter is."""
MAX_ADAPTERS: Final = 256
"""LoRA adapters of a function."""

PICKLE_ENTRY: Final = "pickle:"
"""A handler's entry where the function travels by itself, pickled, as ``PICKLE_NAME`` of its bundle."""
PICKLE_NAME: Final = "function.pkl"
TARGET_ATTRIBUTE: Final = "__sllm_target__"
"""Attribute by which a decorated object gives the worker the user's own function or class."""
MODEL_PARAMETER: Final = "model"
"""The parameter (of a function, or of ``setup``) that receives the model handle; it is no argument of a call."""


def _name(value: str) -> str:
    if not NAME.match(value):
        raise ValueError(
            f"{value!r} is no name: lower-case letters, digits and '-', beginning with a letter, at most 63"
        )
    return value


def _place(value: str, info: ValidationInfo) -> str:
    """Raises ``ValueError`` for what names no place, and would be read as another. What is ``KEPT`` is that other one:
    a release before took it so."""
    if any(ord(letter) < 0x20 for letter in value):
        if info.context == KEPT:
            return "".join(letter for letter in value if ord(letter) >= 0x20)
        raise ValueError(f"{value!r} is no place of a model: it has control characters")
    return value


def _env(value: dict[str, str]) -> dict[str, str]:
    for key, text in value.items():
        if not ENV_NAME.match(key):
            raise ValueError(f"{key!r} is no environment variable's name")
        if "\0" in text:
            raise ValueError(f"{key!r} holds a NUL character, which no environment variable can; leave it out")
    return value


def _adapters(value: dict[str, str], info: ValidationInfo) -> dict[str, str]:
    if len(value) > MAX_ADAPTERS:
        raise ValueError(f"{len(value)} adapters are named, at most {MAX_ADAPTERS} go with a function")
    for name, place in value.items():
        _name(name)
        if VERSION.match(name):
            raise ValueError(f"{name!r} can be no adapter's name: it would mean a version; choose another")
        if not 0 < len(place) <= MAX_PLACE:
            raise ValueError(f"adapter {name!r} needs a place of 1 to {MAX_PLACE} characters, as model has")
    return {name: _place(place, info) for name, place in value.items()}


def _input_schema(value: dict[str, Any]) -> dict[str, Any]:
    rest: list[Any] = [value]
    while rest:
        part = rest.pop()
        if isinstance(part, dict):
            rest += part.values()
        elif isinstance(part, list | tuple):
            rest += part
        elif isinstance(part, int) and not -(2**63) <= part < 2**64:
            raise ValueError(
                f"it has the number {part!r:.80}, which 64 bits do not hold; give a smaller default or limit"
            )
    return value


def _first_wrong(value: Any) -> Any:
    """Of a dictionary the first item that is no text, if one is: to tell of each, in a manifest that has room for a
    million, takes seconds. For lists there is ``FailFast``; dictionaries have it from pydantic 2.14 on."""
    if not isinstance(value, dict):
        return value
    return next(({key: each} for key, each in value.items() if not isinstance(each, str)), value)


Name = Annotated[str, AfterValidator(_name)]
Texts: TypeAlias = Annotated[dict[str, str], BeforeValidator(_first_wrong)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
HandlerKind = Literal["function", "generator", "async_function", "async_generator", "class"]


class Frozen(BaseModel):
    """Base of all records: immutable, unknown fields ignored (a newer writer may know more)."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Described(Frozen):
    """What people write: true and false, which pydantic would take for 1 and 0, are numbers nowhere, nor is anything
    that JSON cannot write."""

    model_config = ConfigDict(allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation is not bool:
            raise ValueError("this is no switch: true and false mean nothing here")
        return value


class Parallelism(Described):
    """Processes that an instance is split over, all on one node."""

    tensor: int = Field(default=1, ge=1, le=64)
    """Ranks that share every layer; the model is converted for as many (``--plan auto:N``)."""
    pipeline: int = Field(default=1, ge=1, le=64)
    """Stages, each with a run of layers."""

    @property
    def processes(self) -> int:
        """Of one instance."""
        return self.tensor * self.pipeline


class Slo(Described):
    """Latency aims that the autoscaler and the scheduler try to keep."""

    ttft: Seconds | None = Field(default=None, gt=0)
    tbt: Seconds | None = Field(default=None, gt=0)


class Handler(Frozen):
    """How the worker finds and calls the user's code."""

    entry: str
    """``module:attribute`` inside the bundle, or ``pickle:`` for a cloudpickled object."""
    kind: HandlerKind
    streams: bool
    """Whether a call yields values, as far as its hints tell (a generator, or a class whose call method is one); a
    worker says of each call whether it did (``End.yielded``)."""
    input_schema: Annotated[dict[str, Any], AfterValidator(_input_schema)] = Field(
        default_factory=lambda: {"type": "object"}
    )
    """JSON Schema of a call's keyword arguments, made from the type hints."""
    python: str | None = None
    """``"3.11"`` when the bundle holds pickled byte code, which only that minor version can run."""


class Resources(Described):
    """What an instance needs of its node."""

    gpu: tuple[str, ...] = ()
    """By preference, ``"L4"`` or ``"H100:2"``; empty: none."""
    gpu_memory: Bytes | None = Field(default=None, gt=0)
    cpu: float = Field(default=1.0, gt=0, le=1024)
    """Cores of each of its processes."""
    memory: Bytes = Field(default=2 * 2**30, ge=64 * 2**20)
    """Bytes of private memory of each of its processes, beside the model's weights."""
    labels: Texts = Field(default_factory=dict)

    @field_validator("gpu", mode="before")
    @classmethod
    def _gpu_forms(cls, value: Any, info: ValidationInfo) -> Any:
        kinds = () if value is None else (value,) if isinstance(value, str) else value
        if not isinstance(kinds, Sequence) or not all(isinstance(kind, str) for kind in kinds):
            raise ValueError("this is neither a GPU nor a list of them; write 'L4', 'H100:2' or ['L4', 'H100:2']")
        if info.context == KEPT:  # a release before passed over a line end
            kinds = tuple(kind.removesuffix("\n") for kind in kinds)
        for kind in kinds:
            parse_gpu(kind)
        return tuple(kinds)


Place: TypeAlias = Annotated[str, Field(max_length=MAX_PLACE), AfterValidator(_place)]
"""Where a model is."""


class Manifest(Resources):
    """A function's declared properties. Times are seconds, sizes bytes; texts like ``"5m"`` or ``"2GiB"`` are taken."""

    schema_version: int = SCHEMA_VERSION
    name: Name
    description: str = Field(default="", max_length=2000)
    handler: Handler
    model: Place | None = None
    """A directory, ``hf://org/name@revision``, ``s3://bucket/prefix``, or ``sha256:…`` of a registered model."""
    adapters: Annotated[Texts, AfterValidator(_adapters)] = Field(default_factory=dict)
    """LoRA adapters of the model, by the name by which a call chooses one: each at a place such as ``model`` names."""
    model_loader: Literal["auto", "causal_lm", "build"] = "auto"
    """``auto``: the class config.json names; ``build``: the user's ``build()`` returns the module."""
    engine: bool = False
    """Whether the model generates text through the engine: the OpenAI routes then serve it."""
    dtype: Dtype = "auto"
    parallelism: Parallelism = Parallelism()

    keep_alive: KeepAlive = 60.0
    """How long an idle instance stays; ``"load-time"``: as long as its start was expected to take."""
    min_instances: int = Field(default=0, ge=0, le=1000)
    max_instances: int = Field(default=1, ge=1, le=1000)
    concurrency: int = Field(default=1, ge=1, le=4096)
    timeout: Seconds = Field(default=300.0, gt=0, le=86400)
    """Acceptance to last byte."""
    idle_timeout: Seconds = Field(default=60.0, gt=0)
    """Longest gap between two frames."""
    startup_timeout: Seconds = Field(default=120.0, gt=0)
    """From the sandbox on."""
    queue_timeout: Seconds = Field(default=120.0, gt=0)
    """Waiting for capacity."""
    max_queue: int = Field(default=256, ge=0, le=100_000)
    """Calls that may wait, per gateway, beyond those that instances are being started for."""
    retries: int = Field(default=0, ge=0, le=10)
    resumable: bool = True
    priority: int = Field(default=0, ge=-100, le=100)
    slo: Slo = Slo()

    network: bool = False
    """Whether it may reach anything beyond its own loopback."""
    env: Annotated[Texts, AfterValidator(_env)] = Field(default_factory=dict)
    secrets: Annotated[tuple[str, ...], FailFast(), AfterValidator(secret_names)] = ()
    """Names of the platform's secrets that it is given, each as a file."""
    requirements: Annotated[tuple[str, ...], FailFast()] = ()
    image: str | None = None

    @field_validator("network", mode="before")
    @classmethod
    def _own_network(cls, value: Any) -> Any:
        if value == "cluster":
            raise ValueError(
                "a network that processes share is the platform's to give, to ranks on GPUs; say True or False"
            )
        return value

    @field_validator("image", mode="before")
    @classmethod
    def _no_image(cls, value: Any) -> Any:
        """An empty text names none."""
        return None if value == "" else value

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, data: Any) -> Any:
        """Engine-backed functions batch: eight calls an instance unless said otherwise."""
        if isinstance(data, dict) and data.get("engine") and data.get("concurrency") is None:
            data = {**data, "concurrency": 8}
        elif isinstance(data, dict) and "concurrency" in data and data["concurrency"] is None:
            data = {key: value for key, value in data.items() if key != "concurrency"}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        if self.schema_version not in (SCHEMA_VERSION, SCHEMA_VERSION - 1):
            raise ValueError(f"schema_version {self.schema_version} is not {SCHEMA_VERSION} or the one before")
        if self.min_instances > self.max_instances:
            raise ValueError(f"min_instances {self.min_instances} is above max_instances {self.max_instances}")
        if self.engine and not self.model:
            raise ValueError("engine=True needs a model")
        if self.adapters and not self.engine:
            raise ValueError("adapters need engine=True: calls choose them by the OpenAI routes' model")
        if self.model is None and self.model_loader == "build":
            raise ValueError("model_loader 'build' needs a model: the checkpoint that fills the module")
        return self
