"""Source: a Hugging Face hub, `hf://org/name[@revision]`. safetensors only, never code.

`HF_TOKEN`, `HF_ENDPOINT` and `HF_HUB_OFFLINE` work as everywhere.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from sllm_loaderd.files import is_small_file
from sllm_loaderd.sources import Entry
from sllm_loaderd.sources.attempts import RemoteLimits
from sllm_loaderd.sources.remote import RENEWED_S, Remote
from sllm_loaderd.sources.remote_object import RemoteObject
from sllm_runtime.protocol.errors import (
    Forbidden,
    InvalidCheckpoint,
    ModelNotFound,
    SllmError,
    Unavailable,
    UnsupportedModel,
)
from sllm_runtime.protocol.loader import path_of

T = TypeVar("T")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_REMEDY: Final = "set HF_TOKEN to a token with access"


class HubSource:
    """A repository of models at one revision (default ``main``)."""

    def __init__(self, rest: str) -> None:
        name, _, revision = rest.strip("/").partition("@")
        if name.count("/") > 1 or not name:
            raise InvalidCheckpoint(f"hf://{rest}: give hf://org/name@revision", field="model")
        self._name = name
        self._revision = revision or "main"
        self.uri = f"hf://{name}"
        self._label = f"{self.uri}@{self._revision}"
        self.path = path_of(self.uri)
        self._listed: tuple[str, list[Entry]] | None = None
        self._remote: Remote | None = None
        self._lock = threading.Lock()

    def fingerprint(self) -> str:
        """The commit that the revision is now."""
        from huggingface_hub import constants

        if _COMMIT.fullmatch(self._revision):
            return f"commit:{self._revision}"
        return f"offline:{self._revision}" if constants.HF_HUB_OFFLINE else f"commit:{self._info()[0]}"

    def local(self) -> Path | None:
        """Offline: the snapshot in the hub's own cache."""
        from huggingface_hub import constants, snapshot_download

        if not constants.HF_HUB_OFFLINE:
            return None
        return self._call(lambda: Path(snapshot_download(self._name, revision=self._revision)))

    def entries(self) -> list[Entry]:
        entries = self._info()[1]
        if not any(entry.name.endswith(".safetensors") for entry in entries):
            raise UnsupportedModel(
                f"{self._label} has no safetensors; only these are fetched. Convert a local copy instead", field="model"
            )
        return entries

    def open(self, entry: Entry) -> RemoteObject:
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(self._name, entry.name, revision=self._info()[0])
        with self._lock:
            if self._remote is None:
                keys = _Token(url)
                self._remote = Remote(self.path, keys.sign, remedy=_REMEDY, renew=keys.renew)
        # The tag of the listing is git's, the one of the answer the store's: the commit in the address fixes the bytes.
        return RemoteObject(self._remote, url, Entry(entry.name, entry.nbytes), f"{self._label}/{entry.name}")

    def close(self) -> None:
        if self._remote is not None:
            self._remote.close()
            self._remote = None

    def _info(self) -> tuple[str, list[Entry]]:
        """Commit and files, asked once."""
        from huggingface_hub import HfApi

        if self._listed is None:
            info = self._call(
                lambda: HfApi().model_info(
                    self._name, revision=self._revision, files_metadata=True, timeout=RemoteLimits().stall_s
                )
            )
            files = [Entry(s.rfilename, s.size or 0, s.blob_id or "") for s in info.siblings or []]
            entries = sorted((entry for entry in files if _wanted(entry.name)), key=lambda entry: entry.name)
            self._listed = (info.sha or self._revision, entries)
        return self._listed

    def _call(self, action: Callable[[], T]) -> T:
        """The result of ``action``, the hub's errors as ours."""
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            return action()
        except LocalEntryNotFoundError as error:
            raise ModelNotFound(f"{self._label} is not in the cache: {error}", field="model") from error
        except HfHubHTTPError as error:
            raise self._refused(error.response.status_code, error) from error
        # The hub's library lets through the errors of the HTTP library it is built on, which is not always the same.
        except Exception as error:
            if isinstance(error, (OSError, ValueError)) or type(error).__module__.startswith(("httpx", "requests")):
                raise Unavailable(
                    f"{self._label} cannot be fetched: {error}; see HF_ENDPOINT and the network"
                ) from error
            raise

    def _refused(self, status: int, error: Exception) -> SllmError:
        if status == 404:
            return ModelNotFound(f"{self._label} is not there", field="model")
        if status in (401, 403):
            return Forbidden(f"{self._label} is refused ({status}); {_REMEDY}", field="model")
        return Unavailable(f"{self._label}: the hub answered {status}: {error}")


class _Token:
    """Signs requests to the hub itself; where it redirects to gets no token."""

    def __init__(self, hub_url: str) -> None:
        from huggingface_hub import get_token

        self._token, self._hub = get_token(), "/".join(hub_url.split("/")[:3]) + "/"
        self._lock, self._renewed = threading.Lock(), -math.inf

    def sign(self, method: str, url: str, headers: Mapping[str, str], to: Any) -> Mapping[str, str]:
        """As ``Sign``."""
        token = self._token
        return {**headers, "Authorization": f"Bearer {token}"} if token and url.startswith(self._hub) else headers

    def renew(self) -> bool:
        """As ``Remote`` asks for it: ``hf auth login`` writes another one into its file."""
        from huggingface_hub import get_token

        with self._lock:
            if (found := get_token()) != self._token:
                self._token, self._renewed = found, time.monotonic()
            return time.monotonic() - self._renewed < RENEWED_S


def _wanted(name: str) -> bool:
    return "/" not in name and (name.endswith((".safetensors", ".safetensors.index.json")) or is_small_file(name))
