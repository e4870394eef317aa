"""What the gateway counts, for Prometheus. One registry per gateway, so that tests can have many."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sllm_gateway.call import Call
from sllm_runtime.protocol.errors import BY_CODE, QueueFull, SllmError

TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 900)
_KINDS: Final = ("prompt", "completion", "cached")
OTHER = "other"
"""Label of codes that this release does not know."""
GONE: Final = 100
"""Functions that are deployed no more and have their series still, those that were called last: a scrape takes 0.4 ms
of a CPU for each function."""


class Metrics:
    """Function names are labels only once they are known, and those that have gone are forgotten above GONE, so their
    number is bounded by what is deployed; codes only where this release knows them."""

    def __init__(self, deployed: Callable[[str], bool] = lambda _: True) -> None:
        self._deployed = deployed
        self._functions: OrderedDict[str, set[str]] = OrderedDict()
        """With the codes that were counted of each: to look for its series among all takes the loop milliseconds."""
        self._present: list[Collector] = []
        self._page: asyncio.Future[bytes] | None = None
        """What is being written for who has asked."""
        self._later: list[tuple[Counter, tuple[str, ...], int]] = []
        """Tokens that are counted when it is."""
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter("sllm_http_requests", "HTTP requests", ["route", "status"], registry=registry)
        self.calls = Counter(
            "sllm_calls", "Calls that have ended or were refused, by wire code", ["function", "code"], registry=registry
        )
        self.ttft = Histogram(
            "sllm_ttft_seconds", "Acceptance to first frame", ["function"], buckets=TTFT_S, registry=registry
        )
        self.seconds = Histogram(
            "sllm_call_seconds", "Acceptance to the end", ["function"], buckets=SECONDS, registry=registry
        )
        self.tokens = Counter("sllm_tokens", "Tokens of ended calls", ["function", "kind"], registry=registry)
        self.inherited = Counter(
            "sllm_tokens_inherited",
            "Completion tokens that other gateways drew of calls that go on here",
            ["function"],
            registry=registry,
        )
        self.cold = Counter(
            "sllm_cold_starts", "Calls that waited for an instance's start", ["function"], registry=registry
        )
        self.resumed = Counter(
            "sllm_calls_resumed",
            "Times a call went on elsewhere after its instance died",
            ["function"],
            registry=registry,
        )
        self.moved = Counter(
            "sllm_calls_moved",
            "Times a running call was carried over to another instance",
            ["function"],
            registry=registry,
        )
        self.resent = Counter("sllm_frames_resend_requests", "Times frames were asked for again", registry=registry)

    @contextmanager
    def refusing(self, function: str) -> Iterator[None]:
        """Count an error raised inside as a call of ``function`` that never began: a bad argument, too large a body."""
        try:
            yield
        except SllmError as error:
            self._count(function, _code(error))
            raise

    def given_up(self, function: str, error: SllmError) -> None:
        """Count a call of a gateway that is no more, which ends without going on."""
        self._count(function, _code(error))

    def ended(self, call: Call, now: float) -> None:
        """Count a call that is over."""
        function, marks = call.version.function, call.marks
        self._count(function, _code(call.error) if call.error else "ok")
        if not isinstance(call.error, QueueFull):  # which took no time: it was refused, as others that are no calls
            over = now if call.error is None or marks.failed is None else marks.failed  # its node may be slow to say so
            self.seconds.labels(function).observe(over - call.order.accepted)
        if marks.first is not None:
            self.ttft.labels(function).observe(marks.first - call.order.accepted)
        if marks.started is not None:
            self.cold.labels(function).inc()
        usage = call.end.usage if call.end else None
        if usage is not None:
            for kind in _KINDS:
                self._add(self.tokens, (function, kind), max(0, getattr(usage, kind)))  # a worker's word

    def inherit(self, function: str, tokens: int) -> None:
        """Count what other gateways drew of a call that goes on here."""
        self._add(self.inherited, (function,), tokens)

    def _add(self, to: Counter, labels: tuple[str, ...], tokens: int) -> None:
        """Not while a page is written, whose tokens of open calls are those of its beginning: what a call has that ends
        meanwhile would be there twice."""
        if self._page is None:
            to.labels(*labels).inc(tokens)
        else:
            self._later.append((to, labels, tokens))

    def _count(self, function: str, code: str) -> None:
        """One more call. With the first one of a function the series of others go that are there no more."""
        new = function not in self._functions
        self._functions.setdefault(function, set()).add(code)
        self._functions.move_to_end(function)
        self.calls.labels(function, code).inc()
        if not new:
            return
        gone = [each for each in self._functions if not self._deployed(each)]
        for each in gone[: max(len(gone) - GONE, 0)]:
            for counted in self._functions.pop(each):
                self.calls.remove(each, counted)
            for kind in _KINDS:
                self.tokens.remove(each, kind)
            for metric in (self.ttft, self.seconds, self.inherited, self.cold, self.resumed, self.moved):
                metric.remove(each)

    def watch(
        self,
        depths: Callable[[], dict[str, int]],
        running: Callable[[], int],
        drawn: Callable[[], dict[str, int]],
        gateways: Callable[[], int],
        nodes: Callable[[], int],
        leads: Callable[[], bool],
        ready: Callable[[], bool],
    ) -> None:
        """Read queue depths, running calls and their tokens so far, how many gateways and nodes live, whether a
        controller leads and this gateway is ready, when somebody asks for the metrics."""
        self.read(_Present(depths, running, drawn, gateways, nodes, leads, ready))

    def read(self, collector: Collector) -> None:
        """Read this one too, on the loop, when somebody asks for the metrics."""
        self._present.append(collector)

    def text(self) -> bytes:
        """The exposition format."""
        return self._text(self._now())

    async def page(self) -> bytes:
        """As ``text``, beside the loop: of a thousand functions it takes half a second, in which no stream may stand
        still. Who asks meanwhile gets the same one."""
        if self._page is None:
            thread = ThreadPoolExecutor(1, "metrics")  # of its own: large bodies wait for the others
            self._page = asyncio.get_running_loop().run_in_executor(thread, self._text, self._now())
            thread.shutdown(wait=False)  # when it is written
            self._page.add_done_callback(self._written)
        return await asyncio.shield(self._page)

    def _written(self, _: asyncio.Future[bytes]) -> None:
        later, self._later, self._page = self._later, [], None
        for to, labels, tokens in later:
            self._add(to, labels, tokens)

    def _now(self) -> Sequence[Metric]:
        """What is read of the gateway itself, which only the loop may do."""
        return [metric for each in self._present for metric in each.collect()]

    def _text(self, now: Sequence[Metric]) -> bytes:
        return generate_latest(self.registry) + generate_latest(_Collected(now))


def gauge(name: str, documentation: str, label: str, values: Mapping[str, float]) -> Metric:
    """What is now, of each ``label``."""
    found = GaugeMetricFamily(name, documentation, labels=[label])
    for of, value in values.items():
        found.add_metric([of], value)
    return found


def _code(error: SllmError) -> str:
    """The wire code as a label; what a worker makes up is no series of its own."""
    return error.code if error.code in BY_CODE else OTHER


class _Collected(Collector):
    """What was collected before."""

    def __init__(self, found: Sequence[Metric]) -> None:
        self._found = found

    def collect(self) -> Iterable[Metric]:
        return self._found


class _Present(Collector):
    def __init__(
        self,
        depths: Callable[[], dict[str, int]],
        running: Callable[[], int],
        drawn: Callable[[], dict[str, int]],
        gateways: Callable[[], int],
        nodes: Callable[[], int],
        leads: Callable[[], bool],
        ready: Callable[[], bool],
    ) -> None:
        self._depths, self._running, self._drawn, self._gateways = depths, running, drawn, gateways
        self._nodes, self._leads, self._ready = nodes, leads, ready

    def collect(self) -> Iterable[Metric]:
        yield gauge("sllm_queue_depth", "Calls that wait for a slot", "function", self._depths())
        yield gauge("sllm_tokens_open", "Completion tokens so far of open calls", "function", self._drawn())
        yield GaugeMetricFamily("sllm_calls_open", "Calls between acceptance and end", value=self._running())
        yield GaugeMetricFamily("sllm_gateways", "Gateways that live, this one among them", value=self._gateways())
        yield GaugeMetricFamily("sllm_nodes", "Nodes that report", value=self._nodes())
        yield GaugeMetricFamily("sllm_controller_leads", "Whether a controller says that it leads", value=self._leads())
        yield GaugeMetricFamily("sllm_ready", "Whether this gateway is ready, as /readyz says it", value=self._ready())
