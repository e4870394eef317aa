"""How often the parts of a JSON Schema are applied to one value. No I/O.

A part that is used twice is applied twice, so a schema of a few lines may ask for more than any machine can do. Counted
is what is applied to a value and to one within it, and one within that, …: what the properties of an object are checked
by is for different values, and counts once. So a part that names itself counts as often as values lie in each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote

import jsonschema_rs

MOST: Final = 10**9
"""Not told apart from more."""
DEPTH: Final = 16
"""Values within each other; deeper ones are not told apart."""
_PARTS: Final = 2000
"""Of a schema whose cost is told."""
_SAME: Final = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies")
"""Their schemas are for the value itself."""
_NAMED: Final = frozenset({"dependentSchemas", "dependencies", "properties", "patternProperties"})
"""These have schemas by name."""
_COMPARED: Final = ("enum", "const", "required", "dependentRequired", "properties")
"""Each of what these hold is looked for."""
_PLAIN: Final = jsonschema_rs.RegexOptions(size_limit=16 * 1024, dfa_size_limit=256 * 1024)
"""Of a regular expression that each byte of a text costs so much at most: others go back and forth, or have a thousand
states at once, and one text of some bytes may take milliseconds, one of 256 KiB half a minute."""
_SAID: Final = frozenset(
    (
        "type", "enum", "const", "not", "anyOf", "oneOf", "contains", "format", "pattern",
        "multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength",
        "minItems", "maxItems", "uniqueItems", "items", "additionalItems", "minProperties",
        "maxProperties", "additionalProperties", "propertyNames", "contentEncoding", "contentMediaType",
    )
)  # fmt: skip
"""Each may say once of a value that it is wrong."""
_UNTOLD: Final = frozenset({"$dynamicRef", "$recursiveRef", "unevaluatedProperties", "unevaluatedItems"})


@dataclass(frozen=True)
class Expansion:
    """What a schema asks for."""

    checks: tuple[int, ...]
    """Comparisons of a value at most together with one within it, and one within that, …: where values lie 0, 1, 2, …
    deep. The last holds for all deeper ones. MOST: so many or more."""
    union: int
    """Of those that a single ``anyOf`` or ``oneOf`` means at most; MOST where it looks at values within. What is wrong
    is told of each of its branches, which takes a thousand times as long."""
    patterned: bool = False
    """Whether texts are held against regular expressions: what that takes their bytes say, not how many there are."""
    branches: tuple[int, ...] = field(default=(0,), compare=False)
    """As ``checks``, of what ``anyOf`` and ``oneOf`` and all within them may say is wrong: each has the value for
    itself, also each name of ``required`` that lacks."""

    def copies(self, deep: int = DEPTH + 1) -> int:
        """How often a byte of a body at most is in what is told of it, where values lie so deep."""
        return 1 + self.branches[min(deep, len(self.branches) - 1)]

    def cost(self, values: int, deep: int = DEPTH + 1) -> int:
        """Comparisons of a value at most in which so many lie so deep."""
        return self.checks[0] + values * (self.checks[min(deep, len(self.checks) - 1)] - self.checks[0])


@dataclass
class _Part:
    """One schema within the whole; others by their number."""

    weight: int = 1
    said: int = 0
    """What it may say of the value itself at most."""
    branches: list[int] = field(default_factory=list)
    """Of these and of all within them each error is told; else the first alone."""
    patterned: bool = False
    same: list[int] = field(default_factory=list)
    every_property: list[int] = field(default_factory=list)
    a_property: list[int] = field(default_factory=list)
    every_item: list[int] = field(default_factory=list)
    an_item: list[int] = field(default_factory=list)


def expansion(schema: Any) -> Expansion | None:
    """None: it cannot be told."""
    parts = _parts(schema)
    order = _inner_first(parts)
    if not order:
        return None
    checks, here, below = _levels(parts, order, [part.weight for part in parts])
    told = _beside(parts)
    branches, _, _ = _levels(parts, order, [part.said if n in told else 0 for n, part in enumerate(parts)])
    unions = (MOST if below[n] else here[n] for n, part in enumerate(parts) if part.branches)
    patterned = any(part.patterned for part in parts)
    return Expansion(tuple(checks), max(unions, default=0), patterned, tuple(branches) or (0,))


def _levels(parts: list[_Part], order: list[int], weights: list[int]) -> tuple[list[int], list[int], list[bool]]:
    """What comes together of ``weights`` for the whole and those within it, as ``Expansion.checks`` says; of each part
    for the value itself, and whether it looks at values within."""
    found: list[int] = []
    within = [0] * len(parts)
    here, objects, arrays = ([0] * len(parts) for _ in range(3))
    while len(found) <= DEPTH:
        now = [0] * len(parts)
        for number in order:
            part = parts[number]
            same, of_object, of_array = weights[number], 0, 0
            if part.every_property or part.a_property:
                of_object = _within(part.every_property, part.a_property, within)
            if part.every_item or part.an_item:
                of_array = _within(part.every_item, part.an_item, within)
            for other in part.same:
                same += here[other]
                of_object += objects[other]
                of_array += arrays[other]
            here[number], objects[number], arrays[number] = min(MOST, same), min(MOST, of_object), min(MOST, of_array)
            now[number] = min(MOST, same + max(of_object, of_array))  # it is an object or an array
        if now == within:
            break
        found.append(now[0])
        within = now
    else:
        found.append(MOST)
    return found, here, [bool(objects[n] or arrays[n]) for n in range(len(parts))]


def extent(value: Any) -> tuple[int, int]:
    """How many values lie in ``value``, and how deep; none beyond DEPTH + 1."""
    count, deep, level = 0, 0, [value]
    while deep <= DEPTH and (level := [inner for each in level for inner in _inner(each)]):
        count += len(level)
        deep += 1
    return count, deep


def _inner(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _within(of_all: list[int], of_one: list[int], within: list[int]) -> int:
    return sum([within[part] for part in of_all]) + max([within[part] for part in of_one], default=0)


def _parts(schema: Any) -> list[_Part]:
    """Every schema that is reached, the whole first; none where what they ask for cannot be told."""
    numbers, schemas = {id(schema): 0}, [schema]

    def number(each: Any) -> int:
        if id(each) not in numbers:
            numbers[id(each)] = len(schemas)
            schemas.append(each)
        return numbers[id(each)]

    parts: list[_Part] = []
    while len(parts) < len(schemas):
        each, part = schemas[len(parts)], _Part()
        parts.append(part)
        if not isinstance(each, dict):
            part.said = int(each is False)  # which nothing fits
            continue
        renamed = part is not parts[0] and ("$id" in each or "id" in each)
        target = _target(schema, each["$ref"]) if "$ref" in each else schema
        patterns = _patterns(each)
        if len(parts) > _PARTS or renamed or target is None or not _UNTOLD.isdisjoint(each):
            return []
        if not all(map(_plain, patterns)):
            return []
        part.patterned = bool(patterns)
        part.weight += sum(len(each[word]) for word in _COMPARED if isinstance(each.get(word), dict | list))
        part.same += [number(target)] if "$ref" in each else []
        part.same += map(number, _schemas(each, *_SAME))
        part.branches += map(number, _schemas(each, "anyOf", "oneOf"))
        part.said = len(_SAID & each.keys()) + sum(map(len, _names(each)))
        part.every_property += map(number, _schemas(each, "patternProperties", "additionalProperties", "propertyNames"))
        part.a_property += map(number, _schemas(each, "properties"))
        part.every_item += map(number, _schemas(each, "contains", "additionalItems"))
        part.an_item += map(number, _schemas(each, "prefixItems"))
        of_items = part.an_item if isinstance(each.get("items"), list) else part.every_item
        of_items += map(number, _schemas(each, "items"))
    return parts


def _beside(parts: list[_Part]) -> set[int]:
    """Those that are branches of a union, or within one."""
    found, left = set[int](), [number for part in parts for number in part.branches]
    while left:
        number = left.pop()
        if number not in found:
            found.add(number)
            part = parts[number]
            left += [*part.same, *part.every_property, *part.a_property, *part.every_item, *part.an_item]
    return found


def _names(part: dict[str, Any]) -> Iterator[list[Any]]:
    """Lists of names each of which is told of if it lacks."""
    depending = [part.get(word) for word in ("dependentRequired", "dependencies")]
    for each in (part.get("required"), *(names for by in depending if isinstance(by, dict) for names in by.values())):
        if isinstance(each, list):
            yield each


def _patterns(part: dict[str, Any]) -> list[Any]:
    named = part.get("patternProperties")
    return [*([part["pattern"]] if "pattern" in part else ()), *(named if isinstance(named, dict) else ())]


def _plain(pattern: Any) -> bool:
    try:
        jsonschema_rs.validator_for({"pattern": pattern}, offline=True, pattern_options=_PLAIN)
    except ValueError:
        return False
    return True


def _schemas(part: dict[str, Any], *keywords: str) -> Iterator[Any]:
    """Those that stand under ``keywords``."""
    for keyword in keywords:
        value = part.get(keyword)
        if keyword in _NAMED and isinstance(value, dict):
            value = list(value.values())
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict | bool):
                yield each


def _target(schema: Any, reference: Any) -> Any | None:
    """What ``reference`` names: a JSON pointer; None: nothing, or it is none."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found = schema
    for word in unquote(reference).split("/")[1:]:
        word = word.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(word)
        elif isinstance(found, list) and word.isdecimal() and int(word) < len(found):
            found = found[int(word)]
        else:
            return None
    return found


def _inner_first(parts: list[_Part]) -> list[int]:
    """Their numbers, each after those that are for the same value; none if there is no such order."""
    order: list[int] = []
    begun, done = set[int](), set[int]()
    for first in range(len(parts)):
        way = [first]
        while way:
            number = way[-1]
            if number in done:
                way.pop()
                continue
            left = [other for other in parts[number].same if other not in done]
            if not left:
                done.add(number)
                order.append(number)
            elif number in begun:
                return []
            else:
                way += left
            begun.add(number)
    return order
