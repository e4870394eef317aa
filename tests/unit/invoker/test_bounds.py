"""What a worker says of itself that nobody believes."""

import math

from sllm_invoker.bounds import MAX_SPANS, clip_spans
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
