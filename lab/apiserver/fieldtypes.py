"""The types of the fields of API objects: scalars, lists, maps and structs, with their rules for merging.

The tables in schema.py use these types; this module contains no kind. Each type has two rules for merging, as in the
types of Kubernetes: `merge_key` for strategic merge patches, keys, sets and atomic values for server-side apply
(KEP-555)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scalar:
    """A JSON scalar: `go` is the Go type in error messages, `json` the accepted JSON types."""

    go: str
    json: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list. `keys` are the fields that identify an item; without keys the list is one value, unless `is_set`.

    `merge_key` is the field by which a strategic merge patch finds items, if it merges them. `is_required`: Go writes
    an empty list as null, so that the field always exists.
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
    """A map from strings; `is_atomic`: an apply replaces the whole value."""

    item: Type
    is_atomic: bool = False

    @property
    def go(self) -> str:
        """The Go type."""
        return f"map[string]{self.item.go}"


@dataclass(frozen=True, slots=True)
class Struct:
    """An object with named fields; `is_open`: unnamed fields are kept.

    `is_pointer`: in Go the struct may be missing; other structs are then empty. `is_atomic` as for maps.
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
    """Return a list whose items are identified by keys; the first key is also the merge key of strategic merge
    patches."""
    return ListOf(item, merge_key or keys[0], keys, is_required=is_required)
