"""Which platform to talk to: flag over environment over ``sllm.toml`` over the default profile.

Profiles stand in ``<SLLM_HOME or ~/.sllm>/profiles.toml`` (mode 0600, since they hold tokens).
"""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from sllm_runtime.protocol.errors import InvalidRequest, NotFound

DEFAULT_URL: Final = "http://127.0.0.1:8600"
PROJECT_FILE: Final = "sllm.toml"


@dataclass(frozen=True)
class Profile:
    """Where the gateway is and how to be let in. ``token`` never shows in a ``repr``."""

    url: str
    token: str | None = None
    name: str = "default"
    others: tuple[str, ...] = ()
    """Further gateways of the same platform, where a stream that broke off is read on."""

    @property
    def urls(self) -> tuple[str, ...]:
        """All gateways, ``url`` first."""
        return (self.url, *(other for other in self.others if other != self.url))

    def __repr__(self) -> str:
        return f"Profile(name={self.name!r}, url={self.url!r}, token={'set' if self.token else None})"


def home() -> Path:
    """The directory of profiles and of the embedded platform."""
    return Path(os.environ.get("SLLM_HOME") or Path.home() / ".sllm")


def profiles_file() -> Path:
    return home() / "profiles.toml"


class _Stored(msgspec.Struct):
    url: str = ""
    token: str | None = None
    urls: tuple[str, ...] = ()


class _Document(msgspec.Struct):
    """What is read of the two files, which a person may have written; other keys are the owner's."""

    url: str | None = None
    profile: str | None = None
    profiles: dict[str, _Stored] = {}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        msgspec.convert(found, _Document)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, msgspec.ValidationError) as error:  # no UTF-8, no TOML, or a value of another type
        raise InvalidRequest(f"{path} cannot be read: {error}") from error
    return found


def project_settings() -> dict[str, Any]:
    """``sllm.toml`` of the current directory or the nearest above."""
    for directory in (Path.cwd(), *Path.cwd().parents):
        if (directory / PROJECT_FILE).is_file():
            return _read(directory / PROJECT_FILE)
    return {}


def stored() -> list[Profile]:
    """All profiles, by name."""
    found = _read(profiles_file()).get("profiles", {})
    return [Profile(str(each.get("url", "")), each.get("token"), name) for name, each in sorted(found.items())]


def save(name: str, url: str, token: str | None) -> Path:
    """Set profile ``name``; others stay. Returns the file, mode 0600. Raises ``InvalidRequest``."""
    document = _read(profiles_file())
    document.setdefault("profiles", {})[name] = {"url": _url(url)} | ({"token": _token(token)} if token else {})
    return _write(document)


def remove(name: str) -> None:
    """Take profile ``name`` away. Raises ``NotFound`` where there is none."""
    document = _read(profiles_file())
    if document.get("profiles", {}).pop(name, None) is None:
        raise NotFound(f"profile {name!r} is not in {profiles_file()}", field="profile")
    _write(document)


def _write(document: dict[str, Any]) -> Path:
    # JSON's texts, numbers and truths are TOML's too.
    lines = [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in document.items() if key != "profiles"]
    for name, fields in document.get("profiles", {}).items():
        lines += ["", f"[profiles.{json.dumps(name)}]"]
        lines += [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in fields.items()]
    path = profiles_file()
    try:
        _replace(path, "\n".join(lines).lstrip("\n") + "\n")
    except OSError as error:
        raise InvalidRequest(
            f"{path} cannot be written ({error.strerror}); choose a directory that you may write by SLLM_HOME"
        ) from error
    return path


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, new = tempfile.mkstemp(dir=path.parent, prefix=".profiles-")  # mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(new, path)
    except BaseException:
        os.unlink(new)
        raise


@dataclass(frozen=True)
class Given:
    """What arguments, environment and ``sllm.toml`` say; ``None``: nothing."""

    url: str | None
    token: str | None


def given(url: str | None = None, token: str | None = None) -> Given:
    """Arguments win, then ``SLLM_URL`` and ``SLLM_TOKEN``, then ``url`` of ``sllm.toml``."""
    found = url or os.environ.get("SLLM_URL") or project_settings().get("url")
    return Given(_url(found) if found else None, _token(token or os.environ.get("SLLM_TOKEN")))


def load(name: str | None = None, *, url: str | None = None, token: str | None = None) -> Profile:
    """The profile to use. Arguments win, then ``SLLM_URL``, ``SLLM_TOKEN``, ``SLLM_PROFILE``, then the files.

    Raises ``InvalidRequest`` for a profile that was asked for and is not there.
    """
    asked = name or os.environ.get("SLLM_PROFILE") or project_settings().get("profile")
    known = _read(profiles_file()).get("profiles", {})
    if asked and asked not in known:
        have = ", ".join(sorted(known)) or "none yet; `sllm up` writes one"
        raise InvalidRequest(f"profile {asked!r} is not in {profiles_file()} (there: {have})", field="profile")
    kept = known.get(asked or "default", {})
    said = given(url, token)
    # A profile that is named on the command line means its own platform, whatever the environment says.
    if name and not url:
        said = Given(None, token)
    # A stored token belongs to its own URL: it is never sent to another host by accident.
    is_own = said.url in (None, str(kept.get("url", "")).rstrip("/"))
    own, others = (kept.get("token"), kept.get("urls", [])) if is_own else (None, [])
    url_ = _url(said.url or kept.get("url") or DEFAULT_URL)
    return Profile(url_, said.token or _token(own), asked or "default", tuple(_url(other) for other in others))


def _url(url: str) -> str:
    if not _leads_to_a_host(url):
        raise InvalidRequest(f"{url!r} is no URL of a gateway; write http://host:port or https://host", field="url")
    return url.rstrip("/")


def _leads_to_a_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        host, _port = (parts.hostname or "").encode("idna"), parts.port
    except ValueError:  # a port that is none, half an IPv6 address, a name that no host can have
        return False
    return parts.scheme in ("http", "https") and bool(host) and url.isprintable()


def _token(token: str | None) -> str | None:
    if token and not (token.isascii() and token.isprintable()):
        raise InvalidRequest("the token holds a character that no token has", field="token")
    return token or None
