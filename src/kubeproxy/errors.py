"""The errors of the program, ordered by reaction. See docs/architecture.md, "Errors, by reaction"."""


class KubeProxyError(Exception):
    """Base of every error that is reported to the user without a traceback."""


class ConfigError(KubeProxyError):
    """Wrong flags or configuration; the message starts with the path of the field. The process exits with 1."""


class Unsupported(KubeProxyError):  # noqa: N818 - it describes a property of the node
    """This node cannot run the mode; the message has the missing requirement and the remedy. Exit with 1."""


class ApplyError(KubeProxyError):
    """The kernel refused a change. The change is retried with backoff, by a full sync."""


class ChangedByOthersError(ApplyError):
    """Another program changed the rules that the message names: an ApplyError that is also reported as an event."""


class SourceError(KubeProxyError):
    """The API server or a manifest could not be read: tried again with backoff, and then listed anew."""


class QuestionError(KubeProxyError):
    """A question cannot be answered; the message has the reason, and possible questions."""


class NoAnswerError(KubeProxyError):
    """The proxy could not be queried; the message has the remedy."""
