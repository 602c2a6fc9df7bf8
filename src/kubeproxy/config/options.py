"""Converts a command line to Options: merges the flags with the configuration file, by the Go kube-proxy's rules. With
--config, the file replaces all flags except those in flags.KEPT_WITH_CONFIG. Flags are applied after the defaults, so
that a flag's value 0 remains 0."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from kubeproxy import features
from kubeproxy.config.durations import quote
from kubeproxy.config.fields import VModuleItem
from kubeproxy.config.flags import BY_NAME, FLAGS, KEPT_WITH_CONFIG, LOGGING
from kubeproxy.config.load import load_file, raise_mistakes
from kubeproxy.config.messages import Mistake, not_strict
from kubeproxy.config.modes import ModeConfig
from kubeproxy.config.pflag import KINDS, CommandLine
from kubeproxy.config.types import KubeProxyConfiguration, made_strict, with_defaults, with_port, with_values
from kubeproxy.config.validate import validate
from kubeproxy.errors import ConfigError
from kubeproxy.model.addresses import Range, pack, parse_cidr, unpack, without_brackets

_LABEL: Final = r"[A-Za-z0-9_]([-A-Za-z0-9_]{0,61}[A-Za-z0-9_])?"
_NAME: Final = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")


class PageAccess(NamedTuple):
    """The networks of the clients that may open the page, and the hosts (names and addresses) under which a browser may
    request it. If `networks` is empty, the page does not exist."""

    networks: tuple[Range, ...] = ()
    hosts: frozenset[str] = frozenset()


class Options(Struct, frozen=True, kw_only=True):
    """The settings of one run of the program. "" stands for a text that is not given."""

    config: KubeProxyConfiguration = field(default_factory=KubeProxyConfiguration)
    config_file: str = ""
    master: str = ""
    manifests: str = ""
    control_socket: str = ""  # the socket for commands
    page: PageAccess = PageAccess()  # the clients that may see the page
    features: Mapping[str, Any] = {}  # the values of features that were set by flags
    idle: str = ""  # a sentence about flags without effect
    cleanup: bool = False
    init_only: bool = False
    write_config_to: str = ""
    flags: tuple[tuple[str, str], ...] = ()  # all flags with their values, for /flagz
    notices: tuple[str, ...] = ()  # messages for the user
    resolve: Callable[[KubeProxyConfiguration], KubeProxyConfiguration] = lambda config: config


def build_options(line: CommandLine) -> Options:
    """Return the options of a command line. Raises ConfigError: mistakes in the file have the text of
    load_file; each mistake in a flag has one line, which starts with the flag."""
    given = line.given
    host = _hostname(given)
    file = given.get("config", "")
    notices = [*line.notices, *_notices(given, bool(file))]

    def resolve(config: KubeProxyConfiguration) -> KubeProxyConfiguration:
        config = _with_logging(config, given)
        config = replace(config, hostname_override=host) if host else config
        config = made_strict(config) if given.get("strict") else config
        raise_mistakes([*validate(config), *_beyond_upstream(config, given)])
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


def page_access(networks: Sequence[str], hosts: Sequence[str]) -> PageAccess:
    """Parse --page-from and --page-hosts. Raises ConfigError with one line per mistake."""
    mistakes: list[str] = []
    found = [network for text in networks if (network := _page_network(text.strip(), mistakes)) is not None]
    names = [name for text in hosts if (name := _page_host(text.strip(), mistakes))]
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return PageAccess(tuple(found), frozenset(names))


def _page_network(text: str, mistakes: list[str]) -> Range | None:
    network = parse_cidr(text)
    if network is None:
        address = pack(text)
        hint = f"; for this address alone write {unpack(address)}/{8 * len(address)}" if address is not None else ""
        mistakes.append(f"--page-from: {quote(text)} is no CIDR such as 10.0.0.0/8{hint}")
    return network


def _page_host(text: str, mistakes: list[str]) -> str:
    bare = without_brackets(text)
    address = pack(bare)
    if address is not None:
        return unpack(address)
    if not _NAME.fullmatch(bare) or len(bare) > 253:
        mistakes.append(
            f"--page-hosts: {quote(text)} is no name or IP address; give one without scheme and port, as node-a.example"
        )
        return ""
    return bare.rstrip(".").lower()


def _listed(given: Mapping[str, Any], name: str) -> tuple[str, ...]:
    values: tuple[str, ...] = given.get(name, KINDS["strings"].parse(BY_NAME[name].default))
    return values


def _idle(given: Mapping[str, Any], mode: ModeConfig) -> str:
    idle = [f"--{name}" for name, one in features.FEATURES.items() if given.get(name) and not one.supported(mode.name)]
    verb = "have" if len(idle) > 1 else "has"
    return f"{' and '.join(idle)} {verb} no effect in mode {mode.name}" if idle else ""


def _hostname(given: Mapping[str, Any]) -> str:
    """Return the Node's name from the flag, trimmed and in lower case; "" if the flag is empty or not given."""
    text: str = given.get("hostname-override", "")
    name = text.strip().lower()
    if text and not name:
        raise ConfigError("--hostname-override: must not be blank")
    return name


def _with_logging(config: KubeProxyConfiguration, given: Mapping[str, Any]) -> KubeProxyConfiguration:
    values = {flag.path: given[flag.name] for flag in FLAGS if flag.group == LOGGING and flag.name in given}
    if "logging.vmodule" in values:
        items = tuple(VModuleItem(file_pattern=name, verbosity=level) for name, level in values["logging.vmodule"])
        values["logging.vmodule"] = items + config.logging.vmodule
    return with_values(config, values)


def _from_flags(given: Mapping[str, Any], host: str) -> KubeProxyConfiguration:
    values = {
        BY_NAME[name].path: value
        for name, value in given.items()
        if BY_NAME[name].path and BY_NAME[name].group != LOGGING and (name, value) != ("bind-address", "")
    }
    config = with_values(KubeProxyConfiguration(hostname_override=host), values)
    # As in NewOptions of cmd/kube-proxy, the servers' addresses get their defaults before --bind-address is read.
    config = with_defaults(config, frozenset(values) | {"healthzBindAddress", "metricsBindAddress"})
    config = _with_mode_flags(_with_logging(config, given), given)
    if not given.get("write-config-to"):
        config = _with_ports(config, given)
    mistakes = [_named_by_flag(mistake, config.of_mode) for mistake in validate(config)]
    raise_mistakes([*mistakes, *_beyond_upstream(config, given)])
    return config


def _beyond_upstream(config: KubeProxyConfiguration, given: Mapping[str, Any]) -> Iterator[Mistake]:
    for name in features.FEATURES if config.strict else ():
        if given.get(name):
            yield Mistake(f"--{name}", not_strict("this feature"))


def _with_mode_flags(config: KubeProxyConfiguration, given: Mapping[str, Any]) -> KubeProxyConfiguration:
    mode = config.of_mode
    values = {**mode.flag_defaults, **given}
    return with_values(
        config, {path: values[flag] for flag, paths in mode.flags.items() if flag in values for path in paths}
    )


def _with_ports(config: KubeProxyConfiguration, given: Mapping[str, Any]) -> KubeProxyConfiguration:
    """Apply the port flags: 0 disables a server; every other value is added as the port to the server's address, if the
    address has no port."""

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
    flags = {flag.path: flag.name for flag in FLAGS if flag.path}
    flags |= {path: flag for flag, paths in mode.flags.items() for path in paths}
    base = re.split(r"\[", mistake.path)[0]
    if base.startswith("featureGates."):
        return Mistake("--feature-gates", mistake.message)
    name = flags.get(base)
    message = re.sub(r"\b\w+\.syncPeriod\b", lambda path: f"--{flags[path[0]]}", mistake.message)
    return Mistake(f"--{name}", message) if name else mistake


def _notices(given: Mapping[str, Any], with_file: bool) -> list[str]:
    """Return notices: the file replaces some flags, or a file is recommended instead of flags."""
    others = [name for name in given if name not in ("config", "write-config-to", "cleanup")]
    replaced = [f"--{name}" for name in given if name not in KEPT_WITH_CONFIG]
    if with_file and replaced:
        return [f"Ignored, because --config replaces them: {', '.join(replaced)}"]
    if others and not with_file:
        return [
            "All flags other than --config, --write-config-to and --cleanup are deprecated; use a configuration file"
        ]
    return []
