"""Writes the manual pages, and the scripts that complete command lines.

`python manual.py FOLDER` creates FOLDER/man/man8 and FOLDER/completion for the package kubeproxy of this Python. The
pages are written in the language of man(7), from the same parsers as --help.

argparse-manpage (4.8) is not used: its pages have no line for whatis(1), join the lines of examples, and contain the
date. It would replace only 40 of these lines, because the sections on files, signals and exit codes would remain.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from kubeproxy.commands import COMMANDS
from kubeproxy.commands.completion import SCRIPTS
from kubeproxy.commands.parsers import PROXY, parser_of, summary, values
from kubeproxy.config.flags import FLAGS, KEPT_WITH_CONFIG
from kubeproxy.release import build

ABOUT = """\
kube-proxy runs on each node of a Kubernetes cluster. It watches Services and EndpointSlices, and programs the node's
kernel so that traffic to a Service's addresses reaches its endpoints (TCP, UDP and SCTP, IPv4 and IPv6). It takes the
flags and the configuration of the Go kube-proxy.
"""
KEPT = ", ".join(f"--{flag.name}" for flag in FLAGS if flag.name in KEPT_WITH_CONFIG and not flag.hidden)
SIGNALS = {
    "SIGTERM, SIGINT": "The proxy ends; the rules remain in the kernel. A second signal ends it at once.",
    "SIGHUP": "No effect. The proxy notices a changed configuration file by itself.",
}
PATHS = {
    "/run/kube-proxy/control.sock": "The socket over which commands query the running proxy (--control-socket).",
    "/etc/default/kube-proxy": "KUBE_PROXY_FLAGS, further flags for the systemd unit.",
    "/var/lib/kube-proxy/config.conf": "The configuration with which the systemd unit starts the proxy.",
}
ANSWERS = {"0": "Yes.", "1": "No.", "2": "The answer is unknown."}
FILES = {"bash": "kube-proxy.bash", "zsh": "_kube-proxy", "fish": "kube-proxy.fish"}
"""The name of the completion script for each shell."""


def page(name: str) -> str:
    """Return the manual page of a subcommand, or of the proxy itself."""
    parser = parser_of(name)
    parts = [*_head(parser, COMMANDS.get(name, "the Kubernetes network proxy of a node")), *_arguments(parser)]
    if name == PROXY:
        parts += [".SH CONFIGURATION FILE", _plain(f"With --config, the file replaces all flags except {KEPT}.")]
        parts += [".SH SIGNALS", *_entries(SIGNALS), ".SH FILES", *_entries(PATHS)]
        parts += [".SH EXIT STATUS", *_entries({"0": "Help, version, or a clean end.", "1": "Every error."})]
        also = ", ".join(f"\\fBkube\\-proxy\\-{one}\\fR(8)" for one in COMMANDS)
        parts += [".SH SEE ALSO", f"{also}, \\fBnft\\fR(8), \\fBsystemctl\\fR(1)"]
    else:
        parts += [".SH EXIT STATUS", *_entries(ANSWERS), ".SH SEE ALSO", "\\fBkube\\-proxy\\fR(8)"]
    return "\n".join(parts) + "\n"


def _head(parser: argparse.ArgumentParser, about: str) -> Iterator[str]:
    name = parser.prog.replace(" ", "-")
    # No date: the same program gives the same page.
    yield f'.TH "{name.upper()}" "8" "" "kubeproxy {build().name}" "Kubernetes"\n.nh\n.ad l'
    yield f".SH NAME\n{_plain(name)} \\- {_plain(about)}\n.SH SYNOPSIS\n.B {_plain(parser.prog)}\n[\\fIoptions\\fR]"
    for one in parser._get_positional_actions():
        yield f"[\\fI{one.metavar}\\fR]" if one.nargs == "?" else f"\\fI{one.metavar}\\fR"
    if parser.prog == "kube-proxy":
        yield f".br\n.B kube\\-proxy\n\\fIcommand\\fR [\\fIoptions\\fR]\n.SH DESCRIPTION\n{_plain(ABOUT)}"
        yield ".SH COMMANDS\nOn a node where it runs, with manual pages of their own:"
        yield from _entries(COMMANDS)
    else:
        yield from (".SH DESCRIPTION", *_prose(parser.epilog or about))


def _arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    titles = {"positional arguments": "ARGUMENTS", "options": "OPTIONS"}
    for group in parser._action_groups:
        title = group.title or ""
        if group._group_actions:
            yield f'.SH "{_plain(titles.get(title, f"OPTIONS: {title}"))}"'
        for one in group._group_actions:
            value = "|".join(values(one)) if one.option_strings else ""
            names = ", ".join(f"\\fB{_plain(name)}\\fR" for name in sorted(one.option_strings, key=len))
            shown = f"\\fI{_plain(value or str(one.metavar))}\\fR" if one.nargs != 0 else ""
            yield f".TP\n{' '.join(filter(None, (names, shown)))}\n{_plain(_sentence(summary(one)))}"


def _entries(entries: Mapping[str, str]) -> Iterable[str]:
    return (f".TP\n\\fB{_plain(name)}\\fR\n{_plain(_sentence(text))}" for name, text in entries.items())


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
    """Return a text with its special characters escaped for roff."""
    marks = {"\\": "\\e", "-": "\\-", "`": "\\(ga", "'": "\\(aq", "…": "..."}
    escaped = text.translate(str.maketrans(marks)).rstrip("\n")
    return "\n".join(f"\\&{line}" if line.startswith(".") else line for line in escaped.splitlines())


def write(folder: Path) -> None:
    """Write the pages and scripts below a folder. Raises OSError."""
    for name in ("man/man8", "completion"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name in (PROXY, *COMMANDS):
        title = f"kube-proxy-{name}" if name else "kube-proxy"
        (folder / "man/man8" / f"{title}.8").write_text(page(name), encoding="utf-8")
    for shell, name in FILES.items():
        (folder / "completion" / name).write_text(SCRIPTS[shell], encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
