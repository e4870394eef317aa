"""Whether the kernel has killed somebody just now."""

from sllm_invoker.kernel_kills import EVERY_S, RECENT_S, KernelKills


class Kernel:
    """Its clock, its count, and how often that was read."""

    def __init__(self) -> None:
        self.now, self.kills, self.reads = 100.0, 7, 0

    def count(self) -> int:
        self.reads += 1
        return self.kills

    def pass_time(self, kills: KernelKills, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += EVERY_S
            kills.look()


def test_what_was_killed_just_now_counts_and_what_was_long_ago_does_not() -> None:
    kernel = Kernel()
    kills = KernelKills(lambda: kernel.now, kernel.count)
    assert not kills.recently()  # before this node began
    kernel.pass_time(kills, 3 * RECENT_S)
    assert not kills.recently()
    kernel.kills += 1
    assert kills.recently()  # between two looks
    kernel.pass_time(kills, RECENT_S - 2 * EVERY_S)
    assert kills.recently()
    kernel.pass_time(kills, 4 * EVERY_S)
    assert not kills.recently()


def test_a_look_long_ago_is_the_last_that_is_known() -> None:
    """This process stood still: what was killed meanwhile may be what ends now."""
    kernel = Kernel()
    kills = KernelKills(lambda: kernel.now, kernel.count)
    kernel.now, kernel.kills = kernel.now + 100 * RECENT_S, 8
    assert kills.recently()
    kills.look()
    assert kills.recently()


def test_looking_often_costs_one_read_in_a_second() -> None:
    kernel = Kernel()
    kills = KernelKills(lambda: kernel.now, kernel.count)
    for _ in range(100):
        kernel.now += EVERY_S / 10
        kills.look()
    assert kernel.reads <= 12
