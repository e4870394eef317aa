"""Sizes and times that two components must agree on. MiB are 2**20 bytes. Defaults of settings refer to these."""

from __future__ import annotations

from typing import Final

KIB: Final = 2**10
MIB: Final = 2**20

PROTOCOL_VERSION: Final = 1
"""Stands in every hello and every record; readers accept this one and the one before."""

MAX_MESSAGE: Final = 512 * KIB
"""No message on NATS or on a socket of ours is larger (nats-server's own limit is 1 MiB)."""
MAX_REPORT: Final = MAX_MESSAGE - 32 * KIB
"""A node's report: in lists of nodes it is a part of a message, with what the controller knows of the node."""
MAX_PART: Final = 256 * KIB
"""Bodies and outputs above this travel as several frames."""
MAX_BODY: Final = 32 * MIB
MAX_BUNDLE: Final = 100 * MIB
MAX_BUNDLE_FILES: Final = 20_000
WINDOW: Final = 1 * MIB
"""Bytes of one call that may be in flight or buffered for its reader, as credit counts them."""
FRAME_COST: Final = 64
"""What credit counts for a frame beside its data: a frame is an object in every process on its way, also one of no or
one byte. Everything that grants, takes or checks credit counts by ``Frame.cost``."""
FRAME_ENVELOPE: Final = 24
"""Room in a message for what travels with a frame's data."""
BATCH_BYTES: Final = 384 * KIB
"""A message of frames is closed when it holds this much (leaves room for one part and the envelope)."""

ACK_FRAMES: Final = 64
ACK_AFTER_S: Final = 0.25
HEARTBEAT_S: Final = 1.0
"""Longest silence of a call's sender, of a worker and of a node."""
COUNTS_S: Final = 0.2
"""Calls begin and end far more often than anybody plans with them: a node tells their number at once, then after so
long."""
RESEND_AFTER_S: Final = 0.3
"""A gap or an unanswered request is asked for again after this long (doubling up to 2 s)."""
LOST_AFTER_S: Final = 5.0
"""Silence, while connected, after which the other side counts as dead."""
OVERDUE_S: Final = HEARTBEAT_S + 0.25
"""Silence, while connected, after which NATS is asked whether the other side is there at all: see
``platform/presence.py``."""
CALL_OVERDUE_S: Final = 0.5
"""The same of a node that runs calls of a gateway: one that streams speaks all the time, and the gateway that reads it
need not wait for a beat."""
STALL_S: Final = 1.0
"""A ticker that is later than this did not run (a paused machine, no CPU): what others sent meanwhile still waits to be
read, so nobody's silence counts from before."""
DEAF_S: Final = 2.5
"""Something comes from NATS more often than each second: nodes' reports, who leads, beats that it has acknowledged. Who
has heard nothing at all for so long is cut off, or NATS stands still, though the connection stands (it takes 10 s and
more to end): nobody's silence counts meanwhile."""
SLOW_CONSUMER_S: Final = 30.0
MAX_HEAD: Final = 64 * 1024
"""A request's line and headers."""
HEAD_TIMEOUT_S: Final = 30.0
"""A connection without a request, or with half a one, is closed after this long, at the latest after twice as long."""
BODY_TIMEOUT_S: Final = 60.0
"""A request's body is wholly there after this long: the largest at 4.5 Mbit/s."""
HEADERS_WAIT_S: Final = 1.0
"""Response headers wait this long for the first frame, so that early errors keep their HTTP status."""
SSE_HEARTBEAT_S: Final = 10.0
LONG_POLL_S: Final = 5.0
"""Long requests (acquire, deploy, prepare) are asked again after this long: a lost reply costs no more."""
RPC_TIMEOUT_S: Final = 5.0
CONTROLLER_WAIT_S: Final = 15.0
"""Longest wait for a controller that leads, for its proof that it does, and for the store to take what it decides: the
servers of a cluster elect a leader of their own within this."""
TOLD_AFTER_S: Final = 1.0
"""Who waits for so long for a controller that leads, or for that proof, is told so."""

CHUNK_BYTES: Final = 16 * MIB
MAX_PROOF: Final = 2 * KIB
"""Longest ``Ready.proof`` that an invoker keeps, and reports."""
PROOF_S: Final = 10.0
"""So long a node's reports have the proof of an instance that became ready: one may be lost, not all of them."""
MOST_PROOFS: Final = 4
"""Of one version, on machines of different kinds."""
MAX_FDS: Final = 253
"""Most descriptors one SCM_RIGHTS message carries on Linux."""
ID_END: Final = 2**31
"""Ids of tokens are below this: each takes five bytes of a message at most."""
MOST_IDS: Final = 65_536
"""Ids of a call that are kept, and told to another instance, so that a call's head fits a message. Those beyond are
drawn again, and are the same."""
MOST_GENERATIONS: Final = 1024
"""Of a call, that ids are kept of."""
FEED_IDS: Final = 4096
"""Most ids in one ``frames.Feed``."""
MAX_MEMBERS: Final = 16
"""Most processes of one instance: as many steps are on their way, and every two ranks are joined."""

LEAST_FREE: Final = 8 * MIB
"""Bytes of the disk that the state lies on. Below it nothing new is deployed, and `sllm up` refuses: what runs still
has its changes of state to store."""
LEAST_FILES: Final = 128
"""New files (inodes) that the state may need: an embedded server makes fifty at its first start."""
