"""When a gateway acknowledges frames that its readers take one by one."""

from sllm_gateway.binding import Binding
from sllm_runtime.protocol import limits
from sllm_runtime.protocol.frames import Ack, Frame, FrameKind
from tests.unit.gateway.peer import entry


def take(binding: Binding, index: int, now: float, size: int = 5) -> list[object]:
    """One frame comes and is written; what is sent for it."""
    (frame,) = binding.on_frames((Frame(index, FrameKind.OUTPUT, bytes(size)),), now)
    return list(binding.consumed(frame.cost, now))


def bound() -> Binding:
    binding = Binding("call", 1, entry(), b"", limits.WINDOW, 0.0)
    binding.accept(0.0)
    return binding


def test_an_acknowledgement_by_age_waits_for_the_look_at_all_calls() -> None:
    binding = bound()
    for index in range(20):
        assert take(binding, index, index * limits.ACK_AFTER_S / 10) == []
    assert binding.due == limits.ACK_AFTER_S
    cost = 20 * (5 + limits.FRAME_COST)
    assert binding.tend(2 * limits.ACK_AFTER_S) == [Ack("call", 1, 20, limits.WINDOW + cost)]
    assert binding.tend(2 * limits.ACK_AFTER_S) == []


def test_many_frames_or_much_credit_wait_for_nobody() -> None:
    binding = bound()
    sent = [items for index in range(limits.ACK_FRAMES) if (items := take(binding, index, 0.0))]
    assert [[item.next_index for item in items if isinstance(item, Ack)] for items in sent] == [[limits.ACK_FRAMES]]
    assert [len(take(bound(), 0, 0.0, size)) for size in (limits.WINDOW // 8, limits.WINDOW // 4)] == [0, 1]
