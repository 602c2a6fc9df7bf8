"""Names in the documents exist: classes and their methods, fields of the configuration, feature gates."""

import re

from kubeproxy.config.fields import ConfigStruct, json_name
from kubeproxy.config.gates import GATES
from kubeproxy.config.types import KubeProxyConfiguration
from support.documents import documents
from support.places import ROOT


def test_methods_exist() -> None:
    classes: dict[str, str] = {}
    for room in ("src", "lab", "bench", "tests/support"):
        for path in (ROOT / room).rglob("*.py"):
            pieces = re.split(r"^class (\w+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
            for name, body in zip(pieces[1::2], pieces[2::2], strict=True):
                classes[name] = classes.get(name, "") + body
    named = [
        (place, match)
        for document in documents()
        for place, text in document.spans()
        if (match := re.match(r"([A-Z]\w+)\.(\w+)", text)) and match[1] in classes
    ]
    assert len(named) > 8
    for place, match in named:
        assert re.search(
            rf"def {match[2]}\b|\bself\.{match[2]} *[:=]|^    {match[2]}\b *[:=]", classes[match[1]], re.M
        ), f"{place}: {match[0]}"


def test_fields_of_the_configuration_exist() -> None:
    usual = KubeProxyConfiguration()
    blocks = {json_name(name): getattr(usual, name) for name in usual.__struct_fields__}
    fields = {
        name: {json_name(field) for field in block.__struct_fields__}
        for name, block in blocks.items()
        if isinstance(block, ConfigStruct)
    }
    named = [
        (place, match)
        for document in documents()
        for place, text in [*document.spans(), *document.commands]
        for match in re.finditer(r"\b([a-z]\w+)\.([a-z]\w+)\b", text)
        if match[1] in fields
    ]
    assert len(named) > 6
    for place, match in named:
        # Some programs, tables of nft and modules have the same names as modes.
        known = match[2] in fields[match[1]] or match[2] in {"md", "py", "conf"}
        assert known, f"{place}: {match[0]}"


def test_feature_gates_exist() -> None:
    named = [
        (place, name)
        for document in documents()
        for place, text in [*document.prose, *document.commands]
        for name in re.findall(r"\bgates? ([A-Z]\w+)|\b([A-Z][a-z]\w+)(?:=|: )(?:true|false)\b", text)
        for name in name
        if name
    ]
    assert len(named) > 6
    assert [f"{place}: {name}" for place, name in named if name not in GATES] == []
