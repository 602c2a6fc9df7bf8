"""YAML text to plain values, within bounds; a ValueError says in which line it grows or nests too much, or is none.

libyaml's composer recurses, so that deep nesting overruns the stack, and aliases make of a kilobyte whatever they like:
both are looked for in the events of the parser, which does neither, before anything is built.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import yaml

DEPTH: Final = 64
"""Deepest nesting, as in what the API server sends (api/salvage.py); no field that is used lies deeper than 8."""

VALUES: Final = 2_000_000
"""Most values of one document with all its aliases replaced: some 10,000 Services with their endpoints, and 1 GB."""

_LONG: Final = 64  # characters of text that count as one more value


def load_yaml(text: str | bytes, depth: int = DEPTH, values: int = VALUES) -> Any:
    """Return the value of a text with one document. Raises ValueError."""
    import yaml  # noqa: PLC0415 - a start that reads no YAML does not need it

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        check_bounds(yaml.parse(text, Loader=loader), depth, values)
        return yaml.load(text, Loader=loader)  # noqa: S506 - both are safe loaders
    except yaml.YAMLError as error:
        raise ValueError(place(error)) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text, see byte {error.start + 1}") from error
    except (RecursionError, TypeError) as error:  # such as a list for a key
        raise ValueError(f"cannot be built: {error}") from error


def place(error: yaml.YAMLError) -> str:
    """Return where a text is no YAML, and why, without what it holds there: that may be a secret."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else str(problem)


def check_bounds(events: Iterable[yaml.Event], depth: int, values: int) -> None:
    """Raise ValueError where a text nests deeper, or holds more values with its aliases replaced."""
    import yaml  # noqa: PLC0415 - as above

    start, end, alias, scalar = yaml.CollectionStartEvent, yaml.CollectionEndEvent, yaml.AliasEvent, yaml.ScalarEvent
    seen = 0
    sizes: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = []  # the anchor of each collection, and the values seen before it
    for event in events:
        if isinstance(event, scalar):
            size = 1 + len(event.value) // _LONG  # whoever writes an alias out writes all of its text
            seen += size
            if event.anchor:
                sizes[event.anchor] = size
        elif isinstance(event, alias):
            if any(anchor == event.anchor for anchor, _ in open_nodes):
                raise ValueError(f"{_line(event)}: *{event.anchor} stands within itself")
            seen += sizes.get(event.anchor or "", 1)
        elif isinstance(event, start):
            open_nodes.append((event.anchor, seen))
            seen += 1
            if len(open_nodes) > depth:
                raise ValueError(f"{_line(event)}: nested deeper than {depth} levels")
        elif isinstance(event, end):
            anchor, before = open_nodes.pop()
            if anchor:
                sizes[anchor] = seen - before
        if seen > values:
            raise ValueError(f"{_line(event)}: more than {values} values, aliases replaced by what they stand for")


def _line(event: yaml.Event) -> str:
    mark = event.start_mark
    return f"line {mark.line + 1}" if mark else "somewhere"
