"""``@model_function``: describes a function for the platform and otherwise leaves it as it is."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, Unpack, overload

from sllm.model import Model
from sllm.options import Options

if TYPE_CHECKING:
    from sllm.answers import Observe
    from sllm.client import Client
    from sllm.remote import AsyncRemote, Remote
    from sllm_runtime.protocol.http import DeployResult
    from sllm_runtime.protocol.manifest import Manifest

P = ParamSpec("P")
"""Parameters of the user's own function."""
Q = ParamSpec("Q")
"""Arguments of a call: the same without the model."""
R_co = TypeVar("R_co", covariant=True)
C = TypeVar("C")


class ModelFunction(Generic[P, Q, R_co]):
    """A described function or class. Calling it runs the user's own code, here and now, as if undecorated.

    ``remote`` and ``stream`` call the deployed function of this name (``aio`` for asyncio), ``local`` runs a call in
    this process with its model.
    """

    def __init__(self, target: Callable[P, R_co], options: Options) -> None:
        from sllm import signature

        self.__sllm_target__ = target  # protocol.manifest.TARGET_ATTRIBUTE: where the worker finds it
        self.options = options
        self.__name__: str = getattr(target, "__name__", "function")
        self.__qualname__: str = getattr(target, "__qualname__", self.__name__)
        self.__doc__ = target.__doc__
        self.__module__ = getattr(target, "__module__", "")
        self.__wrapped__ = target
        signature.call_target(target)
        self._stamp = self._stamped()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        return self.__sllm_target__(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<model_function {self.name} of {self.__module__}:{self.__qualname__}>"

    @property
    def target(self) -> Callable[P, R_co]:
        """The user's own function or class."""
        return self.__sllm_target__

    @property
    def name(self) -> str:
        """The name it is deployed under."""
        return self.options.get("name") or self.__name__.lower().replace("_", "-").strip("-")

    @property
    def include(self) -> tuple[str, ...]:
        """Patterns of further files of its bundle. Raises ``InvalidManifest`` where they are no texts."""
        from sllm_runtime.protocol.errors import InvalidManifest

        found = self.options.get("include", ())
        is_list = isinstance(found, Collection) and not isinstance(found, str)
        if not is_list or not all(isinstance(each, str) for each in found):
            wrong = f'{self.__name__}: include is a list of patterns, include=["data/*.bin"] (given: {found!r:.80})'
            raise InvalidManifest(wrong, field="include")
        return tuple(found)

    def source_file(self) -> Path | None:
        """The file that defines it; ``None`` in a notebook or an interactive session, also where a debugger has written
        its cells to files."""
        if self.__module__ == "__main__" and not getattr(sys.modules["__main__"], "__file__", None):
            return None
        try:
            path = inspect.getsourcefile(inspect.unwrap(self.target))
        except TypeError:
            return None
        return Path(path).resolve() if path and Path(path).is_file() else None

    def is_stale(self) -> bool:
        """Whether its file is another one since it was imported: what would travel is not what this describes."""
        return self._stamp is not None and self._stamp != self._stamped()

    def __getstate__(self) -> dict[str, Any]:
        """Without the stamp: what else is in its file is no part of a function that is pickled by value."""
        return self.__dict__ | {"_stamp": None}

    def _stamped(self) -> int | None:
        try:
            file = self.source_file()
            return hash(file.read_bytes()) if file is not None else None
        except (OSError, ValueError):  # of a wrapper that wraps itself nothing can be said
            return None

    def manifest(self, entry: str, *, python: str | None = None) -> Manifest:
        """The manifest, with the code found at ``entry``. Raises ``InvalidManifest`` naming the field."""
        from sllm.described import manifest

        return manifest(self, entry, python)

    # --- calls ------------------------------------------------------------------------------------
    @property
    def aio(self) -> AsyncRemote:
        """``remote`` and ``stream`` for asyncio, with named arguments."""
        return self._remote.aio

    @property
    def _remote(self) -> Remote:
        from sllm.remote import Remote

        return Remote(self.name)

    def remote(self, *args: Q.args, **kwargs: Q.kwargs) -> Any:
        """Call the deployed function of this name; its whole answer (a list of what a generator yielded)."""
        return self._remote.remote(**self.arguments(*args, **kwargs))

    def stream(self, *args: Q.args, **kwargs: Q.kwargs) -> Any:
        """Call the deployed function of this name; an iterator of its values as they come."""
        return self._remote.stream(**self.arguments(*args, **kwargs))

    def local(self, *args: Q.args, **kwargs: Q.kwargs) -> Any:
        """Run one call in this process, with its model if it has one (extra ``worker``), without a platform."""
        from sllm.local import run_local

        return run_local(self, self.arguments(*args, **kwargs))

    def arguments(self, *args: Q.args, **kwargs: Q.kwargs) -> dict[str, Any]:
        """A call's arguments by their names. Raises ``TypeError`` as the function itself would."""
        from sllm import signature

        return signature.named(self.target, args, kwargs)

    # --- deployment -------------------------------------------------------------------------------
    def deploy(self, *, client: Client | None = None, observe: Observe | None = None) -> DeployResult:
        """Deploy it as ``sllm fn deploy`` does. Raises ``InvalidBundle``, ``InvalidManifest``, what the platform
        answers."""
        from sllm.answers import ignore
        from sllm.client import Client
        from sllm.deployment import deploy

        if client is not None:
            return deploy(self, client, observe or ignore)
        with Client() as own:
            return deploy(self, own, observe or ignore)


def _reduced(function: ModelFunction[Any, Any, Any]) -> str | tuple[Any, ...]:
    """To ``multiprocessing`` it goes by its name, as the function does that is behind it; where something else has that
    name, by what is in it. (To cloudpickle always so: where that brings it nothing may have that name.)"""
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return function.__qualname__ if found is function else function.__reduce_ex__(2)


ForkingPickler.register(ModelFunction, _reduced)


class Decorator(Protocol):
    """What ``@model_function(...)`` gives: a class stays its type, and the model is no argument of a call."""

    @overload
    def __call__(self, target: type[C], /) -> ModelFunction[..., ..., C]: ...
    @overload
    def __call__(
        self, target: Callable[Concatenate[Model, Q], R_co], /
    ) -> ModelFunction[Concatenate[Model, Q], Q, R_co]: ...
    @overload
    def __call__(self, target: Callable[P, R_co], /) -> ModelFunction[P, P, R_co]: ...


@overload
def model_function(target: type[C], /) -> ModelFunction[..., ..., C]: ...
@overload
def model_function(
    target: Callable[Concatenate[Model, Q], R_co], /
) -> ModelFunction[Concatenate[Model, Q], Q, R_co]: ...
@overload
def model_function(target: Callable[P, R_co], /) -> ModelFunction[P, P, R_co]: ...
@overload
def model_function(**options: Unpack[Options]) -> Decorator: ...
def model_function(target: Any = None, /, **options: Unpack[Options]) -> Any:
    """Describe a function (or class with ``setup`` and ``__call__``) that the platform can run.

    Options are the manifest's fields, see ``Options``. Raises ``InvalidManifest`` where it stands on anything else.
    """
    if target is not None:
        return ModelFunction(target, options)
    return lambda function: ModelFunction(function, options)
