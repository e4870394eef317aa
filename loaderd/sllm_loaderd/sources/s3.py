"""Source: a prefix of an S3 bucket. Credentials, region and endpoint come by boto3's own chain
(`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL_S3`, profiles, instance roles); the bytes come by our own range requests."""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from sllm_loaderd.files import gguf_parts
from sllm_loaderd.reader import SourceClosed
from sllm_loaderd.sources import MAX_ENTRIES, Entry
from sllm_loaderd.sources.attempts import TryAgain
from sllm_loaderd.sources.listing import fingerprint, wanted
from sllm_loaderd.sources.remote import RENEWED_S, Remote
from sllm_loaderd.sources.remote_object import RemoteObject
from sllm_loaderd.sources.resolving import Resolving
from sllm_runtime.protocol.checkpoint import is_plain_name
from sllm_runtime.protocol.errors import Forbidden, InvalidCheckpoint, ModelNotFound, SllmError, Unavailable
from sllm_runtime.protocol.loader import path_of

_REMEDY = "check the credentials (AWS_ACCESS_KEY_ID, AWS_PROFILE …) and their rights"
CREDENTIALS_S: Final = 30.0
"""What gives credentials may be a program (``credential_process``), for which botocore waits for ever, or a service."""
_RENEWED_AHEAD_S: Final = 15 * 60 + 5
"""botocore renews credentials from 15 minutes before they expire on."""
_GOOD_S: Final = 60
"""Those that have so long yet are signed with, where no others come."""
_SCOPE = re.compile(r"X-Amz-Credential=[^&]*%2F\d{8}%2F(?P<region>[^%&]+)%2Fs3%2Faws4_request")


class S3Source:
    """The objects directly under ``bucket/prefix``, or those of the one GGUF model that is named."""

    def __init__(self, rest: str) -> None:
        bucket, _, prefix = rest.partition("/")
        if not bucket:
            raise InvalidCheckpoint(f"s3://{rest}: give s3://bucket/prefix", field="model")
        above, _, name = prefix.rpartition("/")
        self._parts = frozenset(part.name for part in gguf_parts(Path(name))) if name.endswith(".gguf") else None
        prefix = prefix if self._parts is None else above
        self._bucket = bucket
        self._prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""
        self._base = f"s3://{bucket}/{self._prefix}"
        self.uri = self._base if self._parts is None else self._base + name
        self.path = path_of(self.uri)
        self._access: _Access | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._opening = Resolving(self._open, f"{self.uri}: credentials", CREDENTIALS_S)

    def fingerprint(self) -> str:
        """Names, sizes and entity tags of the objects."""
        return fingerprint(self.entries())

    def local(self) -> Path | None:
        return None

    def entries(self) -> list[Entry]:
        access = self._opened()
        found = []
        try:
            pages = access.client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix, Delimiter="/", PaginationConfig={"MaxItems": MAX_ENTRIES}
            )
            for page in pages:
                for item in page.get("Contents", []):
                    name = item["Key"].removeprefix(self._prefix)
                    if is_plain_name(name) and (wanted(name) if self._parts is None else name in self._parts):
                        found.append(Entry(name, item["Size"], item["ETag"].strip('"')))
        except Exception as error:
            raise _typed(self.uri, error) from error
        if not found:
            raise ModelNotFound(f"{self.uri} holds no model files; check bucket and prefix", field="model")
        return sorted(found, key=lambda entry: entry.name)

    def open(self, entry: Entry) -> RemoteObject:
        access = self._opened()
        return RemoteObject(access.remote, access.base + quote(entry.name), entry, f"{self._base}{entry.name}")

    def close(self) -> None:
        self._opening.close()
        with self._lock:
            self._closed, access, self._access = True, self._access, None
        if access is not None:
            access.close()

    def _opened(self) -> _Access:
        return self._access or self._opening.get()

    def _open(self) -> _Access:
        """Blocks for as long as what gives credentials takes."""
        if self._access is not None:  # another one has just ended
            return self._access
        try:
            with _nonsense():
                access = _Access(self.uri, self._bucket, self._prefix, self.path)
        except Exception as error:
            raise _typed(self.uri, error) from error
        with self._lock:
            if not self._closed:
                self._access = access
                return access
        access.close()
        raise SourceClosed(f"{self.uri}: the source was closed while it was opened")


def _typed(uri: str, error: Exception) -> SllmError:
    """botocore's errors (any class of a dozen) as ours. Raises what is none of them."""
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

    if isinstance(error, SllmError):
        return error
    if isinstance(error, NoCredentialsError):
        return Forbidden(f"{uri}: no credentials were found; {_REMEDY}", field="model")
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if status in (401, 403):
            return Forbidden(f"{uri} is refused ({status}): {error}; {_REMEDY}", field="model")
        if status == 404:
            return ModelNotFound(f"{uri} is not there: {error}", field="model")
        return Unavailable(f"{uri}: the object store answered {status}: {error}")
    if isinstance(error, (RuntimeError, ValueError)):  # what is to give keys gives lapsed ones, or prints anything
        return Forbidden(f"{uri} cannot be used: {error}; check the endpoint, or {_REMEDY}", field="model")
    if isinstance(error, (BotoCoreError, OSError)):
        return Unavailable(f"{uri} cannot be reached: {error}; check endpoint and credentials")
    raise error


@contextlib.contextmanager
def _nonsense() -> Iterator[None]:
    """A program that is to print credentials may print anything, into which botocore looks without a check. Raises
    ``ValueError`` for what that raises."""
    try:
        yield
    except (AttributeError, TypeError, LookupError, ArithmeticError) as error:
        raise ValueError(f"what gives the credentials says nonsense ({error!r})") from error


class _Access:
    """What botocore resolved: client, address of the prefix, region and credentials to sign with."""

    def __init__(self, uri: str, bucket: str, prefix: str, path: str) -> None:
        import boto3
        from botocore.config import Config

        session = boto3.Session()
        config = Config(connect_timeout=10, read_timeout=60, retries={"max_attempts": 4}, signature_version="s3v4")
        self.client: Any = session.client("s3", config=config)
        self._credentials = session.get_credentials()
        self._signed: Any = None
        """The keys that were signed with last."""
        self._signed_until: datetime | None = None
        """When those expire: the credentials themselves may have got lapsed ones since."""
        self._ask_at = -math.inf
        """Before, what gives the credentials is not asked for others while those are good: it has just failed."""
        # The one public way to botocore's endpoint rules: region redirects, addressing style, access points.
        url = self.client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": f"{prefix}-"})
        address, _, query = url.partition("?")
        scope = _SCOPE.search(query)
        self._region = scope["region"] if scope else self.client.meta.region_name
        self.base = address.removesuffix("-")
        self._uri = uri
        self._keys = Resolving(self._frozen, f"{uri}: renewed credentials", CREDENTIALS_S)
        self._others = Resolving(self._found_anew, f"{uri}: other credentials", CREDENTIALS_S)
        self._lock, self._renewed = threading.Lock(), -math.inf
        self.remote = Remote(path, self._sign, remedy=_REMEDY, renew=self._renew)

    def close(self) -> None:
        """End what reads and waits; repeatable."""
        self._keys.close()
        self._others.close()
        self.remote.close()
        self.client.close()

    def _renew(self) -> bool:
        """As ``Remote`` asks for it: keys in files are replaced while this runs, and botocore reads these once."""
        from botocore.exceptions import BotoCoreError, ClientError

        with self._lock:
            if time.monotonic() - self._renewed < RENEWED_S:  # those of a role are others each time that it is asked
                return True
            # A file that is just being written; a role that is refused, or that nobody gives, too.
            with contextlib.suppress(BotoCoreError, ClientError, OSError, RuntimeError, ValueError, Unavailable):
                if (found := self._others.get()) is not None:
                    self._credentials, self._signed, self._renewed = found, None, time.monotonic()
                    self._ask_at = -math.inf
            return time.monotonic() - self._renewed < RENEWED_S

    def _found_anew(self) -> Any:
        """Credentials, where there are others by now than those that there are."""
        import boto3

        with _nonsense():
            found = boto3.Session().get_credentials()
            return None if found is None or found.get_frozen_credentials() == self._signed else found

    def _frozen(self) -> Any:
        """Renewed by botocore where they are about to expire."""
        return self._credentials.get_frozen_credentials()

    def _good(self) -> bool:
        """Whether the keys that were signed with last are to be had without others."""
        until = self._signed_until
        return self._signed is not None and until is not None and (until - datetime.now(UTC)).total_seconds() > _GOOD_S

    def _own(self) -> Any:
        """The keys of now, and from now on those that were signed with last."""
        from botocore.credentials import RefreshableCredentials

        own = self._credentials
        expire = isinstance(own, RefreshableCredentials)
        with _nonsense():
            keys = self._keys.get() if expire and own.refresh_needed(_RENEWED_AHEAD_S) else self._frozen()
            self._signed, self._signed_until = keys, own._expiry_time if expire else None  # there is no public way
        return keys

    def _sign(self, method: str, url: str, headers: Mapping[str, str], to: Any) -> Mapping[str, str]:
        """Signature version 4. Frozen credentials are renewed by botocore when they expire: where it gets no others (a
        role that is refused by now, a login that is over), that is as if these had been refused."""
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest

        last, good = self._signed, self._good()
        try:
            keys = last if good and time.monotonic() < self._ask_at else self._own()
        except Exception as error:
            others = not isinstance(error, SllmError) and self._renew()  # beside what hangs nobody else is asked
            if others or not good:
                refused = _typed(self._uri, error)
                raise (TryAgain(refused) if others or isinstance(refused, Unavailable) else refused) from error
            keys, self._ask_at = last, time.monotonic() + RENEWED_S
        request = AWSRequest(method, url, headers=dict(headers))
        S3SigV4Auth(keys, "s3", self._region).add_auth(request)
        return dict(request.headers.items())
