"""The command kube-proxy: reads the command line, prints help and version, and turns errors into exit codes.

Exit codes: 0 for help, version and a clean end, 1 for every error. kubeproxy.config defines the flags;
kubeproxy.program is loaded only to run the proxy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kubeproxy.commands import COMMANDS, HIDDEN
from kubeproxy.config.durations import quote
from kubeproxy.config.flags import FLAGS, GROUPS, KEPT_WITH_CONFIG, Flag
from kubeproxy.config.messages import listed
from kubeproxy.config.pflag import CommandLine, parse, shown_default
from kubeproxy.errors import ConfigError, KubeProxyError
from kubeproxy.release import build

KUBERNETES_VERSION = "v1.36"
_ABOUT = """\
kube-proxy runs on each node of a Kubernetes cluster. It watches Services and EndpointSlices and programs the node's
kernel so that traffic to a Service's addresses reaches its endpoints (TCP, UDP and SCTP, IPv4 and IPv6).

Usage:
  kube-proxy [flags]
"""
_WIDTH = 118


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with the arguments (by default the process's own); return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words and (words[0] in COMMANDS or words[0] in HIDDEN):
        from kubeproxy.commands.parsers import run  # noqa: PLC0415 - not for the daemon

        return run(words)
    try:
        return _run(parse(words))
    except KubeProxyError as error:
        print(f"Error: {listed(str(error))}", file=sys.stderr)
        return 1


def _run(line: CommandLine) -> int:
    if line.given.get("help"):
        _say(help_text())
        return 0
    if any(line.words):
        words = " ".join(quote(word) for word in line.words)
        raise ConfigError(f'"kube-proxy" does not take any arguments, got [{words}]')
    version = line.given.get("version", "false")
    if version != "false":
        _say(version_text(version) + "\n")
        return 0
    from kubeproxy.config.options import build_options  # noqa: PLC0415 - not for --version
    from kubeproxy.config.types import write_file  # noqa: PLC0415

    for notice in line.notices:
        print(notice, file=sys.stderr)
    options = build_options(line)
    for notice in options.notices:
        if notice not in line.notices:
            print(f"Warning: {notice}", file=sys.stderr)
    if options.write_config_to:
        write_file(options.config, options.write_config_to)
        print(f"Wrote the configuration to {options.write_config_to}", file=sys.stderr)
        return 0
    from kubeproxy.program.app import run  # noqa: PLC0415 - not for help, version and errors

    return run(options)


def _say(text: str) -> None:
    """Write to standard output. Raises KubeProxyError when that fails."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        sys.stdout = None  # otherwise the interpreter would flush standard output again at exit, and print an error
        if isinstance(error, BrokenPipeError):  # the reader has closed the pipe, such as `head`
            sys.exit(1)
        raise KubeProxyError(f"cannot write to standard output: {error.strerror}") from None


def version_text(wanted: str) -> str:
    """Return the text of --version, in the form of other Kubernetes components; "raw" selects the long form."""
    built = build()
    if wanted != "raw":
        return f"Kubernetes {KUBERNETES_VERSION}.0+python.{built.name.replace('+', '.')}"
    import platform  # noqa: PLC0415

    return "\n".join(
        (
            f"version: {built.name}",
            f"commit: {built.commit or 'unknown'}",
            f"tree: {built.tree or 'unknown'}",
            f"kubernetes: {KUBERNETES_VERSION}",
            f"python: {platform.python_version()}",
            f"platform: linux/{platform.machine()}",
        )
    )


def help_text() -> str:
    """Return the text of --help: all flags, by group."""
    parts = [_ABOUT, "  kube-proxy COMMAND [--help]\n\nCommands, on a node where the proxy runs:\n"]
    parts += [f"  {name:<12}{text}\n" for name, text in COMMANDS.items()]
    for group in GROUPS:
        flags = [flag for flag in FLAGS if flag.group == group and not flag.hidden]
        parts.append(f"\n{group}:\n" + "".join(map(_flag_help, flags)))
    kept = ", ".join(f"--{flag.name}" for flag in FLAGS if flag.name in KEPT_WITH_CONFIG and not flag.hidden)
    parts.append("\n" + _wrapped(f"With --config, the file replaces all flags except {kept}.", 0))
    parts.append(_wrapped("Names may be written with underscores instead of hyphens.", 0))
    return "".join(parts)


def _flag_help(flag: Flag) -> str:
    names = {"v": "-v, --v", "help": "-h, --help"}.get(flag.name, f"    --{flag.name}")
    kind = "" if flag.kind == "bool" else f" {flag.kind}"
    default = "" if flag.default in ("", "false") else f" (default {shown_default(flag)})"
    text = f"  {names}{kind}\n" + _wrapped(flag.usage + default, 12)
    if flag.name == "feature-gates":
        from kubeproxy.config.gates import proxy_gates  # noqa: PLC0415 - only for this text

        text += "".join(f"{'':14}{name}=true|false ({stage})\n" for name, stage in proxy_gates())
    return text


def _wrapped(text: str, indent: int) -> str:
    import textwrap  # noqa: PLC0415 - only for help

    margin = " " * indent
    return textwrap.fill(text, _WIDTH, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False) + "\n"


if __name__ == "__main__":
    sys.exit(main())
