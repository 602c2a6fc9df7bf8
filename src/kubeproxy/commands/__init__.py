"""The subcommands of kube-proxy, by name, each with a summary.

They run in a process of their own: they ask the proxy over its control socket and read the kernel themselves.
"""

from typing import Final

COMMANDS: Final[dict[str, str]] = {
    "why": "what becomes of a connection on this node, and why",
    "trace": "which rules packets of a flow meet on this node, of all programs, and which one drops them",
    "flows": "connections of Services now, by endpoint and client, or as they begin and end",
    "conntrack": "how full connection tracking is, its growth, its refusals, and its largest users",
    "services": "the Services as this node has them: state, addresses, endpoints",
    "doctor": "all that is wrong with this node for Services, each with its fix",
    "plan": "what another configuration or mode would change, before it does",
    "verify": "in what the kernel, and the API server, differ from what the proxy planned",
    "completion": "what makes bash, zsh or fish complete this command line",
}
"""Each is the module of its name in this package, with `arguments(parser)` and `run(arguments) -> int`."""

ALONE: Final = frozenset({"completion"})
"""Commands that need neither a proxy nor objects."""

HIDDEN: Final[dict[str, str]] = {"companion": "answers for the page of a running proxy; not for people"}
"""Commands that only the proxy itself starts."""

YES, NO, UNKNOWN = 0, 1, 2
"""Exit codes: all is well, something is not, and unknown."""


def exit_code(*, wrong: object, unknown: object = False) -> int:
    """Return the exit code of an answer: NO takes precedence over UNKNOWN."""
    return NO if wrong else UNKNOWN if unknown else YES
