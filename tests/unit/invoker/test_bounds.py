"""What a worker says of itself that nobody believes."""

import math

from sllm_invoker.bounds import MAX_NAMES, MAX_SPANS, NAMES_BYTES, clip_names, clip_spans
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.clipping import NAME_BYTES
from sllm_runtime.protocol.timeline import Span

ODD = (math.nan, math.inf, -math.inf, 1e30)


def test_spans_are_times_that_a_record_can_hold() -> None:
    fine = Span("setup", -1.5, 2.0)
    wrong = (*(Span("prove", odd, 1.0) for odd in ODD), *(Span("prove", 0.0, odd) for odd in (*ODD, -1.0)))
    kept = clip_spans((*wrong, fine, Span("x" * 2 * NAME_BYTES, 0.0, 0.0)))
    assert kept == (fine, Span("x" * NAME_BYTES, 0.0, 0.0))
    assert codec.from_json(tuple[Span, ...], codec.to_json(kept)) == kept
    assert len(clip_spans((fine,) * 2 * MAX_SPANS)) == MAX_SPANS


def test_names_are_bounded_together() -> None:
    """A report has those of every instance of its node."""
    assert clip_names(("engine:ours", "holds")) == ("engine:ours", "holds")
    assert len(clip_names(("a",) * 2 * MAX_NAMES)) == MAX_NAMES
    assert clip_names(("\N{SNOWMAN}" * NAME_BYTES,) * MAX_NAMES) == ("\N{SNOWMAN}" * (NAME_BYTES // 3),) * 2
    spans = clip_spans((Span("n" * NAME_BYTES, 0.0, 1.0),) * MAX_SPANS)
    assert len(spans) == NAMES_BYTES // NAME_BYTES
