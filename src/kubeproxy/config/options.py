"""From a command line to what the program is to do: flags against the configuration file, and which of them wins.

Pure but for reading the file. The rules are the Go kube-proxy's: with --config the file replaces all flags except
those named in flags.KEPT_WITH_CONFIG; flags are applied after the defaults, so that a zero given by flag stays zero.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from kubeproxy.config.addresses import with_port
from kubeproxy.config.decode import Problem
from kubeproxy.config.defaults import with_defaults
from kubeproxy.config.durations import Duration
from kubeproxy.config.flags import BY_NAME, FLAGS, KEPT_WITH_CONFIG, LOGGING
from kubeproxy.config.load import load_file, raise_problems
from kubeproxy.config.pflag import CommandLine
from kubeproxy.config.types import KubeProxyConfiguration, VModuleItem
from kubeproxy.config.validate import validate
from kubeproxy.config.write import with_values
from kubeproxy.errors import ConfigError


def _unchanged(config: KubeProxyConfiguration) -> KubeProxyConfiguration:
    return config


class Options(Struct, frozen=True, kw_only=True):
    """What to do.

    config is complete and valid, flags applied. config_file, master, manifests and write_config_to are "" when not
    given. flags are all flags with their values, for /flagz. resolve puts the flags that outrank a configuration
    file over what a newly read file says; notices are to be shown to the user.
    """

    config: KubeProxyConfiguration = field(default_factory=KubeProxyConfiguration)
    config_file: str = ""
    master: str = ""
    manifests: str = ""
    cleanup: bool = False
    init_only: bool = False
    write_config_to: str = ""
    flags: tuple[tuple[str, str], ...] = ()
    notices: tuple[str, ...] = ()
    resolve: Callable[[KubeProxyConfiguration], KubeProxyConfiguration] = _unchanged


def build_options(line: CommandLine) -> Options:
    """The options that a command line stands for.

    ConfigError names the mistakes in the file as load_file does; without a file it holds one line for each mistake,
    starting with the flag.
    """
    given = line.given
    host = _hostname(given)
    file = given.get("config", "")
    notices = [*line.notices, *_notices(given, bool(file))]

    def resolve(config: KubeProxyConfiguration) -> KubeProxyConfiguration:
        config = _with_logging(config, given)
        config = replace(config, hostname_override=host) if host else config
        raise_problems(validate(config))
        return config

    return Options(
        config=resolve(load_file(file)) if file else _from_flags(given, host),
        config_file=file,
        master=given.get("master", ""),
        manifests=given.get("manifests", ""),
        cleanup=given.get("cleanup", False),
        init_only=given.get("init-only", False),
        write_config_to=given.get("write-config-to", ""),
        flags=tuple(line.shown()),
        notices=tuple(notices),
        resolve=resolve,
    )


def _hostname(given: Mapping[str, Any]) -> str:
    """The Node's name from the flag, trimmed and in small letters; "" when the flag is not given or empty."""
    text: str = given.get("hostname-override", "")
    name = text.strip().lower()
    if text and not name:
        raise ConfigError("--hostname-override: must not be blank")
    return name


def _with_logging(config: KubeProxyConfiguration, given: Mapping[str, Any]) -> KubeProxyConfiguration:
    """The configuration with the logging flags over it; vmodule patterns of the flag come before those of the file."""
    values = {flag.path: given[flag.name] for flag in FLAGS if flag.group == LOGGING and flag.name in given}
    if "logging.vmodule" in values:
        items = tuple(VModuleItem(file_pattern=name, verbosity=level) for name, level in values["logging.vmodule"])
        values["logging.vmodule"] = items + config.logging.vmodule
    return with_values(config, values)


def _from_flags(given: Mapping[str, Any], host: str) -> KubeProxyConfiguration:
    """The configuration of a command line without --config."""
    values = {
        BY_NAME[name].path: value
        for name, value in given.items()
        if BY_NAME[name].path and BY_NAME[name].group != LOGGING and (name, value) != ("bind-address", "")
    }
    config = with_values(KubeProxyConfiguration(hostname_override=host), values)
    config = with_defaults(config, frozenset(values))
    config = _with_sync_flags(_with_logging(config, given), given)
    if "masquerade-all" in given:
        block = "nftables" if config.active_mode == "nftables" else "iptables"
        config = with_values(config, {f"{block}.masqueradeAll": given["masquerade-all"]})
    if not given.get("write-config-to"):
        config = _with_ports(config, given)
    raise_problems([_named_by_flag(problem) for problem in validate(config)])
    return config


def _with_sync_flags(config: KubeProxyConfiguration, given: Mapping[str, Any]) -> KubeProxyConfiguration:
    """The sync periods by flag: ipvs-* count in ipvs mode, iptables-* in all others.

    In ipvs mode without a file, minSyncPeriod is the flag's default of 1 s, not the 0 that a file would have.
    """
    if config.active_mode == "ipvs":
        minimum = given.get("ipvs-min-sync-period", Duration(1))
        return with_values(
            config,
            {
                "ipvs.syncPeriod": given.get("ipvs-sync-period", config.ipvs.sync_period),
                "ipvs.minSyncPeriod": minimum,
            },
        )
    values = {}
    for block in ("iptables", "nftables") if config.active_mode == "nftables" else ("iptables",):
        for flag, name in (("iptables-sync-period", "syncPeriod"), ("iptables-min-sync-period", "minSyncPeriod")):
            if flag in given:
                values[f"{block}.{name}"] = given[flag]
    return with_values(config, values)


def _with_ports(config: KubeProxyConfiguration, given: Mapping[str, Any]) -> KubeProxyConfiguration:
    """The deprecated port flags: 0 turns a server off, another port is used where the address has none."""

    def address(name: str, default: str) -> str:
        port = given.get(f"{name}-port")
        if port is None:
            return default
        if not 0 <= port <= 65535:
            raise ConfigError(f"--{name}-port: must be from 0 to 65535, got {port}")
        text = given.get(f"{name}-bind-address", default.rpartition(":")[0])
        return with_port(text, port) if port else ""

    return replace(
        config,
        healthz_bind_address=address("healthz", config.healthz_bind_address),
        metrics_bind_address=address("metrics", config.metrics_bind_address),
    )


_FLAG_OF_PATH = {flag.path: flag.name for flag in FLAGS if flag.path} | {
    "iptables.syncPeriod": "iptables-sync-period",
    "iptables.minSyncPeriod": "iptables-min-sync-period",
    "nftables.syncPeriod": "iptables-sync-period",
    "nftables.minSyncPeriod": "iptables-min-sync-period",
    "nftables.masqueradeBit": "iptables-masquerade-bit",
    "ipvs.syncPeriod": "ipvs-sync-period",
    "ipvs.minSyncPeriod": "ipvs-min-sync-period",
}


def _named_by_flag(problem: Problem) -> Problem:
    """The problem with the flag's name where the field's path was."""
    base = re.split(r"\[", problem.path)[0]
    if base.startswith("featureGates."):
        return Problem("--feature-gates", problem.message)
    name = _FLAG_OF_PATH.get(base)
    message = re.sub(r"\b(iptables|ipvs|nftables)\.syncPeriod\b", lambda m: f"--{_FLAG_OF_PATH[m[0]]}", problem.message)
    return Problem(f"--{name}", message) if name else problem


def _notices(given: Mapping[str, Any], with_file: bool) -> list[str]:
    """What to tell a user of flags: that the file replaces them, or that a file should."""
    others = [name for name in given if name not in ("config", "write-config-to", "cleanup")]
    replaced = [f"--{name}" for name in given if name not in KEPT_WITH_CONFIG]
    if with_file and replaced:
        return [f"Ignored, because --config replaces them: {', '.join(replaced)}"]
    if others and not with_file:
        return [
            "All flags other than --config, --write-config-to and --cleanup are deprecated; use a configuration file"
        ]
    return []
