"""What user code says, as text that can be sent: an exception's own words, lines with characters that are none."""

from __future__ import annotations


def sendable(text: str) -> str:
    """``text`` with its lone surrogates escaped: those have no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


_NO_KERNEL = "RuntimeError: could not create a primitive"
"""oneDNN's, where it has no room for a kernel; of one that it does not know it says ``… a primitive descriptor``."""

_NO_ROOM = "RuntimeError: [enforce fail at alloc"
_HANDED_ON = (
    "RuntimeError: The following operation failed in the TorchScript interpreter.",
    "RuntimeError: Caught RuntimeError in ",
)
"""Torch's own, before a traceback: TorchScript's, and that of what was raised in a DataLoader's worker or a replica."""


def lacks_memory(raised: BaseException) -> bool:
    """Whether user code, or the engine, was given no more memory, by Python or by torch. By what torch's words begin
    with: who passes them on may tell of another function's."""
    words = words_of(raised)
    lacks = words == _NO_KERNEL or words.startswith(_NO_ROOM)
    lacks = lacks or (words.startswith(_HANDED_ON) and f"\n{_NO_ROOM}" in words)
    return lacks or isinstance(raised, MemoryError)


_NO_THREAD = "RuntimeError: can't start new thread"
NO_THREAD = (
    " - each thread's stack (8 MiB, mostly) counts as the function's memory: raise memory=... in @model_function, or "
    "lower its concurrency or the number of threads that it starts; SLLM_CONTAINER_PIDS bounds those of a container"
)


def lacks_thread(raised: BaseException) -> bool:
    """Whether Python could start no thread more, a call's or the function's own."""
    return words_of(raised) == _NO_THREAD


def words_of(raised: BaseException) -> str:
    """``Type: message`` of what user code raised, also where its ``__str__`` raises something itself."""
    name = type(raised).__name__
    try:
        return sendable(f"{name}: {raised}")
    except BaseException as worse:  # a user's code: it may raise anything, and the call must still end
        return sendable(f"{name} (whose text cannot be had: its __str__ raised {type(worse).__name__})")
