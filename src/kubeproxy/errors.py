"""The errors of the program, sorted by what is done about them. See docs/architecture.md, "Errors, by reaction"."""


class KubeProxyError(Exception):
    """Base of every error that is reported to the user without a traceback."""


class ConfigError(KubeProxyError):
    """Wrong flags or configuration; the message starts with the path of the field. The process exits with 1."""


class Unsupported(KubeProxyError):  # noqa: N818 - it states a fact about the node
    """This node cannot run the mode; the message says what is missing and how to get it. Exit with 1."""


class ApplyError(KubeProxyError):
    """The kernel refused a change: retried with backoff, then a full sync."""


class ChangedByOthersError(ApplyError):
    """Another program changed our rules while we did; the message says which. As any ApplyError, and an event."""


class SourceError(KubeProxyError):
    """The API server or a manifest could not be read: retried with backoff, then a new list."""


class QuestionError(KubeProxyError):
    """A question has no answer; the message says why, and what can be asked."""


class NoAnswerError(KubeProxyError):
    """The proxy could not be asked; the message says what to do."""
