"""The subcommands of kube-proxy by name, with a summary of each. A subcommand runs in its own process, which queries
the proxy over the control socket and reads the kernel."""

import errno
import os
import sys
from collections.abc import Callable
from typing import Final

from kubeproxy.errors import ConfigError, KubeProxyError, NoAnswerError

COMMANDS: Final[dict[str, str]] = {
    "why": "the outcome of a connection on this node, and the reasons",
    "trace": "the rules of all programs that packets of a flow pass on this node, and the rule that drops them",
    "flows": "the open connections of Services, by endpoint and client; with -f, their beginnings and ends",
    "conntrack": "the use of the connection tracking table: entries, growth, refusals, and the largest users",
    "services": "the Services on this node: state, addresses, endpoints",
    "changes": "the last changes of Services, with their delays, and the last problems",
    "doctor": "all problems of this node with Services, each with its fix",
    "plan": "the changes that another configuration or mode would cause",
    "verify": "the differences of the kernel, and of the API server, from the proxy's plans",
    "completion": "the completion script of bash, zsh or fish",
}
"""The summary of each command. The command's module has the same name, and the functions `arguments(parser)` and
`run(arguments) -> int`."""

ALONE: Final = frozenset({"completion"})  # commands that need neither a proxy nor objects

HIDDEN: Final[dict[str, str]] = {"companion": "answers for the page of a running proxy"}
"""Commands that only the proxy itself starts."""

_UNWRITABLE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
YES, NO, UNKNOWN = 0, 1, 2  # exit codes: no problem, a problem, unknown


def exit_code(*, wrong: object, unknown: object = False) -> int:
    """Return the exit code of an answer; NO takes precedence over UNKNOWN."""
    return NO if wrong else UNKNOWN if unknown else YES


def completed(command: Callable[[], int], form: str = "text") -> int:
    """Run a command and return its exit code; for an error, print the error and return UNKNOWN. In the form json, the
    error is also a line of JSON on standard output, after the lines that a command with --watch has printed."""
    try:
        status = _reported(command, form)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNKNOWN
    except KeyboardInterrupt:
        return UNKNOWN
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        print(f"Error: cannot write to standard output: {error.strerror}", file=sys.stderr)
        sys.stdout = None  # the interpreter would flush standard output again at exit, and print an error
        return UNKNOWN
    return status


def _reported(command: Callable[[], int], form: str) -> int:
    try:
        return command()
    except KubeProxyError as error:
        from kubeproxy.commands.output import json_line, shown, versioned  # noqa: PLC0415 - completion must start fast
        from kubeproxy.config.messages import listed  # noqa: PLC0415
        from kubeproxy.server.text import clean  # noqa: PLC0415

        # Only a ConfigError has several lines, one per mistake. In other errors, line ends are part of quoted text.
        lines = listed(str(error)).splitlines() if isinstance(error, ConfigError) else [str(error)]
        print("Error: " + "\n".join(map(shown, lines)), file=sys.stderr)
        if form == "json":
            parts = ("kind", "fact", "fix", "more") if isinstance(error, NoAnswerError) else ()
            texts = {"error": str(error)} | {part: getattr(error, part) for part in parts}
            json_line(versioned({part: clean(text) for part, text in texts.items()}))
        return UNKNOWN
