"""Every NATS subject, bucket and stream, and who may use it. Least rights: an identity can speak only for itself."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import msgspec

TOKEN: Final = r"^[A-Za-z0-9_-]{1,80}$"
"""What can be one token of a subject, as settings and schemas say it."""
_TOKEN = re.compile(TOKEN)


def is_token(text: str) -> bool:
    """Whether ``text`` can be one token of a subject."""
    return _TOKEN.fullmatch(text) is not None


def token(text: str) -> str:
    """``text``, checked to be one token of a subject. Raises ``ValueError``."""
    if not is_token(text):
        raise ValueError(f"{text!r} cannot be part of a subject")
    return text


CTL: Final = "sllm.ctl"
LEADER: Final = "sllm.leader"
"""Leading controller → everybody, again and again: ``records.Term``. From then on nodes refuse commands of a smaller
one, and gateways ask the new one again."""


def ctl(verb: str) -> str:
    """Gateway → leading controller, request/reply."""
    return f"{CTL}.{token(verb)}"


def node_command(node: str, verb: str) -> str:
    """Controller → node, request/reply: start, stop, prepare, pull, keep, model."""
    return f"sllm.node.{token(node)}.{token(verb)}"


def node_open(node: str, gateway: str) -> str:
    """Gateway → node, request/reply: ``Open``."""
    return f"sllm.open.{token(node)}.{token(gateway)}"


def node_calls(node: str, gateway: str) -> str:
    """Gateway → node: ``ToNode``."""
    return f"sllm.call.{token(node)}.{token(gateway)}"


def frames(gateway: str, node: str) -> str:
    """Node → gateway: ``ToGateway``."""
    return f"sllm.frames.{token(gateway)}.{token(node)}"


def frames_of(gateway: str) -> str:
    """Filter for the frames of all nodes to one gateway."""
    return f"sllm.frames.{token(gateway)}.*"


def status(node: str) -> str:
    """Node → everybody: ``NodeStatus``."""
    return f"sllm.status.{token(node)}"


STATUS_ALL: Final = "sllm.status.*"


def logs(node: str, function: str) -> str:
    """Node → stream LOGS: ``LogRecord``."""
    return f"sllm.logs.{token(node)}.{token(function)}"


def logs_of(function: str) -> str:
    """Filter for all logs of one function."""
    return f"sllm.logs.*.{token(function)}"


def of_log(subject: str) -> tuple[str, str]:
    """Node and function of a subject that ``logs`` made."""
    _, _, node, function = subject.split(".")
    return node, function


def events_by(component: str, identity: str) -> str:
    """What one identity may tell: filter, and the subject that earlier releases told everything by."""
    return f"sllm.events.{token(component)}.{token(identity)}"


def event(component: str, identity: str, kind: str, function: str | None = None, call: str | None = None) -> str:
    """Anyone → stream EVENTS: ``Event``. ``kind`` as it has it: two words with a dot between."""
    first, _, second = kind.partition(".")
    about = f"{token(function or NOBODY)}.{token(call or NOBODY)}"
    return f"{events_by(component, identity)}.{token(first)}.{token(second)}.{about}"


def events_of(kind: str = "", function: str = "", call: str = "") -> tuple[str, ...]:
    """Filters for events of a kind (or of all that begin so: ``call`` of ``call.failed``), of a function, of a call;
    the last one is for those of earlier releases, which do not stand under what they are about."""
    if not (kind or function or call):
        return (EVENTS_ALL,)
    first, _, second = kind.partition(".")
    words = (first, second, function, call)
    return f"sllm.events.*.*.{'.'.join(token(word) if word else '*' for word in words)}", "sllm.events.*.*"


class Told(NamedTuple):
    """Who tells an event, and what it is of. ``kind`` is empty where the subject does not say that."""

    component: str
    identity: str
    kind: str = ""
    function: str | None = None
    call: str | None = None


def of_event(subject: str) -> Told | None:
    """Of a subject that ``event`` or ``events_by`` made; None: of no such one."""
    _, _, component, identity, *rest = subject.split(".")
    if not rest:
        return Told(component, identity)
    if len(rest) != 4:
        return None
    function, call = (None if word == NOBODY else word for word in rest[2:])
    return Told(component, identity, ".".join(rest[:2]), function, call)


NOBODY: Final = "_"
"""Stands in an event's subject where it is about no function, or no call."""


DECISIONS_STREAM: Final = "sllm_decisions"
DECISIONS: Final = "sllm.decisions.*"


def decision(function: str) -> str:
    """Controller → DECISIONS_STREAM: ``ctl.Explained`` of one start. The last few of each function are kept."""
    return f"{DECISIONS[:-1]}{token(function)}"


EVENTS_ALL: Final = "sllm.events.>"

# --- calls that are kept ---
JOURNAL_STREAM: Final = "sllm_journal"
CALLS_STREAM: Final = "sllm_calls"
BODIES_STREAM: Final = "sllm_bodies"
KEYS_STREAM: Final = "sllm_keys"
_KEPT: Final = {JOURNAL_STREAM: "sllm.journal", CALLS_STREAM: "sllm.calls", BODIES_STREAM: "sllm.bodies"}


def call_entry(stream: str, call: str, entry: str) -> str:
    """Gateway → JOURNAL_STREAM or, of a durable call, CALLS_STREAM: ``calls.Entry``; its body → BODIES_STREAM.
    ``entry``: ``calls.entry_name``."""
    return f"{_KEPT[stream]}.{token(call)}.{token(entry)}"


def call_entries(stream: str, call: str = "*", entry: str = "*") -> str:
    """Filter for entries of one call or all, of one kind or all."""
    return f"{_KEPT[stream]}.{call}.{entry}"


def key_claim(digest: str) -> str:
    """Gateway → KEYS_STREAM: ``calls.KeyClaim``."""
    return f"sllm.keys.{token(digest)}"


KEY_CLAIMS: Final = "sllm.keys.*"


LIVES_STREAM: Final = "sllm_lives"
_GATEWAYS_OWN: Final = (*_KEPT, KEYS_STREAM, LIVES_STREAM)
"""What gateways alone write."""


def life_beat(life: str = "*") -> str:
    """Gateway → LIVES_STREAM: ``lives.Life``. Without ``life``: a filter for those of all."""
    return f"sllm.lives.{life if life == '*' else token(life)}.beat"


def life_log(life: str, number: int | None = None) -> str:
    """Gateway → LIVES_STREAM: ``lives.Log``, numbered within its life. Without ``number``: a filter for all of them."""
    return f"sllm.lives.{token(life)}.log.{'*' if number is None else number}"


def life_told(gateway: str, life: str, number: int) -> str:
    """Gateway → all gateways: ``lives.Log``, as it goes to ``life_log`` as soon as JetStream takes it."""
    return f"{_TOLD}.{token(gateway)}.{token(life)}.{number}"


_TOLD: Final = "sllm.told"
TOLD_ALL: Final = f"{_TOLD}.*.*.*"


def heard(gateway: str) -> str:
    """Gateway → gateway, request/reply: ``lives.AskHeard``."""
    return f"sllm.heard.{token(gateway)}"


CANCEL_CALL: Final = "sllm.cancel"
"""Gateway → all gateways, request/reply: ``calls.CancelCall``."""
EXPLAIN_CALL: Final = "sllm.explain"
"""Gateway → all gateways, request/reply: ``calls.ExplainCall``."""


def open_calls(gateway: str) -> str:
    """Gateway → gateway, request/reply: ``calls.ListCalls``."""
    return f"sllm.listed.{token(gateway)}"


READING: Final = "sllm.reading"
"""Gateway → all gateways: ``calls.Reading``."""

# --- state ----------------------------------------------------------------------------------------
STATE: Final = "sllm_state"
"""One KV bucket holds all records, so that one fence (the ``term`` key) covers every write of the leader."""
TERM_KEY: Final = "term"
LEASE_KEY: Final = "lease"
POPULARITY_KEY: Final = "popularity"
LEARNED_KEY: Final = "learned"
POOL_KEY: Final = "pool"


def function_key(function: str) -> str:
    """``FunctionRecord``"""
    return f"functions.{token(function)}"


def version_key(function: str, version: int) -> str:
    """``VersionRecord``"""
    return f"versions.{token(function)}.{version}"


def model_key(digest: str) -> str:
    """``ModelRecord``"""
    return f"models.{token(digest.removeprefix('sha256:'))}"


def node_key(node: str) -> str:
    """``NodeRecord``"""
    return f"nodes.{token(node)}"


def instance_key(instance: str) -> str:
    """``InstanceRecord``"""
    return f"instances.{token(instance)}"


def route_key(function: str, version: int) -> str:
    """``Route``; gateways watch ``ROUTE_KEYS``."""
    return f"routes.{token(function)}.{version}"


def proofs_key(function: str, version: int) -> str:
    """``ProofsRecord``"""
    return f"proofs.{token(function)}.{version}"


ROUTE_KEYS: Final = "routes.>"


def secret_key(name: str) -> str:
    """``SecretRecord``"""
    return f"secrets.{token(name)}"


SECRET_KEYS: Final = "secrets."
"""Prefix of all of them."""
BUNDLES: Final = "sllm_bundles"
READ_BUNDLES: Final = "sllm.bundle.*"
"""→ any gateway, from every node."""
LOGS_STREAM: Final = "sllm_logs"
EVENTS_STREAM: Final = "sllm_events"


def read_bundle(node: str) -> str:
    """→ any gateway, from ``node``: a part of a bundle."""
    return f"sllm.bundle.{token(node)}"


def forget_consumer(stream: str, consumer: str) -> str:
    """→ JetStream: nobody reads this consumer any more."""
    return f"$JS.API.CONSUMER.DELETE.{token(stream)}.{token(consumer)}"


def next_messages(stream: str, consumer: str) -> str:
    """→ JetStream: the reader of this consumer takes more. It answers with the messages themselves."""
    return f"{_NEXT}.{token(stream)}.{token(consumer)}"


_NEXT: Final = "$JS.API.CONSUMER.MSG.NEXT"


class Rights(msgspec.Struct, frozen=True):
    """What one identity may publish to and subscribe to (nats-server ``permissions``)."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    allow_responses: bool = True
    unheard: tuple[str, ...] = ()
    """What it may not subscribe to whatever ``subscribe`` says: who signs its own credentials may sign any name, also
    one that is no token."""


NODE: Final = "node"
INBOXES: Final = "_INBOX_"
"""Prefix of everybody's inboxes."""


def inbox(kind: str, identity: str) -> str:
    """Prefix of an identity's reply inboxes: nobody else may listen there, and no node, whatever name its key signs
    (decision 0062).

    A node's is the one that everybody had in the release before, whose gateways answer it nowhere else, and whose
    servers let it listen nowhere else."""
    return f"{INBOXES}{token(identity)}" if kind == NODE else f"{INBOXES}.{token(kind)}.{token(identity)}"


def _inboxes(kind: str, identity: str) -> tuple[str, str]:
    """Its own, and (until the next release) the one that a component of the release before listens to."""
    return f"{inbox(kind, identity)}.>", f"{INBOXES}{token(identity)}.>"


def _telling(component: str, identity: str) -> tuple[str, str]:
    """Events of this identity, also of one of an earlier release."""
    return events_by(component, identity), f"{events_by(component, identity)}.>"


def controller_rights(identity: str) -> Rights:
    """The control plane: state, commands to nodes, reports from them."""
    return Rights(
        publish=(
            "sllm.node.>",
            "$JS.API.>",
            "$KV.>",
            "$O.>",
            "$JS.ACK.>",
            LEADER,
            DECISIONS,
            *_telling("controller", identity),
        ),
        subscribe=(f"{CTL}.>", STATUS_ALL, *_inboxes("controller", identity)),
    )


GATEWAYS_SEE: Final = (f"KV_{STATE}", f"OBJ_{BUNDLES}", LOGS_STREAM, EVENTS_STREAM, *_GATEWAYS_OWN)
"""Streams of which gateways may ask how full they are."""


def gateway_rights(identity: str) -> Rights:
    """A gateway: asks the controller, sends calls, reads state and logs, stores bundles."""
    return Rights(
        publish=(
            f"{CTL}.>",
            f"sllm.open.*.{token(identity)}",
            f"sllm.call.*.{token(identity)}",
            "$JS.API.INFO",
            *(f"$JS.API.STREAM.INFO.{stream}" for stream in GATEWAYS_SEE),
            *(f"{prefix}.>" for prefix in (*_KEPT.values(), "sllm.keys", "sllm.lives")),
            f"{_TOLD}.{token(identity)}.>",
            "sllm.heard.*",
            "sllm.listed.*",
            CANCEL_CALL,
            EXPLAIN_CALL,
            READING,
            "$JS.API.STREAM.NAMES",
            "$JS.API.CONSUMER.CREATE.>",
            "$JS.API.CONSUMER.DELETE.>",
            "$JS.API.CONSUMER.INFO.>",
            f"{_NEXT}.>",
            "$JS.API.DIRECT.GET.>",
            f"$JS.API.STREAM.MSG.GET.OBJ_{BUNDLES}",
            *(f"$JS.API.STREAM.MSG.GET.{stream}" for stream in _GATEWAYS_OWN),
            f"$JS.API.STREAM.PURGE.OBJ_{BUNDLES}",
            "$JS.FC.>",
            "$JS.ACK.>",
            f"$O.{BUNDLES}.>",
            *_telling("gateway", identity),
        ),
        subscribe=(
            frames_of(identity),
            STATUS_ALL,
            LEADER,
            TOLD_ALL,
            heard(identity),
            open_calls(identity),
            CANCEL_CALL,
            EXPLAIN_CALL,
            READING,
            READ_BUNDLES,
            *_inboxes("gateway", identity),
        ),
    )


def node_rights(identity: str) -> Rights:
    """A node: obeys, reports, hears whether another one reports under its name, answers calls, asks gateways for
    bundles. Nothing of JetStream's, which answers to whatever subject a question names, and so would speak for a node
    where it may not (decision 0059)."""
    return Rights(
        publish=(
            f"sllm.frames.*.{token(identity)}",
            status(identity),
            f"sllm.logs.{token(identity)}.*",
            read_bundle(identity),
            *_telling("node", identity),
        ),
        subscribe=(
            f"sllm.node.{token(identity)}.*",
            f"sllm.open.{token(identity)}.*",
            f"sllm.call.{token(identity)}.*",
            status(identity),
            LEADER,
            f"{inbox(NODE, identity)}.>",
        ),
        unheard=(f"{INBOXES}.>",),
    )


def platform_rights(identity: str) -> Rights:
    """``sllm up``: its events, nothing else."""
    telling, subscribe = _telling("platform", identity), (f"{inbox('platform', identity)}.>",)
    return Rights(publish=telling, subscribe=subscribe, allow_responses=False)


RIGHTS: Final = {
    "controller": controller_rights,
    "gateway": gateway_rights,
    NODE: node_rights,
    "platform": platform_rights,
}
