"""A client that says what a request waits for, where that is a controller."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from pydantic import ValidationError

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


@contextmanager
def _told(profile: Profile) -> Iterator[None]:
    over = threading.Event()
    threading.Thread(target=_tell, args=(profile, over), name="told", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _tell(profile: Profile, over: threading.Event) -> None:
    if over.wait(TOLD_AFTER_S):
        return
    with suppress(SllmError, ValidationError), Client(profile=profile, timeout=STATUS_S, retry=NEVER) as asks:
        asked = asks.url
        try:
            waits = None if StatusView.model_validate(asks.request("GET", f"{API}/status")).controller else WAITS
        except InstanceLost:  # it took the connection, and says nothing
            waits = SILENT.format(asked)
        if waits is not None and not over.is_set():
            output.note(waits)
