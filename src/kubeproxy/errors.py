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
    """The proxy could not be queried; the message gives the fix."""


# The plugin for kubectl gets an error of a node's command as text, and recognises these parts of the text.
NO_PROXY: Final = "no kube-proxy answers at "
THE_PROXY, SILENT = "the proxy at ", " did not answer within "
SEE_LOG: Final = "see the proxy's log and /livez"
CANNOT_SEND: Final = "cannot send from the network namespace of "
