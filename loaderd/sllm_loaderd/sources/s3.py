"""Source: a prefix of an S3 bucket. Credentials, region and endpoint come by boto3's own chain
(`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL_S3`, profiles, instance roles)."""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sllm_loaderd.files import is_small_file
from sllm_loaderd.sources import Progress
from sllm_runtime.protocol.checkpoint import INDEX_NAME, is_plain_name
from sllm_runtime.protocol.errors import Forbidden, InvalidCheckpoint, ModelNotFound, SllmError, Unavailable

_MOST_OBJECTS = 10_000


@dataclass(frozen=True, slots=True)
class _Object:
    name: str
    key: str
    size: int
    etag: str


class S3Source:
    """The objects directly under ``bucket/prefix``."""

    def __init__(self, rest: str) -> None:
        bucket, _, prefix = rest.partition("/")
        if not bucket:
            raise InvalidCheckpoint(f"s3://{rest}: give s3://bucket/prefix", field="model")
        self._bucket = bucket
        self._prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""
        self._uri = f"s3://{bucket}/{self._prefix}"

    def fingerprint(self) -> str:
        """Names, sizes and entity tags of the objects."""
        return _fingerprint(self._objects(self._client()))

    def fetch(self, cache: Path, progress: Progress | None = None) -> Path:
        """A directory in ``cache`` named by the fingerprint; each object appears there whole or not at all."""
        client = self._client()
        objects = self._objects(client)
        target = cache / "s3" / _fingerprint(objects).partition(":")[2]
        target.mkdir(parents=True, exist_ok=True)
        done, total = 0, sum(entry.size for entry in objects)
        for entry in objects:
            if not (target / entry.name).exists():
                self._download(client, entry, target)
            done += entry.size
            if progress is not None:
                progress(done, total)
        return target

    def _client(self) -> Any:
        import boto3
        from botocore.config import Config

        return boto3.client("s3", config=Config(connect_timeout=10, read_timeout=60, retries={"max_attempts": 4}))

    def _objects(self, client: Any) -> list[_Object]:
        found = []
        try:
            pages = client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix, Delimiter="/", PaginationConfig={"MaxItems": _MOST_OBJECTS}
            )
            for page in pages:
                for item in page.get("Contents", []):
                    name = item["Key"].removeprefix(self._prefix)
                    if is_plain_name(name) and _wanted(name):
                        found.append(_Object(name, item["Key"], item["Size"], item["ETag"].strip('"')))
        except Exception as error:
            raise self._error(error) from error
        if not found:
            raise ModelNotFound(f"{self._uri} holds no model files; check bucket and prefix", field="model")
        return sorted(found, key=lambda entry: entry.name)

    def _download(self, client: Any, entry: _Object, target: Path) -> None:
        """One object in parallel ranges; refused if it changes meanwhile (If-Match)."""
        from boto3.s3.transfer import TransferConfig

        part = target / f".{entry.name}.{secrets.token_hex(4)}.part"
        try:
            client.download_file(
                self._bucket,
                entry.key,
                str(part),
                Config=TransferConfig(multipart_chunksize=16 * 2**20, max_concurrency=8),
            )
            # If-Match (sent by the transfer) is not honoured by every server.
            now = client.head_object(Bucket=self._bucket, Key=entry.key)["ETag"].strip('"')
            if part.stat().st_size != entry.size or now != entry.etag:
                raise Unavailable(f"{self._uri}{entry.name} changed while it was fetched; try again")
            os.rename(part, target / entry.name)
        except SllmError:
            raise
        except Exception as error:
            raise self._error(error) from error
        finally:
            part.unlink(missing_ok=True)

    def _error(self, error: Exception) -> SllmError:
        """botocore's errors (any class of a dozen) as ours."""
        from botocore.exceptions import BotoCoreError, ClientError

        if isinstance(error, ClientError):
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            if status in (401, 403):
                return Forbidden(f"{self._uri} is refused ({status}): {error}; check the credentials", field="model")
            if status == 404:
                return ModelNotFound(f"{self._uri} is not there: {error}", field="model")
            return Unavailable(f"{self._uri}: the object store answered {status}: {error}")
        if isinstance(error, (BotoCoreError, OSError)):
            return Unavailable(f"{self._uri} cannot be fetched: {error}; check endpoint, credentials and disk space")
        raise error


def _fingerprint(objects: list[_Object]) -> str:
    digest = hashlib.sha256()
    for entry in objects:
        digest.update(f"{entry.name}\0{entry.size}\0{entry.etag}\n".encode())
    return f"objects:{digest.hexdigest()}"


def _wanted(name: str) -> bool:
    weights = name.endswith((".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json"))
    return weights or is_small_file(name) or name == INDEX_NAME
