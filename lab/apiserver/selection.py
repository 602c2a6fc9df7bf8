"""Label and field selectors, each parsed once. Pure.

Source: apimachinery's labels.Parse (=, ==, !=, in, notin, exists, !exists, gt, lt) and fields.ParseSelector.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lab.apiserver.status import bad_request

Labels = Mapping[str, str]
Predicate = Callable[[Labels], bool]

_KEY = r"(?:[A-Za-z0-9](?:[-A-Za-z0-9.]*[A-Za-z0-9])?/)?[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?"
_VALUE = r"(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?)?"
_TERM = re.compile(
    rf"\s*(?:"
    rf"!\s*(?P<absent>{_KEY})"
    rf"|(?P<set_key>{_KEY})\s+(?P<set_op>in|notin)\s*\((?P<values>[^()]*)\)"
    rf"|(?P<key>{_KEY})\s*(?P<op>==|=|!=|>|<)\s*(?P<value>{_VALUE})"
    rf"|(?P<present>{_KEY})"
    rf")\s*(?:,|$)"
)


@dataclass(frozen=True, slots=True)
class Selector:
    """A selector: all predicates must hold; without predicates it matches everything."""

    predicates: tuple[Predicate, ...] = ()

    def matches(self, values: Labels) -> bool:
        """Return whether labels (or fields) match."""
        return all(p(values) for p in self.predicates)


EVERYTHING = Selector()


def _set_term(key: str, operator: str, values: frozenset[str]) -> Predicate:
    if operator == "in":
        return lambda labels: labels.get(key) in values
    return lambda labels: labels.get(key) not in values


def _ordered(key: str, operator: str, bound: int) -> Predicate:
    def compare(labels: Labels) -> bool:
        try:
            value = int(labels[key])
        except (KeyError, ValueError):
            return False
        return value > bound if operator == ">" else value < bound

    return compare


def _term(match: re.Match[str], text: str) -> Predicate:
    if (absent := match["absent"]) is not None:
        return lambda labels: absent not in labels
    if (present := match["present"]) is not None:
        return lambda labels: present in labels
    if match["set_key"] is not None:
        values = frozenset(v.strip() for v in match["values"].split(","))
        return _set_term(match["set_key"], match["set_op"], values)
    key, operator, value = match["key"], match["op"], match["value"]
    if operator in {">", "<"}:
        if not value.isdigit():
            raise bad_request(f"unable to parse requirement: values[0][{key}]: Invalid value: {text!r}: not an integer")
        return _ordered(key, operator, int(value))
    return _set_term(key, "notin" if operator == "!=" else "in", frozenset({value}))


def parse_labels(text: str) -> Selector:
    """Parse a labelSelector; raises ApiError 400."""
    predicates: list[Predicate] = []
    at = 0
    while at < len(text):
        match = _TERM.match(text, at)
        if match is None or match.end() == at:
            raise bad_request(f"unable to parse requirement: found '{text[at:]}', expected: a label requirement")
        predicates.append(_term(match, text))
        at = match.end()
    return Selector(tuple(predicates))


def from_map(selector: Labels) -> Selector:
    """Return the equality selector of a Service or ReplicationController."""
    return Selector(tuple(_set_term(k, "in", frozenset({v})) for k, v in selector.items()))


def _field_term(field: str, operator: str, value: str) -> Predicate:
    if operator == "!=":
        return lambda fields: fields.get(field, "") != value
    return lambda fields: fields.get(field, "") == value


def parse_fields(text: str, allowed: tuple[str, ...], kind: str) -> Selector:
    """Parse a fieldSelector; fields that are not `allowed` raise ApiError 400."""
    predicates: list[Predicate] = []
    for term in filter(None, re.split(r"(?<!\\),", text)):
        match = re.fullmatch(r"([^=!]+)(==|=|!=)(.*)", term)
        if match is None:
            raise bad_request(f"invalid selector: '{text}'; can't understand '{term}'")
        field, operator, value = match.groups()
        if field not in allowed:
            raise bad_request(f'Unable to find "{kind}" that match label selector "", field selector "{text}": '
                              f'field label not supported: {field}')  # fmt: skip
        predicates.append(_field_term(field, operator, re.sub(r"\\(.)", r"\1", value)))
    return Selector(tuple(predicates))
