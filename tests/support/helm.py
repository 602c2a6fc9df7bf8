"""What `helm template` makes of deploy/chart: only the actions that its templates use; any other is an error.

Actions: if, if not, else, end, and pipelines of .Values.*, .Release.Namespace, .Chart.AppVersion, literals, default,
quote, required, toYaml and nindent.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import yaml

Json = dict[str, Any]
_ACTION = re.compile(r"(\s*)\{\{(-?) (.*?) (-?)\}\}")
_WORD = re.compile(r'"[^"]*"|\S+')


class RequiredError(Exception):
    """A value that must be set is not."""


def merged(defaults: Json, given: Json) -> Json:
    """The chart's values with those of a user over them."""
    result = copy.deepcopy(defaults)
    for key, value in given.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


def template(chart: Path, values: Json, namespace: str) -> list[Json]:
    """The objects of a chart, with values that are already merged."""
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    scope = {
        "Values": values,
        "Release": {"Namespace": namespace},
        "Chart": {"AppVersion": str(about["appVersion"])},
    }
    texts = [_render(path.read_text(), scope) for path in sorted((chart / "templates").glob("*.yaml"))]
    return [obj for text in texts for obj in yaml.safe_load_all(text) if obj]


def _render(text: str, scope: Json) -> str:
    out: list[str] = []
    shown = [True]
    position = 0
    for action in _ACTION.finditer(text):
        space, left, body, right = action.groups()
        assert not right, f"{body}: trimming to the right is more than this renderer knows"
        if all(shown):
            out.append(text[position : action.start()] + ("" if left else space))
        position = action.end()
        words = _WORD.findall(body)
        if words[0] == "if":
            negated = words[1] == "not"
            shown.append(bool(_value(words[2 if negated else 1 :], scope)) is not negated)
        elif words == ["else"]:
            shown[-1] = not shown[-1]
        elif words == ["end"]:
            shown.pop()
        elif all(shown):
            out.append(str(_value(words, scope)))
    assert shown == [True], "an if is not ended"
    return "".join(out) + text[position:]


def _value(words: list[str], scope: Json) -> Any:
    """A pipeline: each step gets what the one before made as its last argument."""
    result: list[Any] = []
    step: list[str] = []
    for word in [*words, "|"]:
        if word != "|":
            step.append(word)
            continue
        result = [_call(step, result, scope)]
        step = []
    return result[0]


def _call(step: list[str], piped: list[Any], scope: Json) -> Any:
    name, *rest = step
    arguments = [_atom(word, scope) for word in rest] + piped
    if name[0] in '."' or name.isdigit():
        return _atom(name, scope)
    if name == "default":
        return arguments[1] or arguments[0]
    if name == "quote":
        return json.dumps(arguments[0])
    if name == "required":
        if not arguments[1]:
            raise RequiredError(arguments[0])
        return arguments[1]
    if name == "toYaml":
        return yaml.safe_dump(arguments[0], default_flow_style=False).rstrip()
    if name == "nindent":
        return "".join("\n" + " " * arguments[0] + line for line in arguments[1].splitlines())
    raise AssertionError(f"{name}: is more than this renderer knows")


def _atom(word: str, scope: Json) -> Any:
    if word.startswith('"'):
        return json.loads(word)
    if word.isdigit():
        return int(word)
    assert word.startswith("."), f"{word}: is more than this renderer knows"
    value: Any = scope
    for part in word[1:].split("."):
        value = value[part]
    return value
