"""What holds for every test: nothing is left behind, and what cannot run here says why."""

import gc
import os
import signal

import pytest
from hypothesis import settings

from tests.fixtures.examples import ALL, SHARE
from tests.fixtures.needs import NEEDS, need
from tests.leaks import (  # noqa: F401 - a fixture or hook is used by being here
    no_task_left,
    nothing_left_by_module,
    nothing_left_by_session,
    nothing_left_by_test,
    pytest_collection_modifyitems,
)

# Before anything imports torch: two threads that share a busy core spin for each other through every small operation,
# ten times the time of one. What the platform's own workers run with, it says itself.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Collecting makes millions of objects, which all stay: a third of its time went into looking at them for garbage, again
# and again, and later a tenth of a second of each further look.
gc.disable()


def pytest_collection_finish() -> None:
    """What is there now is no garbage."""
    gc.freeze()
    gc.enable()


# A shell's background job has SIGINT ignored, and so would everything that it starts: programs whose Ctrl-C is tested.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A time limit per example would measure what else the machine does. `make test` tries the same examples each time, so
# that a change is judged by what it changes; `make test-all` looks for new ones, and tries three times as many.
settings.register_profile("sllm", deadline=None, print_blob=True, derandomize=True, max_examples=ALL // SHARE)
settings.register_profile("explore", deadline=None, print_blob=True, max_examples=ALL)
settings.load_profile("sllm")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, with the reason, what this machine cannot run; SLLM_TEST_REQUIRE=gpu,container fails it instead."""
    for name in NEEDS:
        if item.get_closest_marker(name) is not None:
            need(name)
