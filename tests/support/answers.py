"""The documented schema of answers for programs, docs/answers.schema.json, and a check against it."""

from __future__ import annotations

import json
from typing import Any

from jsonschema import Draft202012Validator

from kubeproxy.errors import NoAnswerError
from support.places import ROOT

SCHEMA = json.loads((ROOT / "docs/answers.schema.json").read_text(encoding="utf-8"))


def valid(name: str, text: str) -> dict[str, Any]:
    """Return an answer, after validation against the schema's definition of this name."""
    answer: dict[str, Any] = json.loads(text)
    validator = Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": SCHEMA["$defs"]})
    wrong = [f"{error.json_path}: {error.message[:300]}" for error in validator.iter_errors(answer)]
    assert wrong == [], f"{name}: {wrong}"
    return answer


def refusal(error: NoAnswerError) -> dict[str, Any]:
    """Return the output of a node's command that ends with an error."""
    document = {"schemaVersion": 1, "version": "0.1.0", "error": str(error)} | vars(error)
    return {"out": json.dumps(document), "err": f"Error: {error}\n"}
