"""Which platform to talk to: flag over environment over ``sllm.toml`` over the default profile.

Profiles stand in ``<SLLM_HOME or ~/.sllm>/profiles.toml`` (mode 0600, since they hold tokens). A file is read only for
what is not known without it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from sllm_runtime.protocol.errors import InvalidRequest, NotFound
from sllm_runtime.protocol.profiles import LOCK_FILE, PROFILES_FILE, profile_name, toml

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
    """The directory of profiles and of the embedded platform. Raises ``InvalidRequest`` where there is none."""
    if said := os.environ.get("SLLM_HOME"):
        return Path(said)
    try:
        return Path.home() / ".sllm"
    except RuntimeError as error:
        raise InvalidRequest("this user has no home directory; set SLLM_HOME to one for sllm's files") from error


def profiles_file() -> Path:
    return home() / PROFILES_FILE


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
        found = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # Windows' editors begin a file with a mark
        msgspec.convert(found, _Document)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, msgspec.ValidationError) as error:  # no UTF-8, no TOML, or a value of another type
        raise InvalidRequest(f"{path} cannot be read: {error}") from error
    return found


@dataclass(frozen=True)
class Project:
    """What the nearest ``sllm.toml`` says. It came with a directory, perhaps somebody else's: it is told no token."""

    file: Path | None = None
    url: str | None = None
    profile: str | None = None


def project() -> Project:
    """``sllm.toml`` of the current directory or the nearest above. Raises ``InvalidRequest`` for another user's, which
    may lie in any directory that others can write: it would lead who works below to wherever it likes."""
    for directory in (Path.cwd(), *Path.cwd().parents):
        file = directory / PROJECT_FILE
        try:
            there = file.stat()
        except OSError:  # not there, or not for us to see
            continue
        if not stat.S_ISREG(there.st_mode):
            continue
        if hasattr(os, "getuid") and there.st_uid not in (0, os.getuid()):
            raise InvalidRequest(f"{file} belongs to another user; say --url or --profile, SLLM_URL or SLLM_PROFILE")
        found = _read(file)
        return Project(file, found.get("url"), found.get("profile"))
    return Project()


def stored() -> list[Profile]:
    """All profiles, by name."""
    found = _read(profiles_file()).get("profiles", {})
    return [Profile(str(each.get("url", "")), each.get("token"), name) for name, each in sorted(found.items())]


def save(name: str, url: str, token: str | None) -> Path:
    """Set profile ``name``; others stay. Returns the file, mode 0600. Raises ``InvalidRequest``."""
    try:
        profile_name(name)
    except ValueError as error:
        raise InvalidRequest(str(error), field="name") from error
    with _changed() as known:
        before, new = known.get(name, {}), {"url": _url(url)} | ({"token": _token(token)} if token else {})
        if "urls" in before and str(before.get("url", "")).rstrip("/") == new["url"]:  # a new token for the same one
            new |= {"urls": before["urls"]}
        known[name] = new
    return profiles_file()


def remove(name: str) -> None:
    """Take profile ``name`` away. Raises ``NotFound`` where there is none."""
    with _changed() as known:
        if known.pop(name, None) is None:
            raise NotFound(f"profile {name!r} is not in {profiles_file()}", field="profile")


@contextlib.contextmanager
def _changed() -> Iterator[dict[str, Any]]:
    """The profiles, which are stored again as they are left; an error leaves the file as it is."""
    path = profiles_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _turn(path.with_name(LOCK_FILE)):
            document = _read(path)
            yield document.setdefault("profiles", {})
            _replace(path, toml(document))
    except OSError as error:
        raise InvalidRequest(
            f"{path} cannot be written ({error.strerror}); choose a directory that you may write by SLLM_HOME"
        ) from error


@contextlib.contextmanager
def _turn(lock: Path) -> Iterator[None]:
    """A platform of this machine writes profiles too, at its start and its end."""
    with os.fdopen(os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)) as file:
        with contextlib.suppress(ImportError):  # Windows, where no platform runs
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _replace(path: Path, text: str) -> None:
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
    """What arguments and environment say; ``None``: nothing."""

    url: str | None
    token: str | None


def given(url: str | None = None, token: str | None = None) -> Given:
    """Arguments win, then ``SLLM_URL`` and ``SLLM_TOKEN``."""
    found = url or os.environ.get("SLLM_URL")
    return Given(_url(found) if found else None, _token(token or os.environ.get("SLLM_TOKEN")))


def load(name: str | None = None, *, url: str | None = None, token: str | None = None) -> Profile:
    """The profile to use. Arguments win, then ``SLLM_URL``, ``SLLM_TOKEN``, ``SLLM_PROFILE``, then the files.

    Raises ``InvalidRequest`` for a profile that was asked for and is not there, and for a token whose URL only
    ``sllm.toml`` names.
    """
    # A profile that is named on the command line means its own platform, whatever the environment says.
    said = given(url, token) if url or not name else Given(None, _token(token))
    asked = name or os.environ.get("SLLM_PROFILE")
    near = Project() if said.url or asked else project()
    asked = asked or near.profile
    is_enough = said.url is not None and said.token is not None and name is None
    known = _known(is_enough)
    if asked and asked not in known and not is_enough:
        have = ", ".join(sorted(known)) or "none yet; `sllm up` writes one"
        raise InvalidRequest(f"profile {asked!r} is not in {profiles_file()} (there: {have})", field="profile")
    meant = said.url or (_url(near.url) if near.url else None)
    kept = _kept(known, asked or "default", meant)
    if near.url and said.token and not kept:
        shown = shlex.quote(str(meant))  # it is somebody's text, and may be copied into a shell
        raise InvalidRequest(
            f"{near.file} alone names {shown}, and a token goes only to a URL that was given together with it: if it "
            f"is for that platform, set SLLM_URL={shown} beside SLLM_TOKEN (or say --url beside --token), or store "
            f"both once with `sllm --url {shown} --token TOKEN profile set NAME`",
            field="token",
        )
    others = tuple(_url(other) for other in kept.get("urls", ()))
    own = _url(meant or kept.get("url") or DEFAULT_URL)
    return Profile(own, said.token or _token(kept.get("token")), asked or "default", others)


def _known(is_enough: bool) -> dict[str, Any]:
    """All profiles. Where what is given ``is_enough`` they are no more than a help, and may be what nobody can read."""
    try:
        found: dict[str, Any] = _read(profiles_file()).get("profiles", {})
    except InvalidRequest:
        if not is_enough:
            raise
        return {}
    return found


def _kept(known: dict[str, Any], name: str, url: str | None) -> dict[str, Any]:
    """What is stored as ``name``, or of the platform at ``url``, by that name or another: a stored token belongs to its
    own URL, and is sent to no other host."""
    if url is None:
        return dict(known.get(name, {}))
    stored = (known[each] for each in (name, *sorted(known)) if each in known)
    return next((dict(each) for each in stored if str(each.get("url", "")).rstrip("/") == url), {})


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
