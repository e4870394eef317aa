"""Source: a Hugging Face hub, `hf://org/name[@revision]`. safetensors only, never code.

`HF_TOKEN`, `HF_ENDPOINT` and `HF_HUB_OFFLINE` work as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from sllm_loaderd.files import is_small_file
from sllm_loaderd.sources import Progress
from sllm_runtime.protocol.errors import (
    Forbidden,
    InvalidCheckpoint,
    ModelNotFound,
    SllmError,
    Unavailable,
    UnsupportedModel,
)

T = TypeVar("T")


class HubSource:
    """A repository of models at one revision (default ``main``)."""

    def __init__(self, rest: str) -> None:
        name, _, revision = rest.strip("/").partition("@")
        if name.count("/") > 1 or not name:
            raise InvalidCheckpoint(f"hf://{rest}: give hf://org/name@revision", field="model")
        self._name = name
        self._revision = revision or "main"

    def fingerprint(self) -> str:
        """The commit that the revision is now."""
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            return f"offline:{self._revision}"
        return f"commit:{self._info()[0]}"

    def fetch(self, cache: Path, progress: Progress | None = None) -> Path:
        """The snapshot in ``cache``; files that are there already are not fetched again."""
        from huggingface_hub import constants, snapshot_download

        hub = cache / "hub"
        if constants.HF_HUB_OFFLINE:
            return self._call(lambda: Path(snapshot_download(self._name, revision=self._revision, cache_dir=hub)))
        commit, files = self._info()
        wanted = {name: size for name, size in files.items() if _wanted(name)}
        if not any(name.endswith(".safetensors") for name in wanted):
            raise UnsupportedModel(
                f"hf://{self._name} has no safetensors; only these are fetched. Convert a local copy instead",
                field="model",
            )
        return self._download(commit, wanted, hub, progress)

    def _download(self, commit: str, wanted: dict[str, int], hub: Path, progress: Progress | None) -> Path:
        from huggingface_hub import hf_hub_download

        done, total = 0, sum(wanted.values())
        path = hub
        for name, size in sorted(wanted.items()):
            path = Path(self._call(partial(hf_hub_download, self._name, name, revision=commit, cache_dir=hub)))
            done += size
            if progress is not None:
                progress(done, total)
        return path.parent

    def _info(self) -> tuple[str, dict[str, int]]:
        from huggingface_hub import HfApi

        info = self._call(lambda: HfApi().model_info(self._name, revision=self._revision, files_metadata=True))
        files = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
        return info.sha or self._revision, files

    def _call(self, action: Callable[[], T]) -> T:
        """The result of ``action``, the hub's errors as ours."""
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            return action()
        except LocalEntryNotFoundError as error:
            raise ModelNotFound(
                f"hf://{self._name}@{self._revision} is not in the cache: {error}", field="model"
            ) from error
        except HfHubHTTPError as error:
            raise self._refused(error.response.status_code, error) from error
        # The hub's library lets through the errors of the HTTP library it is built on, which is not always the same.
        except Exception as error:
            if isinstance(error, (OSError, ValueError)) or type(error).__module__.startswith(("httpx", "requests")):
                raise Unavailable(
                    f"hf://{self._name} cannot be fetched: {error}; see HF_ENDPOINT and the network"
                ) from error
            raise

    def _refused(self, status: int, error: Exception) -> SllmError:
        name = f"hf://{self._name}@{self._revision}"
        if status == 404:
            return ModelNotFound(f"{name} is not there", field="model")
        if status in (401, 403):
            return Forbidden(f"{name} is refused ({status}); set HF_TOKEN to a token with access", field="model")
        return Unavailable(f"{name}: the hub answered {status}: {error}")


def _wanted(name: str) -> bool:
    return "/" not in name and (name.endswith((".safetensors", ".safetensors.index.json")) or is_small_file(name))
