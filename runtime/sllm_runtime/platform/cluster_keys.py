"""Keys of a NATS cluster of its own: one account, one scoped signing key for each kind of component, credentials made
from it for one name.

A scoped key's rights stand in the account, with the user's name for the identity: whoever holds a kind's key can speak
for any name of that kind, and for no other kind. So a machine makes its own credentials when it boots, and the servers
need not be told of it. What the account says is signed by the operator, whose key no machine has: with it a later
release gives the same account, and so the same streams, the rights that its components need.

    python -m sllm_runtime.platform.cluster_keys new DIR           the servers' accounts and all keys, once
    python -m sllm_runtime.platform.cluster_keys renew DIR         nats/accounts anew, by operator/seed: this release's
                                                                   rights
    python -m sllm_runtime.platform.cluster_keys rotate DIR KIND   another KIND/key, beside the one of before
    python -m sllm_runtime.platform.cluster_keys retire DIR KIND   from now on KIND/key alone: what another one has
                                                                   signed is refused
    python -m sllm_runtime.platform.cluster_keys join NAME         credentials for NAME, of the key on stdin
"""

from __future__ import annotations

import base64
import json
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
import nkeys

from sllm_runtime.platform.nats_server import write_private
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.errors import InvalidRequest
from sllm_runtime.protocol.secrets import SEALING_KEY_BYTES

KINDS: Final = ("controller", "gateway", "node")
ACCOUNTS: Final = "nats/accounts"
OPERATOR: Final = "operator/seed"
_NAME: Final = "the-one-meant"
_TEMPLATE: Final = "{{name()}}"
"""What the server replaces by the name in a user's JWT."""
_ANSWER_WITHIN_NS: Final = 120 * 10**9
_MOST_BYTES: Final = 8192
"""Of a value in AWS's parameter store, of the tier that has the larger ones."""
_NO_LIMIT: Final = {"subs": -1, "data": -1, "payload": -1}
_PLAIN: Final = {**_NO_LIMIT, "conn": -1, "leaf": 0, "imports": -1, "exports": -1, "wildcards": True}
"""Limits of an account, without JetStream."""
Keys: TypeAlias = dict[str, tuple[str, ...]]
"""Public keys by kind: one each, two while one is replaced."""


class SigningKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kind's key as it lies in a secret store: JSON."""

    kind: str
    account: str
    """Public key of the account."""
    seed: str

    def __repr__(self) -> str:
        return f"SigningKey({self.kind!r})"


@dataclass(frozen=True)
class Cluster:
    """What a new cluster is made of."""

    accounts: dict[str, Any]
    """Part of each server's configuration; holds no secret."""
    keys: dict[str, SigningKey]
    """By kind."""
    operator: str
    """The operator's seed."""


def new_cluster(now: int) -> Cluster:
    """Fresh keys. The account's own is thrown away: the operator's signs what it says."""
    operator, account, system = (
        _fresh(prefix) for prefix in (nkeys.PREFIX_BYTE_OPERATOR, nkeys.PREFIX_BYTE_ACCOUNT, nkeys.PREFIX_BYTE_ACCOUNT)
    )
    signing = {kind: _fresh(nkeys.PREFIX_BYTE_ACCOUNT) for kind in KINDS}
    public: Keys = {kind: (_public(key),) for kind, key in signing.items()}
    accounts = {
        "operator": _jwt(operator, _public(operator), "sllm", "operator", now),
        "system_account": _public(system),
        "resolver": "MEMORY",
        "resolver_preload": {
            _public(account): _account(operator, _public(account), public, now),
            _public(system): _jwt(operator, _public(system), "SYS", "account", now, limits=_PLAIN),
        },
    }
    keys = {kind: SigningKey(kind, _public(account), key.seed.decode()) for kind, key in signing.items()}
    return Cluster(accounts, keys, operator.seed.decode())


def renewed(accounts: dict[str, Any], operator: str, now: int) -> dict[str, Any]:
    """The accounts of a cluster with the rights of this release, of the same keys: its streams and all credentials stay
    what they are. ``operator``: its operator's seed. Raises ``InvalidRequest`` where that is another one's."""
    return _signed(accounts, operator, now, lambda keys: keys)


def rotated(
    accounts: dict[str, Any], operator: str, kind: str, old: SigningKey, now: int
) -> tuple[dict[str, Any], SigningKey]:
    """The accounts with another key of that kind beside ``old``, and that key. Raises ``InvalidRequest``, also where
    there are two already."""
    fresh = _fresh(nkeys.PREFIX_BYTE_ACCOUNT)

    def beside(keys: Keys) -> Keys:
        if keys[kind] != (_public_of(old),):
            raise InvalidRequest(f"{kind}/key is not the only key of a {kind}: `retire {kind}` the others first")
        return {**keys, kind: (*keys[kind], _public(fresh))}

    return _signed(accounts, operator, now, beside), SigningKey(kind, old.account, fresh.seed.decode())


def retired(accounts: dict[str, Any], operator: str, kind: str, key: SigningKey, now: int) -> dict[str, Any]:
    """The accounts with ``key`` alone of its kind's. Raises ``InvalidRequest``, also where it is none of them."""

    def alone(keys: Keys) -> Keys:
        if _public_of(key) not in keys[kind]:
            raise InvalidRequest(f"the account does not know {kind}/key: no {kind} could join")
        return {**keys, kind: (_public_of(key),)}

    return _signed(accounts, operator, now, alone)


def _signed(accounts: dict[str, Any], operator: str, now: int, change: Callable[[Keys], Keys]) -> dict[str, Any]:
    """The accounts anew, with the rights of this release. ``change``: of the keys that they have."""
    try:
        signer = nkeys.from_seed(operator.strip().encode())
        whose = _body(accounts["operator"])["iss"]
        told = {name: _body(token)["nats"] for name, token in accounts["resolver_preload"].items()}
        (name,) = (name for name, claims in told.items() if "signing_keys" in claims)
        scopes = told[name]["signing_keys"]
        keys = {role: tuple(s["key"] for s in scopes if s["role"] == role) for role in (s["role"] for s in scopes)}
    except (ValueError, LookupError, TypeError, AttributeError, nkeys.NkeysError) as error:
        text = f"no accounts, or no operator's seed ({error!r}); give files that `new` wrote"
        raise InvalidRequest(text) from error
    if whose != _public(signer):
        raise InvalidRequest("the accounts are another operator's; take the seed that was made with them")
    if missing := set(KINDS) - keys.keys():
        raise InvalidRequest(f"the account has no key of a {', '.join(sorted(missing))}: take a new cluster's")
    preload = {**accounts["resolver_preload"], name: _account(signer, name, change(keys), now)}
    return {**accounts, "resolver_preload": preload}


def credentials(key: SigningKey, name: str, now: int) -> str:
    """A credentials file for the component ``name`` of the key's kind. Raises ``InvalidRequest``."""
    try:
        subjects.token(name)
        signer = nkeys.from_seed(key.seed.encode())
    except (ValueError, nkeys.NkeysError) as error:
        raise InvalidRequest(f"no credentials for {name!r}: {error or 'the seed is none'}") from error
    user = _fresh(nkeys.PREFIX_BYTE_USER)
    token = _jwt(signer, _public(user), name, "user", now, issuer_account=key.account)
    return (
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
    )


def read_key(text: str) -> SigningKey:
    """The key that ``new`` wrote. Raises ``InvalidRequest``."""
    try:
        return msgspec.json.decode(text, type=SigningKey)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"this is no component's key ({error}); give a file that `new` wrote") from error


def write(cluster: Cluster, directory: Path) -> None:
    """Files below ``directory`` by the names that they have in the secret store; mode 0600."""
    _write_accounts(cluster.accounts, directory)
    write_private(directory / OPERATOR, cluster.operator + "\n")
    for key in cluster.keys.values():
        _write_key(key, directory)
    sealing = base64.urlsafe_b64encode(secrets.token_bytes(SEALING_KEY_BYTES)).decode()
    write_private(directory / "controller/secrets-key", sealing + "\n")
    write_private(directory / "node/peer-token", secrets.token_urlsafe(32) + "\n")
    write_private(directory / "gateway/token", secrets.token_urlsafe(32) + "\n")


def renew(directory: Path, now: int) -> None:
    """``renewed`` of what ``write`` has left below ``directory``. Raises ``InvalidRequest``."""
    _write_accounts(renewed(*_read(directory), now), directory)


def rotate(directory: Path, kind: str, now: int) -> None:
    """``rotated`` of what lies below ``directory``: ``KIND/key`` is the new one then. Raises ``InvalidRequest``."""
    accounts, key = rotated(*_read(directory), kind, _key(directory, kind), now)
    _write_accounts(accounts, directory)
    _write_key(key, directory)


def retire(directory: Path, kind: str, now: int) -> None:
    """``retired`` of what lies below ``directory``. Raises ``InvalidRequest``."""
    _write_accounts(retired(*_read(directory), kind, _key(directory, kind), now), directory)


def _read(directory: Path) -> tuple[dict[str, Any], str]:
    try:
        accounts = json.loads((directory / ACCOUNTS).read_text(encoding="utf-8"))
        return accounts, (directory / OPERATOR).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{ACCOUNTS} and {OPERATOR} below {directory} cannot be read: {error}") from error


def _key(directory: Path, kind: str) -> SigningKey:
    if kind not in KINDS:
        raise InvalidRequest(f"{kind!r} is no kind of component: give one of {', '.join(KINDS)}")
    try:
        return read_key((directory / kind / "key").read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(f"{kind}/key below {directory} cannot be read: {error}") from error


def _write_accounts(accounts: dict[str, Any], directory: Path) -> None:
    text = json.dumps(accounts, indent=1) + "\n"
    if len(text) > _MOST_BYTES:
        raise InvalidRequest(
            f"{ACCOUNTS} would have {len(text)} bytes, and a parameter takes {_MOST_BYTES}: "
            "`retire` another kind's key of before first"
        )
    write_private(directory / ACCOUNTS, text)


def _write_key(key: SigningKey, directory: Path) -> None:
    write_private(directory / key.kind / "key", msgspec.json.encode(key).decode() + "\n")


def _account(operator: nkeys.KeyPair, name: str, keys: Keys, now: int) -> str:
    """The account ``name`` (its public key), with the rights of each kind by its keys."""
    stored = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
    scopes = [_scope(kind, key) for kind in KINDS for key in keys[kind]]
    return _jwt(operator, name, "sllm", "account", now, limits={**_PLAIN, **stored}, signing_keys=scopes)


def _fresh(prefix: int) -> nkeys.KeyPair:
    return nkeys.from_seed(nkeys.encode_seed(secrets.token_bytes(32), prefix))


def _public(key: nkeys.KeyPair) -> str:
    return str(key.public_key.decode())


def _public_of(key: SigningKey) -> str:
    try:
        return _public(nkeys.from_seed(key.seed.encode()))
    except (ValueError, nkeys.NkeysError) as error:
        raise InvalidRequest(f"the seed of a {key.kind}'s key is none") from error


def _scope(kind: str, key: str) -> dict[str, Any]:
    rights = subjects.RIGHTS[kind](_NAME)
    template: dict[str, Any] = {
        "pub": {"allow": [subject.replace(_NAME, _TEMPLATE) for subject in rights.publish]},
        "sub": {
            "allow": [subject.replace(_NAME, _TEMPLATE) for subject in rights.subscribe],
            "deny": list(rights.unheard),
        },
        **_NO_LIMIT,
    }
    if rights.allow_responses:
        template["resp"] = {"max": 1, "ttl": _ANSWER_WITHIN_NS}
    return {"kind": "user_scope", "key": key, "role": kind, "template": template}


def _jwt(issuer: nkeys.KeyPair, subject: str, name: str, kind: str, now: int, **claims: Any) -> str:
    """A NATS JWT, version 2."""
    body = {"iss": _public(issuer), "sub": subject, "name": name, "iat": now, "jti": secrets.token_hex(16)}
    head = {"typ": "JWT", "alg": "ed25519-nkey"}
    signed = f"{_part(head)}.{_part({**body, 'nats': {'type': kind, 'version': 2, **claims}})}"
    return f"{signed}.{_base64(issuer.sign(signed.encode()))}"


def _body(token: str) -> dict[str, Any]:
    """What a JWT says; nothing is verified. Raises ``ValueError``."""
    part = token.split(".")[1]
    body: dict[str, Any] = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    return body


def _part(document: dict[str, Any]) -> str:
    return _base64(json.dumps(document, separators=(",", ":")).encode())


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def main(arguments: list[str]) -> int:
    """The command line above. The exit status."""
    now = int(time.time())
    try:
        match arguments:
            case ["new", directory]:
                write(new_cluster(now), Path(directory))
            case ["renew", directory]:
                renew(Path(directory), now)
            case ["rotate", directory, kind]:
                rotate(Path(directory), kind, now)
            case ["retire", directory, kind]:
                retire(Path(directory), kind, now)
            case ["join", name]:
                sys.stdout.write(credentials(read_key(sys.stdin.read()), name, now))
            case _:
                sys.stderr.write((__doc__ or "") + "\n")
                return 2
    except InvalidRequest as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
