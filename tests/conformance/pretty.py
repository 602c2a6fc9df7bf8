"""Readable JSON: a value that fits on a line is on one line, such as a probe or an answer."""

import json

WIDTH = 200


def pretty(value: object, indent: int = 0, before: int = 0) -> str:
    """Return the text of a JSON value that begins `indent` + `before` characters into its line."""
    flat = json.dumps(value)
    if not isinstance(value, dict | list) or not value or indent + before + len(flat) <= WIDTH:
        return flat
    if isinstance(value, dict):
        entries = [f"{json.dumps(key)}: {pretty(each, indent + 1, len(key) + 4)}" for key, each in value.items()]
    else:
        entries = [pretty(each, indent + 1) for each in value]
    left, right = ("{", "}") if isinstance(value, dict) else ("[", "]")
    lines = ",\n".join(" " * (indent + 1) + entry for entry in entries)
    return f"{left}\n{lines}\n{' ' * indent}{right}"
