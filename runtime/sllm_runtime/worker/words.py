"""What user code says, as text that can be sent: an exception's own words, lines with characters that are none."""

from __future__ import annotations


def sendable(text: str) -> str:
    """``text`` with its lone surrogates escaped: those have no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def lacks_memory(raised: BaseException) -> bool:
    """Whether user code was given no more memory, by Python or by torch. By what torch's words begin with: who passes
    them on may tell of another function's."""
    return isinstance(raised, MemoryError) or words_of(raised).startswith("RuntimeError: [enforce fail at alloc")


def words_of(raised: BaseException) -> str:
    """``Type: message`` of what user code raised, also where its ``__str__`` raises something itself."""
    name = type(raised).__name__
    try:
        return sendable(f"{name}: {raised}")
    except BaseException as worse:  # a user's code: it may raise anything, and the call must still end
        return sendable(f"{name} (whose text cannot be had: its __str__ raised {type(worse).__name__})")
