"""A client that says what a request waits for, where that is a controller."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Final

import httpx
from pydantic import ValidationError

from sllm.answers import Trace
from sllm.cli import output
from sllm.client import Client
from sllm.profiles import Profile
from sllm.retry import NEVER
from sllm_runtime.protocol.errors import InstanceLost, SllmError
from sllm_runtime.protocol.http import API, StatusView
from sllm_runtime.protocol.limits import TOLD_AFTER_S

STATUS_S: Final = 5.0
WAITS: Final = "waiting for a controller that leads ..."
SILENT: Final = "{} has not answered for some seconds; it is waited for ..."


class Patient(Client):
    """The gateway waits while another controller takes over; after TOLD_AFTER_S stderr says so, if it is that;
    or that the gateway itself says nothing."""

    def request(self, method: str, path: str, **options: Any) -> Any:
        """As ``Client.request``."""
        with _told(self.profile):
            return super().request(method, path, **options)

    def call(self, name: str, arguments: Mapping[str, Any], **options: Any) -> Any:
        """As ``Client.call``."""
        with _told(self.profile, of_controller=False):
            return super().call(name, arguments, **options)

    def _sent(self, method: str, path: str, trace: Trace | None, **options: Any) -> httpx.Response:
        """Of a stream nothing is said by ``request``, and its gateway says itself what it waits for."""
        with _told(self.profile, of_controller=False) if options.get("stream") else nullcontext():
            return super()._sent(method, path, trace, **options)


@contextmanager
def _told(profile: Profile, *, of_controller: bool = True) -> Iterator[None]:
    """``of_controller``: whether one is waited for; what has an instance waits for none."""
    over = threading.Event()
    threading.Thread(target=_tell, args=(profile, over, of_controller), name="told", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _tell(profile: Profile, over: threading.Event, of_controller: bool) -> None:
    if over.wait(TOLD_AFTER_S):
        return
    with suppress(SllmError, ValidationError), Client(profile=profile, timeout=STATUS_S, retry=NEVER) as asks:
        asked = asks.url
        try:
            leads = StatusView.model_validate(asks.request("GET", f"{API}/status")).controller
            waits = None if leads or not of_controller else WAITS
        except InstanceLost:  # it took the connection, and says nothing
            waits = SILENT.format(asked)
        if waits is not None and not over.is_set():
            output.note(waits)
