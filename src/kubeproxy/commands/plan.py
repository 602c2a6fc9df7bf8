"""kube-proxy plan: the changes that another configuration or mode would cause.

The new configuration is a file (--config), or the running proxy's configuration changed by flags, as in `kube-proxy
plan --proxy-mode ipvs --feature-gates KubeProxyIPVS=true`. The command applies it to the objects of the running proxy;
without a proxy, to the objects of --manifests or --kubeconfig, with --now as the configuration to compare with.

With --from-kernel, the rules that any kube-proxy has written are compared with the rules of this program for all
packets: the result is a proof of equality, or packets with different outcomes. With --shadow, the command repeats this
comparison while the other kube-proxy runs, until the time is over or Ctrl-C: it prints differences that last longer
than --grace, and a summary. With --shadow, exit code 0 means that only intended differences lasted.

Exit code 0: no effect on clients; 1: an effect; 2: unknown, for example if the new configuration is invalid (then all
its mistakes are printed). The command changes nothing."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence

from msgspec.structs import replace

from kubeproxy.ask.checks import checkup, whereabouts
from kubeproxy.ask.from_kernel import Switch, switches
from kubeproxy.ask.outlook import Outlook, outlook
from kubeproxy.ask.source import Running, Source, knowing, source
from kubeproxy.commands import exit_code, output
from kubeproxy.commands.parsers import add_proxy_flag
from kubeproxy.config.durations import Duration
from kubeproxy.config.flags import FLAGS, KEPT_WITH_CONFIG
from kubeproxy.config.load import raise_mistakes
from kubeproxy.config.options import build_options
from kubeproxy.config.pflag import parse
from kubeproxy.config.types import KubeProxyConfiguration, made_strict, with_values
from kubeproxy.config.validate import validate
from kubeproxy.errors import ConfigError
from kubeproxy.kernel.proc import processes
from kubeproxy.setup import modes
from kubeproxy.wording import counted

_OF_ALL = frozenset({"config", "kubeconfig", "hostname-override", "proxy-mode"})
"""Flags of the proxy that every command has."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--now", metavar="FILE", help="without a running proxy: the configuration to compare with")
    parser.add_argument(
        "--from-kernel",
        action="store_true",
        help="compare the kernel's rules with the rules of this program, for all packets (as root)",
    )
    parser.add_argument(
        "--shadow", type=_time, metavar="TIME", help="with --from-kernel: repeat the comparison for a time, such as 8h"
    )
    parser.add_argument(
        "--grace",
        type=_time,
        metavar="TIME",
        default=_time("30s"),
        help="with --shadow: the time that both proxies need to write a change (default 30s)",
    )
    group = parser.add_argument_group(
        "the new configuration, in addition to --config, --proxy-mode and --hostname-override"
    )
    for flag in FLAGS:
        if _sets_a_field(flag.name, flag.path) and not flag.hidden:
            add_proxy_flag(group, flag.name, flag.kind)
    group.description = "Any other flag of kube-proxy that sets a field, with its value, such as --cluster-cidr."


def _time(text: str) -> Duration:
    value = Duration.parse(text)
    if value <= 0:
        raise ValueError(text)
    return value


def run(given: argparse.Namespace) -> int:
    if given.shadow is not None and not given.from_kernel:
        raise ConfigError("--shadow: repeats the comparison of --from-kernel; add --from-kernel")
    asked = source(given if given.from_kernel else _without_news(given))
    facts = knowing(asked)
    now = facts.configuration()
    new = _new(given, now, strict=now.strict and _has_strict_flag(asked))
    if given.shadow is not None:
        from kubeproxy.commands.shadow import shadow  # noqa: PLC0415 - a single comparison does not need a source

        return shadow(facts, new, given.shadow, given.grace, given.output)
    if given.from_kernel:
        whereabouts.must_be_here(checkup.checked(asked, facts), "kubectl kubeproxy verify")
        gc.disable()  # this short process creates millions of values without cycles
        found = switches(asked, facts, new)
        output.answer(given.output, {"families": found}, lambda: _print_switches(found))
        return exit_code(wrong=any(each.differences for each in found), unknown=any(each.unknown for each in found))
    view = outlook(asked, facts, now, new)
    output.answer(given.output, view, lambda: _print(view))
    return exit_code(wrong=view.shifts or view.remarks or view.lacks, unknown=view.unknown or view.elsewhere)


def _sets_a_field(name: str, path: str) -> bool:
    return bool(path or any(name in mode.config.flags for mode in modes.every())) and name not in _OF_ALL


def _without_news(given: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments for reading objects, without the arguments of the new configuration. If --now is not given,
    --hostname-override is kept, because it names the node in question."""
    name = None if given.now else given.hostname_override
    return argparse.Namespace(**{**vars(given), "config": given.now, "proxy_mode": None, "hostname_override": name})


def _has_strict_flag(asked: Source) -> bool:
    """Return whether the running strict proxy has the flag --strict, which also applies with a new configuration file.
    If /proc does not show the proxy's arguments, the result is True."""
    if not isinstance(asked, Running):
        return False
    pid = asked.client.pid()
    seen = next((process.arguments for process in processes.proxies() if process.pid == pid), ("--strict",))
    return any(word.startswith("-") and word.lstrip("-").partition("=")[0] == "strict" for word in seen)


def _new(given: argparse.Namespace, now: KubeProxyConfiguration, *, strict: bool) -> KubeProxyConfiguration:
    """Return the new configuration; `strict` means that the running proxy has the flag --strict. Raises ConfigError
    with all mistakes."""
    names = [flag.name for flag in FLAGS if _sets_a_field(flag.name, flag.path)]
    words = {name: value for name in names if (value := getattr(given, name.replace("-", "_"), None)) is not None}
    words |= {"proxy-mode": given.proxy_mode} if given.proxy_mode else {}
    if given.config:
        if replaced := words.keys() - KEPT_WITH_CONFIG:
            raise ConfigError(f"--{min(replaced)}: --config replaces it, as for the proxy; write it into the file")
        words = {"strict": "true"} | words if strict else words
        line = [f"--config={given.config}", *(f"--{name}={value}" for name, value in words.items())]
        config = build_options(parse(line)).config
        # The running proxy's own flag overrides the file.
        name = given.hostname_override or now.hostname_override
        return replace(config, hostname_override=config.hostname_override or name)
    values = parse([f"--{name}={value}" for name, value in words.items()]).given
    paths = {flag.name: flag.path for flag in FLAGS}
    config = with_values(now, {paths[name]: value for name, value in values.items() if paths[name]})
    by_mode = config.of_mode.flags
    config = with_values(config, {path: values[flag] for flag in by_mode if flag in values for path in by_mode[flag]})
    if given.hostname_override:
        config = replace(config, hostname_override=given.hostname_override.strip().lower())
    config = made_strict(config) if config.strict else config
    raise_mistakes(validate(config))
    return config


def _print_switches(found: Sequence[Switch]) -> None:
    for each in found:
        for text in each.unknown:
            output.marked(
                "?", f"{each.family}: not supported, so packets that reach this rule were not compared: {text}"
            )
        for one in each.differences:
            output.marked(
                output.BAD,
                f"{each.family}: {one.packet}, and {counted(one.classes - 1, 'more class')} of packets alike",
            )
            output.say(f"       now: {'; '.join(one.now)}")
            output.say(f"      then: {'; '.join(one.then)}")
        if not each.differences and not each.unknown:
            output.say(
                f"{each.family}: proved for all packets: {counted(each.classes, 'class')}, each with the same outcome."
            )


def _print(found: Outlook) -> None:
    if found.elsewhere:
        output.marked(output.UNSEEN, found.elsewhere)
    _section("Fields that differ", output.NOTE, found.fields)
    clients = [*(shift.text for shift in found.shifts), *found.remarks]
    _section("What clients notice", output.BAD, clients)
    _section("On this node", output.NOTE, found.node)
    if found.fields:
        output.say(f"The proxy restarts: {found.connections}.")
    if found.lacks:
        output.say(f"This node cannot run it yet: {found.lacks}")
    for text in found.unknown:
        output.marked("?", text)
    if not found.fields:
        output.say("Nothing differs.")
    elif not clients:
        output.say("Clients notice nothing.")


def _section(title: str, mark: str, lines: Sequence[str]) -> None:
    if lines:
        output.say(f"{title}:")
        for line in lines:
            output.marked(mark, line)
