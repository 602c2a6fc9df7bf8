"""docs/reference.md lists every flag, field, metric and event; sections that comments cite exist."""

import re
from collections.abc import Iterator

from kubeproxy.config.fields import ConfigStruct, json_name
from kubeproxy.config.flags import FLAGS
from kubeproxy.config.types import KubeProxyConfiguration
from support.documents import document, documents
from support.metric_names import metric_names
from support.places import ROOT

SOURCES = ("src", "lab", "bench", "tests", "tools", "deploy", ".ci", "Makefile", "pyproject.toml")
CITATION = re.compile(r'(docs/[\w-]+\.md|CONTRIBUTING\.md|README\.md)(?:,? "([^"]+)"(?: (\d+)(?: to (\d+))?)?)?')


def section(heading: str) -> str:
    """Return the text of a section of the reference."""
    text = document("docs/reference.md").path.read_text(encoding="utf-8")
    return text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def test_every_flag() -> None:
    named = set(re.findall(r"`--?([a-z][a-z-]*)[^`]*`", section("Flags")))
    assert named == {flag.name for flag in FLAGS if not flag.hidden}


def test_defaults_of_flags() -> None:
    said = dict(re.findall(r"`--([a-z-]+)` \(([^)]+)\)", section("Flags")))
    assert len(said) > 20
    usual = {flag.name: flag.default for flag in FLAGS}
    usual["kube-api-content-type"] = "protobuf"
    short = {name: re.sub(r"(?<=[hms])0[ms]", "", re.sub("m0s$", "m", default)) for name, default in usual.items()}
    assert {name: short[name] for name in said} == said


def test_every_field_of_the_configuration() -> None:
    said = {
        row[0].strip("`"): set(re.findall(r"`(\w+)`", row[1]))
        for row in document("docs/reference.md").table("Configuration")
    }
    usual = KubeProxyConfiguration()
    blocks = {json_name(name): getattr(usual, name) for name in KubeProxyConfiguration.__struct_fields__}
    structs = {name: value for name, value in blocks.items() if isinstance(value, ConfigStruct)}
    assert said.pop("top") | {"udpIdleTimeout", "strict"} == blocks.keys() - structs.keys()
    assert said.pop("winkernel") == set()
    assert said.keys() == structs.keys() - {"winkernel"}
    for name, value in structs.items():
        if name in said:
            assert said[name] == {json_name(field) for field in value.__struct_fields__}, name


def test_every_metric() -> None:
    ours = {name for name in metric_names() if name.startswith("kubeproxy_")}
    assert ours - set(re.findall(r"`(\w+)`", section("Metrics"))) == set()


def test_every_event() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    named = re.findall(r"`([A-Z]\w+)`", section("Events"))
    assert [reason for reason in named if f'"{reason}"' not in source] == []
    recorded = set(re.findall(r'"((?:FailedToStart|Starting|Rules|Unusable)\w*)"', source))
    assert recorded - set(named) == set()


def citations() -> Iterator[tuple[str, re.Match[str]]]:
    """Yield every mention of a document in a source file."""
    for top in SOURCES:
        path = ROOT / top
        files = [path] if path.is_file() else (each for each in path.rglob("*") if each.is_file())
        for file in files:
            if file.suffix in {".json", ".pyc", ".tgz"} or "documents" in file.parts or "recordings" in file.parts:
                continue
            text = re.sub(r"\n\s*(?:#|//)?\s*", " ", file.read_text(encoding="utf-8", errors="replace"))
            for match in CITATION.finditer(text):
                yield str(file.relative_to(ROOT)), match


def test_sections_that_comments_cite_exist() -> None:
    headings = {document.name: document.headings for document in documents()}
    found = list(citations())
    assert len(found) > 12
    for place, match in found:
        name, heading, first, last = match.groups()
        assert name in headings, f"{place}: {match[0]}"
        assert heading is None or heading in headings[name], f"{place}: {match[0]}"
        if first:
            numbers = re.findall(r"^(\d+)\. ", section(heading), re.MULTILINE)
            assert {first, last or first} <= set(numbers), f"{place}: {match[0]}"


def test_no_comment_cites_a_missing_document() -> None:
    elsewhere = re.compile(r"\b(?:REFERENCE|DESIGN|STYLE|E2E)(?:\.md\b|\s*[\"':])|\.\./shared\b(?!/conformance)")
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for top in SOURCES
        for path in ([ROOT / top] if (ROOT / top).is_file() else (ROOT / top).rglob("*"))
        if path.suffix in {"", ".py", ".sh", ".toml", ".yaml", ".md"}
        and path.is_file()
        and "documents" not in path.parts
        for match in elsewhere.finditer(path.read_text(encoding="utf-8", errors="replace"))
    ]
    assert found == []
