"""The model handle that a user's function gets (its public type is ``sllm.Model``)."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sllm_runtime.protocol.errors import FunctionError, SllmError
from sllm_runtime.worker import prompts
from sllm_runtime.worker.adapters import Adapters
from sllm_runtime.worker.aside import aside
from sllm_runtime.worker.engine.base import Request
from sllm_runtime.worker.engine.loop import EngineLoop
from sllm_runtime.worker.engine.sinks import AsyncSink, Mailbox, ThreadSink
from sllm_runtime.worker.generation import Generation, next_number
from sllm_runtime.worker.own import own
from sllm_runtime.worker.prompts import Asked
from sllm_runtime.worker.tokens import Tokens

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


class ModelHandle:
    """A loaded model. Thread-safe. ``make_module`` and ``start_engine`` are called once each, by the first that needs
    what they make. Platform errors that it raises are this instance's own (``own``)."""

    def __init__(
        self,
        make_module: Callable[[], Any],
        files: Mapping[str, bytes],
        path: Path,
        start_engine: Callable[[], tuple[EngineLoop, Tokens]],
    ) -> None:
        self._make_module = make_module
        self._module: Any = None
        self._making = threading.Lock()
        self._files = files
        self._path = path
        self._start_engine = start_engine
        self._engine: tuple[EngineLoop, Tokens] | None = None
        self._tokenizer: Any = None
        self._mailbox: Mailbox | None = None
        self._on_lost: Callable[[SllmError], None] | None = None
        self.adapters = Adapters.none()
        """What OpenAI's routes may name beside the model."""
        self._lock = threading.Lock()

    @property
    def files(self) -> Mapping[str, bytes]:
        """The model's own small files by name."""
        return self._files

    @property
    @own()
    def module(self) -> Any:
        """The ``torch.nn.Module`` with its weights bound, in eval mode. Waits for them; raises what kept them away."""
        with self._making:
            if self._module is None:
                self._module = self._make_module()
            return self._module

    @property
    def device(self) -> Any:
        """Where the weights are."""
        return next((tensor.device for tensor in self.module.parameters()), None)

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's config.json."""
        found: dict[str, Any] = json.loads(self._files.get("config.json", b"{}"))
        return found

    @property
    def path(self) -> Path:
        """A directory with the model's own small files."""
        with self._lock:
            self._path.mkdir(parents=True, exist_ok=True)
            for name, data in self._files.items():
                file = self._path / name
                if not file.exists():
                    file.write_bytes(data)
        return self._path

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer; loaded when first asked for."""
        path = self.path
        with self._lock:
            if self._tokenizer is None:
                from transformers import AutoTokenizer

                self._tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        return self._tokenizer

    @own()
    def engine(self) -> tuple[EngineLoop, Tokens]:
        """The running engine and its tokenizer. Raises ``FunctionError`` where the model does not generate text."""
        with self._lock:
            if self._engine is None:
                self._engine = self._start_engine()
                if self._on_lost is not None:
                    self._engine[0].on_lost(self._on_lost)
            return self._engine

    def use_loop(self, mailbox: Mailbox) -> None:
        """Coroutines get their tokens through ``mailbox``."""
        self._mailbox = mailbox

    def on_lost(self, call: Callable[[SllmError], None]) -> None:
        """See ``EngineLoop.on_lost``; also of an engine that begins only when it is first asked."""
        self._on_lost = call  # first: whoever begins the engine just now finds it, or is found here
        if self._engine is not None:
            self._engine[0].on_lost(call)

    @property
    def context(self) -> int:
        """See ``EngineLoop.context``; 0 before the engine runs."""
        return self._engine[0].context if self._engine is not None else 0

    def close(self) -> None:
        """Stop the engine. Repeatable."""
        if self._engine is not None:
            self._engine[0].close()

    def generate(self, prompt: Prompt, *, max_tokens: int = 256, **sampling: Any) -> Iterator[str]:
        """Pieces of text as they become final; see ``sllm.Model.generate``. For threads.

        Raises ``InvalidArgument`` for a sampling parameter that is wrong, ``ContextLengthExceeded``, ``FunctionError``.
        """
        return self._pieces(*self._request(_asked(prompt, max_tokens, sampling)))

    def agenerate(self, prompt: Prompt, *, max_tokens: int = 256, **sampling: Any) -> AsyncIterator[str]:
        """``generate`` for coroutines. What is wrong with the prompt, or with a shape, is raised by its iteration."""
        return self._apieces(_asked(prompt, max_tokens, sampling))

    @own()
    def _request(self, asked: Asked) -> tuple[EngineLoop, Request]:
        loop, tokens = self.engine()
        return loop, prompts.request(asked, loop.engine, tokens, self._files)

    def _pieces(self, loop: EngineLoop, request: Request) -> Iterator[str]:
        sink = ThreadSink()
        with own():
            run = Generation(loop, request)
            with run.submitted(sink):
                for piece in sink:
                    run.heard(piece)
                    if piece.text:
                        yield piece.text

    async def _apieces(self, asked: Asked) -> AsyncIterator[str]:
        with own():
            if self._mailbox is None:
                raise FunctionError("agenerate() needs the worker's event loop; use generate() in threads")
            number = next_number()
            # In a thread: rendering, tokenizing and compiling a shape take as long as a prompt is, and the loop has
            # others to serve; so does who else has the lock.
            loop, request = await aside(self._request, asked)
            run = Generation(loop, request, number=number)
            sink = AsyncSink(self._mailbox.here())
            with run.submitted(sink):
                async for piece in sink:
                    run.heard(piece)
                    if piece.text:
                        yield piece.text


@own()
def _asked(prompt: Prompt, max_tokens: int, options: Mapping[str, Any]) -> Asked:
    return Asked.of(prompt, max_tokens, options)
