"""The subcommands of kube-proxy, by name, each with a summary.

They run in a separate process, query the proxy over its control socket, and read the kernel themselves.
"""

from typing import Final

COMMANDS: Final[dict[str, str]] = {
    "why": "the outcome of a connection on this node, and the reasons",
    "trace": "the rules of all programs that packets of a flow pass on this node, and the rule that drops them",
    "flows": "present connections of Services, by endpoint and client, or as they begin and end",
    "conntrack": "how full connection tracking is, its growth, its refusals, and its largest users",
    "services": "the Services on this node: state, addresses, endpoints",
    "doctor": "all problems of this node with Services, each with its fix",
    "plan": "the changes that another configuration or mode would cause",
    "verify": "the differences of the kernel, and of the API server, from the proxy's plans",
    "completion": "the completion script of bash, zsh or fish",
}
"""Each command is the module with its name in this package, with `arguments(parser)` and `run(arguments) -> int`."""

ALONE: Final = frozenset({"completion"})
"""Commands that need neither a proxy nor objects."""

HIDDEN: Final[dict[str, str]] = {"companion": "answers for the page of a running proxy"}
"""Commands that only the proxy itself starts."""

YES, NO, UNKNOWN = 0, 1, 2
"""Exit codes: no problem, a problem, and unknown."""


def exit_code(*, wrong: object, unknown: object = False) -> int:
    """Return the exit code of an answer: NO takes precedence over UNKNOWN."""
    return NO if wrong else UNKNOWN if unknown else YES
