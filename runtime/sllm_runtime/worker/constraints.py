"""What an output must look like, or must not hold: which ids may follow the ids so far, and nothing else is state.

Grammars are llguidance's: it compiles JSON schemas and regular expressions and says in microseconds which tokens may
come next. All that they may cost is bounded (``_LIMITS``), since what they are made from is a caller's.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits

from sllm_runtime.protocol.errors import InvalidRequest
from sllm_runtime.protocol.openai import MAX_GRAMMAR, output_format
from sllm_runtime.worker.engine.base import Mask
from sllm_runtime.worker.tokens import Vocabulary
from sllm_runtime.worker.tools.forms import Form

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_ANY_OBJECT: Final = {"type": "object"}
_WRITING: Final[JsonCompileOptions] = {"whitespace_pattern": r"[ \n\t]{0,24}"}
"""White space between JSON's tokens: enough to indent, and no model can go on with it for ever."""
_LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=1_000_000,  # to begin: some 20 ms
    step_lexer_fuel=200_000,  # a token: some 15 ms
    step_max_items=50_000,
    max_lexer_states=20_000,  # some 40 MB
    max_grammar_size=200_000,
    verbose_errors=False,
)
_REPEATED: Final = re.compile(r"(?<!\\)(?:\\\\)*\{(?:\d*,)?\d{5,}")
"""A repetition of 10,000 or more, of which each step pays a part that no limit above counts. Behind a backslash a brace
is a letter."""
_SHOWN: Final = 300


@contextlib.contextmanager
def _concerning(field: str) -> Iterator[None]:
    """What the model cannot do is an error of the field that asks for it, and so is what llguidance cannot read."""
    try:
        yield
    except ValueError as error:  # a schema that is nested too deeply
        raise InvalidRequest(f"'{field}': {error}", field=field) from error
    except InvalidRequest as error:
        error.field = field
        raise


def _patterns(given: Any) -> Iterator[str]:
    """The regular expressions of a JSON schema, or of several."""
    left = [given]
    while left:
        part = left.pop()
        if isinstance(part, Mapping):
            named = part.get("patternProperties")
            yield from named if isinstance(named, Mapping) else ()
            if isinstance(part.get("pattern"), str):
                yield part["pattern"]
            left += part.values()
        elif isinstance(part, list | tuple):
            left += part


class Grammar:
    """A compiled shape. Raises ``InvalidRequest`` where it is wrong, fits nothing or costs too much."""

    def __init__(self, vocabulary: Vocabulary, text: str, field: str, patterns: Iterable[str] = ()) -> None:
        """``patterns``: the regular expressions in ``text``; what it describes or names may hold braces as well."""
        if len(text) > MAX_GRAMMAR:
            why = f"it is {len(text)} characters long, at most {MAX_GRAMMAR} are read"
            raise InvalidRequest(f"'{field}': {why}", field=field)
        if any(map(_REPEATED.search, patterns)):
            raise InvalidRequest(f"'{field}': it repeats something 10,000 times or more", field=field)
        with _concerning(field):
            self._first = LLMatcher(vocabulary.grammars(), text, log_level=0, limits=_LIMITS)
        self._size = vocabulary.size
        self._field = field
        if not self.start().allowed(()).any():
            raise InvalidRequest(f"'{field}': no output has that shape", field=field)

    @classmethod
    def of(cls, body: Mapping[str, Any], vocabulary: Vocabulary) -> Grammar | None:
        """What ``regex`` or ``response_format`` of a checked request ask for (``protocol.openai.check``)."""
        kind = output_format(body)
        if kind == "text":
            return None
        if kind == "regex":
            return cls(vocabulary, LLMatcher.grammar_from_regex(body["regex"]), "regex", [body["regex"]])
        schema = _ANY_OBJECT if kind == "json_object" else body["response_format"]["json_schema"]["schema"]
        with _concerning("response_format"):
            text = LLMatcher.grammar_from_json_schema(msgspec.json.encode(schema).decode(), overrides=_WRITING)
        return cls(vocabulary, text, "response_format", _patterns(schema))

    @classmethod
    def of_calls(
        cls, form: Form, functions: Sequence[Mapping[str, Any]], vocabulary: Vocabulary, *, several: bool
    ) -> Grammar:
        """Outputs that call one of ``functions``, or ``several``, as ``form`` writes it."""
        with _concerning("tools"):
            text = form.grammar(functions, vocabulary.literal, several=several)
            return cls(vocabulary, LLMatcher.grammar_from_lark(text), "tools", _patterns(functions))

    def start(self) -> Shape:
        """The constraint of one output."""
        return Shape(self._first, self._size, self._field)


class Shape:
    """One output's way through a grammar. What the matcher has read is a cache: other ids make it begin again.

    ``first``: has read nothing, and is copied when a token is drawn: a matcher takes 5 kB for each token that it read.
    """

    def __init__(self, first: LLMatcher, size: int, field: str) -> None:
        self._first, self._size, self.field = first, size, field
        self._matcher: LLMatcher | None = None
        self._read: list[int] = []

    def allowed(self, output: Sequence[int]) -> Mask:
        """See ``base.Constraint``. Raises ``InvalidRequest`` where the grammar costs too much."""
        given = list(output)
        matcher = self._matcher = self._matcher or self._first.deep_copy()
        if given[: len(self._read)] != self._read:
            matcher.reset()
            self._read = []
        matcher.consume_tokens(given[len(self._read) :])
        self._read = given
        packed = matcher.compute_bitmask()
        if matcher.is_error():
            why = matcher.get_error().splitlines()[0][:_SHOWN]
            raise InvalidRequest(f"'{self.field}': {why}", field=self.field)
        return np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little", count=self._size).view(np.bool_)

    def forget(self) -> None:
        """See ``base.Constraint``."""
        self._matcher, self._read = None, []


class BadWords:
    """No output holds any of ``words``, however its tokens cut them: a token that would complete one is forbidden."""

    field: Final = "bad_words"

    def __init__(self, vocabulary: Vocabulary, words: Sequence[str]) -> None:
        wanted = {word.encode() for word in words}
        with _concerning(self.field):
            texts = self._texts = vocabulary.texts
        self._free = np.array([not any(word in text for word in wanted) for text in texts])
        left = _rests(wanted, max(map(len, texts)))
        self._ids = {rest: np.array(ids) for rest in set().union(*left.values()) if (ids := vocabulary.beginning(rest))}
        """Those that would complete a word of which so much is left. Found here, once each: the batch waits while a
        token is drawn."""
        self._rests = {begun: open_ for begun, rests in left.items() if (open_ := rests & self._ids.keys())}
        """What is left of words by what they began with, where one token may complete it."""
        self._sizes = sorted({len(begun) for begun in self._rests})

    def allowed(self, output: Sequence[int]) -> Mask:
        """See ``base.Constraint``."""
        tail = self._tail(output)
        mask = self._free.copy()
        for rest in {rest for size in self._sizes for rest in self._rests.get(tail[-size:], ())}:
            mask[self._ids[rest]] = False
        return mask

    def forget(self) -> None:
        """See ``base.Constraint``: there is nothing of one output."""

    def _tail(self, output: Sequence[int]) -> bytes:
        """The last bytes of the output, as many as a word may have begun with that one token may complete."""
        tail, most = b"", max(self._sizes, default=0)
        for token in reversed(output):
            if len(tail) >= most:
                break
            tail = self._texts[token] + tail
        return tail


def _rests(words: Collection[bytes], longest: int) -> dict[bytes, set[bytes]]:
    """What is left of ``words`` by their beginnings. No token begins with more than ``longest`` bytes."""
    found: dict[bytes, set[bytes]] = {}
    for word in words:
        for size in range(max(1, len(word) - longest), len(word)):
            found.setdefault(word[:size], set()).add(word[size:])
    return found
