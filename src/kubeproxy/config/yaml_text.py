"""Converts YAML text to plain values, with limits on nesting and size; reports keys that occur more than once. Scalars
get the same types as in Kubernetes' YAML reader: dates and base-60 numbers are text, 1e3 is a number. Deep nesting
would overflow the stack of libyaml's recursive composer, and aliases can expand a kilobyte without limit. Nesting and
size are therefore checked on the parser's events before a value is built."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    import yaml

DEPTH: Final = 64
"""The maximum nesting, as in api/salvage.py; fields that the proxy reads are nested at most 8 deep."""

VALUES: Final = 2_000_000
"""The maximum number of values in a document after expansion of aliases: some 10,000 Services with endpoints, which
take 1 GB of memory."""

_LONG: Final = 64  # every 64 characters of a text count as one more value
_TAG: Final = "tag:yaml.org,2002:"
_POWER_OF_TEN: Final = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+")  # Helm writes 1000000 as 1e+06


class YamlDocument(NamedTuple):
    """A document's value (dict, list, str, int, float, bool, None), and the paths of keys that occur more than once."""

    value: Any
    duplicates: list[str]


def load_yaml(text: str | bytes) -> Any:
    """Return the value of the only document in YAML text. Raises ValueError, which names the line."""
    found = list(yaml_documents(text))
    if len(found) > 1:
        raise ValueError("contains more than one document")
    return found[0].value if found else None


def yaml_documents(text: str | bytes, depth: int = DEPTH, values: int = VALUES) -> Iterator[YamlDocument]:
    """Yield the documents in YAML text. Raises ValueError, which names the line but does not quote the text."""
    import yaml  # noqa: PLC0415 - most starts read no YAML

    kind = _loader()
    try:
        _check_bounds(yaml.parse(text, Loader=kind), depth, values)
        loader = kind(text)
        try:
            while loader.check_data():
                yield YamlDocument(loader.get_data(), loader.duplicates)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise ValueError(_place(error)) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text, see byte {error.start + 1}") from error
    except (RecursionError, TypeError) as error:
        raise ValueError(f"cannot be built: {error}") from error


@cache
def _loader() -> Any:
    import yaml  # noqa: PLC0415 - as above

    base = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):  # type: ignore[misc, valid-type]
        """Builds values by this module's rules for scalars and keys."""

        def __init__(self, text: str | bytes) -> None:
            super().__init__(text)
            self.duplicates: list[str] = []
            self.path: list[str] = []

        def mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
            self.flatten_mapping(node)
            found: dict[str, Any] = {}
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise yaml.constructor.ConstructorError(None, None, "a key must be text", key.start_mark)
                name = str(key.value)
                self.path.append(name)
                if name in found:
                    self.duplicates.append(".".join(self.path))
                found[name] = self.construct_object(value, deep=True)
                self.path.pop()
            return found

        def number(self, node: yaml.ScalarNode) -> Any:
            if ":" in node.value:
                return node.value
            try:
                read = self.construct_yaml_int if node.tag == f"{_TAG}int" else self.construct_yaml_float
                return read(node)
            except ValueError as error:
                raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error

    text_tags = {f"{_TAG}timestamp", f"{_TAG}value"}
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in text_tags]
        for first, resolvers in base.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver(f"{_TAG}float", _POWER_OF_TEN, list("-+0123456789"))
    Loader.add_constructor(f"{_TAG}map", Loader.mapping)
    for tag in ("int", "float"):
        Loader.add_constructor(f"{_TAG}{tag}", Loader.number)
    return Loader


def _place(error: yaml.YAMLError) -> str:
    """Return the position and the kind of an error; do not quote the text, which may be a secret."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else str(problem)


def _check_bounds(events: Iterable[yaml.Event], depth: int, values: int) -> None:
    import yaml  # noqa: PLC0415 - as above

    start, end, alias, scalar = yaml.CollectionStartEvent, yaml.CollectionEndEvent, yaml.AliasEvent, yaml.ScalarEvent
    seen = 0
    sizes: dict[str, int] = {}
    # for each open collection: its anchor, and the number of values before it
    open_nodes: list[tuple[str | None, int]] = []
    for event in events:
        if isinstance(event, scalar):
            size = 1 + len(event.value) // _LONG  # an alias repeats the text when it is expanded
            seen += size
            if event.anchor:
                sizes[event.anchor] = size
        elif isinstance(event, alias):
            if any(anchor == event.anchor for anchor, _ in open_nodes):
                raise ValueError(f"{_line(event)}: *{event.anchor} contains itself")
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
            raise ValueError(f"{_line(event)}: more than {values} values after expansion of aliases")


def _line(event: yaml.Event) -> str:
    return f"line {event.start_mark.line + 1 if event.start_mark else '?'}"
