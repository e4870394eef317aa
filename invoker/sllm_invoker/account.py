"""What an instance tells of itself in its node's report: how far its start is, what it can do, what has ended it."""

from __future__ import annotations

from sllm_invoker.bounds import clip_names, clip_report, clip_spans, clip_tokens
from sllm_invoker.work import Work
from sllm_runtime.protocol.clipping import NAME_BYTES, clip
from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.protocol.limits import MAX_PROOF, PROOF_S
from sllm_runtime.protocol.node import InstanceStatus, Progress, StartInstance
from sllm_runtime.protocol.states import InstanceState
from sllm_runtime.protocol.timeline import SANDBOX, Span, shift
from sllm_runtime.protocol.worker import Heartbeat, Ready, Stage


class Account:
    """What a node reports of one instance, from its order to its end. What its worker says is bounded here."""

    def __init__(self, order: StartInstance) -> None:
        self._order = order
        self.progress: Progress | None = Progress(stage=SANDBOX)
        """None: the start is over."""
        self.error: SllmError | None = None
        self.context = 0
        """Tokens of its call that has most, as its worker said last."""
        self.release_s: float | None = None
        """Seconds that it took to free what it held, if it was told to."""
        self._prepared: tuple[Span, ...] = ()
        self._assigned_ms = 0.0
        self._spans: tuple[Span, ...] = ()
        self._fingerprint = ""
        self._capabilities: tuple[str, ...] = ()
        self._proof = ""
        self._ready_at = 0.0

    @property
    def stage(self) -> str:
        """Where its start is."""
        return self.progress.stage if self.progress is not None else SANDBOX

    def prepared(self, spans: tuple[Span, ...], assigned_ms: float) -> None:
        """What the node had to do for it; its worker was assigned ``assigned_ms`` after the order."""
        self._prepared, self._assigned_ms = spans, assigned_ms

    def staged(self, stage: Stage) -> None:
        """Its worker says how far it is."""
        self.progress = Progress(stage=clip(stage.stage, NAME_BYTES), done=stage.done, total=stage.total)

    def ready(self, ready: Ready, now: float) -> None:
        """Its worker serves."""
        self._proof, self._ready_at = ready.proof if len(ready.proof) <= MAX_PROOF else "", now
        self._fingerprint = clip(ready.fingerprint, NAME_BYTES)
        self._capabilities = clip_names(ready.capabilities)
        self._spans = (*self._prepared, *shift(clip_spans(ready.spans), self._assigned_ms))
        self.progress = None

    def beaten(self, beat: Heartbeat) -> None:
        """Its worker lives, and says what its calls have."""
        self.context = clip_tokens(beat.context)

    def status(self, state: InstanceState, work: Work | None, now: float) -> InstanceStatus:
        """For the node's report."""
        order = self._order
        return InstanceStatus(
            instance=order.instance,
            function=order.function,
            version=order.version,
            state=state,
            progress=self.progress,
            error=clip_report(self.error) if self.error is not None else None,
            fingerprint=self._fingerprint,
            capabilities=self._capabilities,
            spans=self._spans,
            running=work.running if work is not None else 0,
            served=work.served if work is not None else 0,
            whole=work.whole if work is not None else 0,
            worked_s=work.worked_s if work is not None else 0.0,
            idle_s=work.idle_s(now) if work is not None else 0.0,
            context=self.context if work is not None and work.running else 0,
            release_s=self.release_s,
            proof=self._proof if now - self._ready_at < PROOF_S else "",
            content=order.content,
        )
