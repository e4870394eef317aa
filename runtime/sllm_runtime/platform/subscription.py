"""One interest in a subject, and what it has missed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import nats.errors
from nats.aio.subscription import Subscription as NatsSubscription

from sllm_runtime.platform.owned import Tasks


class Subscription:
    """Interest in a subject. Messages are handled one after another, in order of arrival."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.dropped = False
        """Whether messages were lost here since the last recovery."""
        self.inner: NatsSubscription | None = None
        self.forget: Callable[[], object] | None = None
        self.tasks: Tasks | None = None

    async def unsubscribe(self) -> None:
        """End it, and the requests it still serves. Repeatable."""
        inner, self.inner = self.inner, None
        if inner is not None:
            with contextlib.suppress(nats.errors.Error):
                await inner.unsubscribe()
        if self.forget is not None:
            self.forget()
        if self.tasks is not None:
            await self.tasks.close()

    def caught_up(self) -> bool:
        """Whether messages were lost and everything that arrived since is handled."""
        return self.dropped and (self.inner is None or self.inner.pending_msgs == 0)
