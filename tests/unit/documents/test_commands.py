"""Command lines in the documents are valid: targets and variables of make, flags, names of benchmarks, pages."""

import json
import re
import shlex

import pytest

from bench.__main__ import ALL as BENCHMARKS
from kubeproxy.cluster.main import parser as plugin_parser
from kubeproxy.commands import COMMANDS
from kubeproxy.commands.parsers import parser_of
from kubeproxy.config.flags import BY_NAME
from kubeproxy.program.profiling import profiling_pages
from kubeproxy.report.health import ProxyHealth
from kubeproxy.report.metrics import ProxyMetrics, metrics_pages
from lab.__main__ import _parser as lab_parser
from support.documents import Words, documents
from support.metric_names import metric_names
from support.places import ROOT

# Flags of other programs that occur in the text without their command.
FOREIGN = {
    "--allocate-node-cidrs": "kube-controller-manager",
    "--build-arg": "docker",
    "--hypothesis-profile": "pytest",
    "--node-labels": "kubelet",
    "--peer": "bench",
    "--peer-mode": "bench",
    "--pod-network-cidr": "kubeadm",
    "--quick": "bench",
    "--random-fully": "iptables",
    "--set": "helm",
    "--skip-phases": "kubeadm",
}
# Metrics of the Go kube-proxy that the reference lists as missing.
ABSENT = {
    "kubeproxy_sync_proxy_rules_nftables_cleanup_failures_total",
    "rest_client_dns_resolution_duration_seconds",
    "rest_client_exec_plugin_call_total",
    "rest_client_exec_plugin_certificate_rotation_age",
    "rest_client_exec_plugin_ttl_seconds",
    "rest_client_request_retries_total",
    "rest_client_transport_cache_entries",
    "rest_client_transport_create_calls_total",
}
PLUGIN = {
    flag: option
    for commands in plugin_parser()._subparsers._group_actions  # type: ignore[union-attr]
    for command in commands.choices.values()  # type: ignore[union-attr, call-arg]
    for flag, option in command._option_string_actions.items()
}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())  # type: ignore[index]


def shown() -> list[Words]:
    """Yield texts that a reader may copy into a shell: code spans, and lines of code blocks without prompt."""
    lines = [
        Words(place, re.split(r"\s+#\s", text.strip().removeprefix("$ "))[0])
        for document in documents()
        for place, text in document.commands
    ]
    return lines + [words for document in documents() for words in document.spans()]


def after(program: str) -> list[tuple[str, list[str]]]:
    """Yield the places and arguments of every command line that runs kube-proxy, without other programs' arguments."""
    pattern = re.compile(rf"(?:^|[\s/'`]){re.escape(program)} +(.*?)(?:$|[;|]|&&)")
    found = []
    for place, text in shown():
        if match := pattern.search(text):
            arguments = match[1].removesuffix("\\").replace("'", " ")
            if arguments.count('"') % 2:  # the program itself in quotes
                arguments = arguments.replace('"', " ")
            found.append((place, shlex.split(arguments, comments=True)))
    return found


def test_make_has_the_documented_targets_and_variables() -> None:
    calls = after("make")
    assert len(calls) > 8
    for place, words in calls:
        assert words[0] in TARGETS, place
        for word in words[1:]:
            variable = word.partition("=")[0]
            assert f"$({variable})" in MAKEFILE or f"$(if $({variable})" in MAKEFILE, f"{place}: {word}"


def test_benchmarks_of_these_names_exist() -> None:
    calls = after("python -m bench")
    calls += [
        (place, word.removeprefix("WHAT=").split())
        for place, words in after("make bench")
        for word in words
        if word.startswith("WHAT=")
    ]
    calls += [(place, [text.removeprefix("bench ")]) for place, text in shown() if re.fullmatch(r"bench [a-z]+", text)]
    assert len(calls) > 8
    for place, words in calls:
        names = [word for word in words if re.fullmatch("[a-z0-9]+", word)]
        flags = [word for word in words if word.startswith("-")]
        assert set(names[:1]) <= {*BENCHMARKS, "gate", "markdown", "picture"}, place
        assert all(FOREIGN.get(flag) == "bench" for flag in flags if words[0] != "e2e"), place


def test_the_lab_takes_its_commands() -> None:
    calls = after("python -m lab")
    assert calls
    for place, words in calls:
        try:
            lab_parser().parse_args(words)
        except SystemExit:
            pytest.fail(f"{place}: lab {shlex.join(words)}")


def test_the_proxy_has_the_flags() -> None:
    lines = [(place, words) for place, words in after("kube-proxy") if not words or words[0] not in COMMANDS]
    flags = [(place, word) for place, words in lines for word in words if word.startswith("-")]
    # kubectl has an object of this name, which takes no flags of ours.
    kubectl = {place for place, text in shown() if "kubectl" in text or "helm" in text}
    spans = [Words(place, text) for document in documents() for place, text in document.spans()]
    flags += [(place, text) for place, text in spans if re.match("--[a-z]|-v", text)]
    ours = [(place, flag) for place, flag in flags if place not in kubectl]
    assert len(ours) > 15
    of_commands = {flag for name in COMMANDS for flag in parser_of(name)._option_string_actions} | PLUGIN.keys()
    for place, text in ours:
        name = re.split("[= ]", text)[0]
        if FOREIGN.get(name) is None:
            assert name.lstrip("-") in BY_NAME or name in of_commands, f"{place}: {text}"


def test_the_commands_take_their_arguments() -> None:
    calls = [(place, words) for place, words in after("kube-proxy") if words[1:] and words[0] in COMMANDS]
    assert len(calls) > 2
    for place, words in calls:
        try:
            parser_of(words[0]).parse_args([word for word in words[1:] if word != "…"])
        except SystemExit:
            pytest.fail(f"{place}: kube-proxy {shlex.join(words)}")


def test_the_plugin_takes_its_arguments() -> None:
    calls = [(place, [word for word in words if word != "…"]) for place, words in after("kubectl kubeproxy")]
    calls = [(place, words) for place, words in calls if words[1:]]
    assert len(calls) > 2
    for place, words in calls:
        try:
            plugin_parser().parse_args(words)
        except SystemExit:
            pytest.fail(f"{place}: kubectl kubeproxy {shlex.join(words)}")


def test_pages_exist_on_the_port_that_is_asked() -> None:
    others = {"/configz", "/statusz", "/flagz", "/debug/state"}
    metrics = ProxyMetrics()
    pages = {
        "10249": {*others, *metrics_pages(metrics, "nftables"), *profiling_pages(lambda _: None)},
        "10256": set(ProxyHealth(metrics, 30.0).routes()),
    }
    asked = [
        (place, port, path) for place, text in shown() for port, path in re.findall(r":(10249|10256)(/[\w/-]*)", text)
    ]
    assert len(asked) > 8
    for place, port, path in asked:
        assert path in pages[port], f"{place}: {path} on {port}"


def test_installed_folders_and_values_exist() -> None:
    """Folders of kustomize, and values of the chart."""
    folders = [(place, name) for place, text in shown() for name in re.findall(r"kubectl \w+ -k (\S+)", text)]
    values = [(place, name) for place, text in shown() for name in re.findall(r"--set ([\w]+)", text)]
    assert len(folders) >= 2
    assert len(values) >= 4
    known = json.loads((ROOT / "deploy/chart/values.schema.json").read_text(encoding="utf-8"))["properties"]
    for place, name in folders:
        path = ROOT / name if name.startswith("deploy/") else ROOT / "deploy/kustomize" / name
        assert (path / "kustomization.yaml").exists(), f"{place}: {name}"
    for place, name in values:
        assert name in known, f"{place}: {name}"


def test_metrics_of_these_names_exist() -> None:
    known = metric_names() | set(re.findall(r"^# TYPE (\w+)", ProxyMetrics().render().decode(), re.MULTILINE))
    named = [
        (place, name)
        for place, text in shown()
        for name in re.findall(r"\b(?:kubeproxy|rest_client|process|go)_[a-z_]+[a-z]\b", text)
    ]
    assert len(named) > 6
    assert not ABSENT & known
    for place, name in named:
        assert re.sub("_(bucket|sum|count)$", "", name) in known | ABSENT, f"{place}: {name}"


# nft 1.0.6 can do this without reading every element: 100,000 elements take 3 s, and it starts again after each change.
QUICK = re.compile(
    r"nft (list (chains|flowtables)|list set ip kube-proxy gone-endpoints|delete table|flush ruleset)\b.*"
)


def test_no_document_has_nft_read_large_tables():
    shown = [words for one in documents() for words in (*one.commands, *one.spans())]
    asked = [(place, text.strip()) for place, text in shown if re.match(r" *nft [-a-z]", text)]
    assert [f"{place}: {text}" for place, text in asked if not QUICK.match(text)] == []
