"""Writes what an installation has beside the program: manual pages, and the scripts that complete command lines.

python -m kubeproxy.commands.papers FOLDER makes FOLDER/man/man8 and FOLDER/completion. The pages are made of the same
definitions as --help; they are in the language of man(7).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from kubeproxy import __version__
from kubeproxy.commands import shells
from kubeproxy.commands.grammar import Grammar, Option, Position, commands, proxy
from kubeproxy.config.flags import FLAGS, KEPT_WITH_CONFIG

_ABOUT = """\
runs on each node of a Kubernetes cluster. It watches Services and EndpointSlices, and programs the node's kernel so
that traffic to a Service's addresses reaches its endpoints (TCP, UDP and SCTP, IPv4 and IPv6). It takes the flags and
the configuration of the Go kube-proxy.
"""
_FILES = {
    "/run/kube-proxy/control.sock": "The socket by which the commands ask the running proxy (--control-socket).",
    "/etc/default/kube-proxy": "KUBE_PROXY_FLAGS, further flags for the systemd unit.",
    "/var/lib/kube-proxy/config.conf": "The configuration that the systemd unit starts it with.",
}
_SIGNALS = {
    "SIGTERM, SIGINT": "It ends; the rules stay in the kernel, and traffic goes on. A second one ends it at once.",
    "SIGHUP": "Nothing. A changed configuration file is noticed by itself.",
}


def page(grammar: Grammar) -> str:
    """Return the manual page of a subcommand."""
    name = grammar.name.replace(" ", "-")
    usage = " ".join(map(_usage, grammar.positions))
    parts = [
        _head(name, grammar.summary),
        _section("SYNOPSIS", [f".B {_plain(grammar.name)}\n[\\fIoptions\\fR] {usage}"]),
        _section("DESCRIPTION", _prose(grammar.more or grammar.summary)),
        _section("ARGUMENTS", [_entry(f"\\fI{_plain(one.value.name)}\\fR", one.text) for one in grammar.positions]),
        *_options(grammar.options),
        _section("EXIT STATUS", [_entry("0", "Yes."), _entry("1", "No."), _entry("2", "It could not be told.")]),
        _section("SEE ALSO", [".BR kube\\-proxy (8)"]),
    ]
    return "".join(parts)


def main_page() -> str:
    """Return the manual page of the proxy itself."""
    kept = ", ".join(f"--{flag.name}" for flag in FLAGS if flag.name in KEPT_WITH_CONFIG and not flag.hidden)
    grammar = proxy()
    asked = [_entry(f"\\fB{_plain(one.name)}\\fR", f"{_sentence(one.summary)}.") for one in commands()]
    also = ", ".join(f"\\fB{_plain(one.name.replace(' ', '-'))}\\fR(8)" for one in commands())
    parts = [
        _head("kube-proxy", grammar.summary),
        _section(
            "SYNOPSIS", [".B kube\\-proxy\n[\\fIflags\\fR]", ".br\n.B kube\\-proxy\n\\fIcommand\\fR [\\fIoptions\\fR]"]
        ),
        _section("DESCRIPTION", [f".B kube\\-proxy\n{_plain(_ABOUT)}"]),
        _section("COMMANDS", ["On a node where it runs, with manual pages of their own:", *asked]),
        *_options(grammar.options),
        _section("CONFIGURATION FILE", [f"With \\-\\-config, the file replaces all flags except {_plain(kept)}."]),
        _section("SIGNALS", [_entry(f"\\fB{name}\\fR", text) for name, text in _SIGNALS.items()]),
        _section("FILES", [_entry(f"\\fI{_plain(name)}\\fR", text) for name, text in _FILES.items()]),
        _section("EXIT STATUS", [_entry("0", "Help, version, or a clean end."), _entry("1", "Every error.")]),
        _section("SEE ALSO", [f"{also}, \\fBnft\\fR(8), \\fBsystemctl\\fR(1)"]),
    ]
    return "".join(parts)


def _options(options: Iterable[Option]) -> Iterator[str]:
    for group, some in groupby(options, key=lambda option: option.group):
        title = "OPTIONS" if group in {"options", "positional arguments"} else f"OPTIONS: {group}"
        yield _section(_plain(title), [_entry(_names(one), one.text) for one in some])


def _names(option: Option) -> str:
    names = ", ".join(f"\\fB{_plain(name)}\\fR" for name in option.names)
    if option.value is None:
        return names
    words = "|".join(option.value.words)
    return f"{names} \\fI{_plain(words or option.value.name)}\\fR"


def _usage(position: Position) -> str:
    name = f"\\fI{_plain(position.value.name)}\\fR"
    return name if position.needed else f"[{name}]"


def _head(name: str, summary: str) -> str:
    # No date: the same program gives the same page.
    title = f'.TH "{name.upper()}" "8" "" "kubeproxy {__version__}" "Kubernetes"'
    return f"{title}\n.nh\n.ad l\n.SH NAME\n{_plain(name)} \\- {_plain(summary)}\n"


def _section(title: str, paragraphs: Iterable[str]) -> str:
    text = "".join(f"{one}\n" for one in paragraphs)
    return f'.SH "{title}"\n{text}' if text else ""


def _entry(head: str, text: str) -> str:
    return f".TP\n{head}\n{_plain(_sentence(text))}"


def _prose(text: str) -> Iterator[str]:
    """Yield the paragraphs of a text; lines that are indented stay as they are."""
    for block in text.strip("\n").split("\n\n"):
        if block.startswith("  "):
            lines = "\n".join(line[2:] for line in block.splitlines())
            yield f".PP\n.nf\n.RS 4\n{_plain(lines)}\n.RE\n.fi"
        else:
            yield f".PP\n{_plain(block)}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _plain(text: str) -> str:
    """Return a text in which roff finds nothing that means more to it than letters."""
    escaped = (
        text.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\(ga").replace("'", "\\(aq").replace("…", "...")
    )
    return "\n".join(f"\\&{line}" if line.startswith(".") else line for line in escaped.splitlines())


def write(folder: Path) -> None:
    """Write all of it below a folder. Raises OSError."""
    manual, scripts = folder / "man/man8", folder / "completion"
    manual.mkdir(parents=True, exist_ok=True)
    scripts.mkdir(parents=True, exist_ok=True)
    (manual / "kube-proxy.8").write_text(main_page(), encoding="utf-8")
    for one in commands():
        (manual / f"{one.name.replace(' ', '-')}.8").write_text(page(one), encoding="utf-8")
    for shell, name in shells.FILES.items():
        (scripts / name).write_text(shells.SCRIPTS[shell](), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
