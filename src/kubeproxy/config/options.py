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

from kubeproxy import features
from kubeproxy.config.addresses import with_port
from kubeproxy.config.defaults import with_defaults
from kubeproxy.config.fields import VModuleItem
from kubeproxy.config.flags import BY_NAME, FLAGS, KEPT_WITH_CONFIG, LOGGING
from kubeproxy.config.load import load_file, raise_mistakes
from kubeproxy.config.messages import Mistake
from kubeproxy.config.modes.description import ModeConfig
from kubeproxy.config.page import PageAccess, page_access
from kubeproxy.config.pflag import KINDS, CommandLine
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.config.validate import validate
from kubeproxy.config.write import with_values
from kubeproxy.errors import ConfigError


def _unchanged(config: KubeProxyConfiguration) -> KubeProxyConfiguration:
    return config


class Options(Struct, frozen=True, kw_only=True):
    """What to do.

    config is complete and valid, flags applied. config_file, master, manifests and write_config_to are "" when not
    given; control_socket is the path of the socket for commands, "" for none; page says which clients may see the
    page; features are the values of the features that flags set; idle names the flags without an effect, "" for none.
    flags are all flags with their values, for /flagz. resolve puts the flags that outrank a configuration file over
    what a newly read file says; notices are to be shown to the user.
    """

    config: KubeProxyConfiguration = field(default_factory=KubeProxyConfiguration)
    config_file: str = ""
    master: str = ""
    manifests: str = ""
    control_socket: str = ""
    page: PageAccess = PageAccess()
    features: Mapping[str, Any] = {}
    idle: str = ""
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
        raise_mistakes(validate(config))
        return config

    config = resolve(load_file(file)) if file else _from_flags(given, host)
    idle = _idle(given, config.of_mode)
    notices += [idle] if idle else []
    return Options(
        config=config,
        config_file=file,
        master=given.get("master", ""),
        manifests=given.get("manifests", ""),
        control_socket=given.get("control-socket", BY_NAME["control-socket"].default),
        page=page_access(_listed(given, "page-from"), _listed(given, "page-hosts")),
        features=features.values(given),
        idle=idle,
        cleanup=given.get("cleanup", False),
        init_only=given.get("init-only", False),
        write_config_to=given.get("write-config-to", ""),
        flags=tuple(line.shown()),
        notices=tuple(notices),
        resolve=resolve,
    )


def _listed(given: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """The values of a flag that takes several, or of its default."""
    values: tuple[str, ...] = given.get(name, KINDS["strings"].parse(BY_NAME[name].default))
    return values


def _idle(given: Mapping[str, Any], mode: ModeConfig) -> str:
    """The flags of features that the mode does not support, in a sentence; "" for none."""
    idle = [f"--{name}" for name in features.without_effect(given, mode.name)]
    verb = "have" if len(idle) > 1 else "has"
    return f"{' and '.join(idle)} {verb} no effect in mode {mode.name}" if idle else ""


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
    # As NewOptions of cmd/kube-proxy: the servers' addresses have their defaults before --bind-address is read.
    config = with_defaults(config, frozenset(values) | {"healthzBindAddress", "metricsBindAddress"})
    config = _with_mode_flags(_with_logging(config, given), given)
    if not given.get("write-config-to"):
        config = _with_ports(config, given)
    raise_mistakes([_named_by_flag(mistake, config.of_mode) for mistake in validate(config)])
    return config


def _with_mode_flags(config: KubeProxyConfiguration, given: Mapping[str, Any]) -> KubeProxyConfiguration:
    """The flags that mean other fields in other modes: sync periods, and what is masqueraded."""
    mode = config.of_mode
    values = {**mode.flag_defaults, **given}
    return with_values(
        config, {path: values[flag] for flag, paths in mode.flags.items() if flag in values for path in paths}
    )


def _with_ports(config: KubeProxyConfiguration, given: Mapping[str, Any]) -> KubeProxyConfiguration:
    """The deprecated port flags: 0 turns a server off, another port is used where a given address has none."""

    def address(name: str, default: str) -> str:
        port = given.get(f"{name}-port")
        if port is None:
            return default
        if not 0 <= port <= 65535:
            raise ConfigError(f"--{name}-port: must be from 0 to 65535, got {port}")
        return with_port(given.get(f"{name}-bind-address", default), port) if port else ""

    return replace(
        config,
        healthz_bind_address=address("healthz", config.healthz_bind_address),
        metrics_bind_address=address("metrics", config.metrics_bind_address),
    )


def _named_by_flag(mistake: Mistake, mode: ModeConfig) -> Mistake:
    """The mistake with the flag's name where the field's path was."""
    flags = {flag.path: flag.name for flag in FLAGS if flag.path}
    flags |= {path: flag for flag, paths in mode.flags.items() for path in paths}
    base = re.split(r"\[", mistake.path)[0]
    if base.startswith("featureGates."):
        return Mistake("--feature-gates", mistake.message)
    name = flags.get(base)
    message = re.sub(r"\b\w+\.syncPeriod\b", lambda path: f"--{flags[path[0]]}", mistake.message)
    return Mistake(f"--{name}", message) if name else mistake


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
