"""What a field of an API object may be: scalars, lists, maps and structs, and how each of them merges.

The tables of schema.py are made of these; here is no kind. How values merge is said twice, as in Kubernetes' own types:
`merge_key` for strategic merge patches, keys, sets and atomic values for server-side apply (KEP-555).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scalar:
    """A JSON scalar: `go` is the Go type that error messages name, `json` the JSON types that it takes."""

    go: str
    json: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list. `keys` name the fields that tell its items apart; without them it is one value, unless `is_set`.

    `merge_key` is the one by which a strategic merge patch finds items, where it merges them at all. `is_required`:
    Go writes an empty list as null, so that the field is always there.
    """

    item: Type
    merge_key: str = ""
    keys: tuple[str, ...] = ()
    is_set: bool = False
    is_required: bool = False

    @property
    def go(self) -> str:
        """The Go type."""
        return f"[]{self.item.go}"


@dataclass(frozen=True, slots=True)
class MapOf:
    """A map from strings; `is_atomic`: replaced as a whole by whoever applies it."""

    item: Type
    is_atomic: bool = False

    @property
    def go(self) -> str:
        """The Go type."""
        return f"map[string]{self.item.go}"


@dataclass(frozen=True, slots=True)
class Struct:
    """An object with named fields; `is_open` keeps fields that are not named.

    `is_pointer`: in Go it may be missing, where other structs are empty at least. `is_atomic` as for maps.
    """

    go: str
    fields: dict[str, Type]
    is_open: bool = False
    is_pointer: bool = False
    is_atomic: bool = False


Type = Scalar | ListOf | MapOf | Struct

STRING = Scalar("string", ("string",))
BOOL = Scalar("bool", ("bool",))
INT32 = Scalar("int32", ("number",))
INT64 = Scalar("int64", ("number",))
TIME = Scalar("v1.Time", ("string",))
QUANTITY = Scalar("resource.Quantity", ("string", "number"))
INT_OR_STRING = Scalar("intstr.IntOrString", ("string", "number"))
STRINGS = ListOf(STRING)
STRING_SET = ListOf(STRING, is_set=True)
STRING_MAP = MapOf(STRING)
LABEL_SELECTOR = MapOf(STRING, is_atomic=True)


def named(go: str) -> Scalar:
    """A string of a named Go type."""
    return Scalar(go, ("string",))


def list_map(item: Struct, *keys: str, merge_key: str = "", is_required: bool = False) -> ListOf:
    """A list whose items are told apart by keys; the first of them is also that of strategic merge patches."""
    return ListOf(item, merge_key or keys[0], keys, is_required=is_required)
