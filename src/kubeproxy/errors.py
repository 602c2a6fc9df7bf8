"""The errors of the program; a class for each reaction to an error. See docs/architecture.md, "Errors, by reaction"."""

from typing import Final


class KubeProxyError(Exception):
    """Base of every error that is reported to the user without a traceback."""


class ConfigError(KubeProxyError):
    """Invalid flags or configuration; the message starts with the path of the field. The process exits with 1."""


class Unsupported(KubeProxyError):  # noqa: N818 - the name describes the node
    """This node cannot run the mode; the message names the missing requirement and the fix. The process exits with
    1."""


class ApplyError(KubeProxyError):
    """The kernel refused a change. The change is retried with backoff, by a full sync."""


class ChangedByOthersError(ApplyError):
    """Another program changed the rules that the message names. This ApplyError is also reported as an Event."""


class SourceError(KubeProxyError):
    """The API server or a manifest could not be read. The source tries again with backoff, and lists all objects
    again."""


class QuestionError(KubeProxyError):
    """A question is invalid; the message gives the reason and the possible questions."""


class NoAnswerError(KubeProxyError):
    """The proxy could not be queried; the message consists of `fact`, `fix` and `more`. `kind` names an error to which
    the plugin for kubectl reacts: NO_PROXY, SILENT, HALTED or CANNOT_SEND. For all other errors it is ''."""

    def __init__(self, fact: str, fix: str = "", *, kind: str = "", more: str = "") -> None:
        super().__init__(fact + f": {fix}" * bool(fix) + f"; {more}" * bool(more))
        self.fact, self.fix, self.kind, self.more = fact, fix, kind, more

    def with_more(self, more: str) -> "NoAnswerError":
        """Return the error with a further part of its message."""
        return NoAnswerError(self.fact, self.fix, kind=self.kind, more=more)


NO_PROXY, SILENT, HALTED, CANNOT_SEND = "no proxy", "silent", "halted", "cannot send"
HANGS: Final = frozenset({SILENT, HALTED})
"""The kinds of errors that mean that a proxy runs, but does not answer in time."""
