"""Runs subcommands, with an argparse parser for each. The parser for the proxy itself serves only shell completion and
the manual pages, which are generated from all parsers."""

from __future__ import annotations

import argparse
import gc
import logging
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

from kubeproxy.commands import ALONE, COMMANDS, HIDDEN, completed
from kubeproxy.config.flags import BY_NAME, FLAGS, GROUPS
from kubeproxy.config.modes import MODES
from kubeproxy.config.pflag import SHORTHANDS, shown_default
from kubeproxy.features import FEATURES
from kubeproxy.kernel.proc.capability import raise_net_admin
from kubeproxy.server.text import clean, printable

PROXY: Final = ""  # the proxy itself
_VALUES = {
    "proxy-mode": tuple(MODES),
    "detect-local-mode": ("ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix"),
    "logging-format": ("text", "json"),
    "source": ("node",),  # or any address
}
_PATHS = {"config": "FILE", "kubeconfig": "FILE", "write-config-to": "FILE", "manifests": "FOLDER"}


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return the parser of a subcommand's arguments; for PROXY a parser with the proxy's flags, for documentation
    only."""
    if name == PROXY:
        return _proxy()
    module, about = import_module(f"kubeproxy.commands.{name}"), {**COMMANDS, **HIDDEN}[name]
    parser = argparse.ArgumentParser(
        prog=f"kube-proxy {name}",
        description=f"{about[0].upper()}{about[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=module.__doc__.partition("\n\n")[2] if module.__doc__ else None,
    )
    module.arguments(parser)
    if name not in ALONE:
        _source_arguments(parser)
        if name != "plan":
            _feature_arguments(parser)
    return parser


def run(argv: Sequence[str]) -> int:
    """Run the subcommand that the first word names; return the exit code."""
    raise_net_admin()
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(WarningFormatter())
    return completed(lambda: _run(*argv))


class WarningFormatter(logging.Formatter):
    """Prints a warning without secrets and control characters, for example of a command that reads the API itself."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of a record."""
        return "\n".join(printable(clean(line)) for line in super().format(record).splitlines())


def _run(name: str, *words: str) -> int:
    command = import_module(f"kubeproxy.commands.{name}")
    gc.freeze()  # a garbage collection of the modules at the exit would take a fifth of a short command's CPU time
    given = parser_of(name).parse_args(words)
    return completed(lambda: command.run(given), getattr(given, "output", "text"))


def values(action: argparse.Action) -> tuple[str, ...]:
    """Return the allowed values of an argument; () if any text is allowed."""
    name = max(action.option_strings, key=len, default=action.dest).lstrip("-")
    if action.help == argparse.SUPPRESS and BY_NAME[name].kind == "bool":
        return ("true", "false")
    return tuple(action.choices or _VALUES.get(name, ()))


def summary(action: argparse.Action) -> str:
    """Return the help text of an argument. A command's --help omits some flags of the proxy; this function returns
    their help texts, too."""
    return BY_NAME[action.dest.replace("_", "-")].usage if action.help == argparse.SUPPRESS else action.help or ""


def _source_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where to ask")
    socket = BY_NAME["control-socket"].default
    group.add_argument(
        "--control-socket", metavar="PATH", default=socket, help=f"the running proxy's socket (default {socket})"
    )
    for name, metavar, text in (
        ("--manifests", "FOLDER", "without a proxy: read the objects from files in this folder"),
        ("--kubeconfig", "FILE", "without a proxy: read the objects from this API server"),
        ("--config", "FILE", "with --manifests or --kubeconfig: the proxy's configuration file"),
        ("--proxy-mode", "MODE", "with --manifests or --kubeconfig: the mode, unless the file sets the mode"),
        ("--hostname-override", "NAME", "with --manifests or --kubeconfig: the Node, instead of this host"),
    ):
        group.add_argument(name, metavar=metavar, help=text)
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="text, or JSON for programs")


def add_proxy_flag(group: argparse._ArgumentGroup, name: str, kind: str) -> None:
    """Add a flag of the proxy to a command's arguments; the command's --help omits the flag."""
    value: dict[str, Any] = {"nargs": "?", "const": "true"} if kind == "bool" else {}
    group.add_argument(f"--{name}", metavar=kind, help=argparse.SUPPRESS, **value)


def _feature_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("with --manifests or --kubeconfig")
    group.description = "The flags of the proxy that the Go kube-proxy lacks, such as --service-proxy-name."
    for name, feature in FEATURES.items():
        add_proxy_flag(group, name, feature.kind)


def _proxy() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("kube-proxy", add_help=False, description="The Kubernetes network proxy of a node")
    short = {name: f"-{letter}" for letter, name in SHORTHANDS.items()}
    for title in GROUPS:
        group = parser.add_argument_group(title)
        for flag in (one for one in FLAGS if one.group == title and not one.hidden):
            names = [short[flag.name]] if flag.name in short else []
            default = "" if flag.default in {"", "false"} else f" (default {shown_default(flag)})"
            about = flag.usage + default
            if flag.kind == "bool" or flag.name in {"help", "version"}:
                group.add_argument(*names, f"--{flag.name}", action="store_true", help=about)
            else:
                group.add_argument(*names, f"--{flag.name}", metavar=_PATHS.get(flag.name, flag.kind), help=about)
    return parser
