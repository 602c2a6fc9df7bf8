"""Sends requests to the API server of the running proxy's kubeconfig, for the checks of the connection."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from kubeproxy.api.cluster import Cluster, token_validity
from kubeproxy.api.kubeconfig import load_cluster
from kubeproxy.api.lists import greet
from kubeproxy.api.source import Reach
from kubeproxy.ask.checks import contact
from kubeproxy.ask.checks.node import CheckedNode
from kubeproxy.ask.finding import Diagnosis
from kubeproxy.errors import KubeProxyError, SourceError

GREETING_PATIENCE = 10.0  # seconds to wait for each step of the API server's answer
SHORT_PATIENCE = 3.0  # seconds to wait for the API server in a command that does not need its answer


def outdated(node: CheckedNode, reach: Reach) -> Iterator[Diagnosis]:
    """Check whether the objects may be outdated. If all watches are silent, send a request to the server, because the
    watches of an idle cluster are silent, too."""
    assert node.facts is not None  # noqa: S101 - callers have a proxy
    if node.running and not reach.trouble and reach.silent > contact.SILENT:
        try:
            cluster = _cluster(node)
            if cluster.proxy is None and not cluster.credentials.program:
                greet(cluster, SHORT_PATIENCE)
        except SourceError as error:
            reach = reach.unanswered(str(error))
        except (KubeProxyError, OSError):
            pass  # the proxy's kubeconfig is in another file system
    yield from contact.outdated(reach, node.facts.began)


def greeted(node: CheckedNode, reach: Reach) -> Iterator[Diagnosis]:
    """Check whether and when the API server answers, the expiry of its certificate and of tokens, and its clock. Raises
    KubeProxyError and OSError."""
    cluster = _cluster(node)
    for token in cluster.credentials.files:
        validity = token_validity(Path(token).read_text(encoding="utf-8"))
        if validity is not None:
            yield from contact.expiring({"token": validity}, time.time())
    if reach.trouble or cluster.proxy is not None or cluster.credentials.program:
        return  # already reported, or the connection to the server needs an HTTP proxy or a plugin
    try:
        greeting = greet(cluster, GREETING_PATIENCE)
    except SourceError as error:
        yield from contact.reached(reach.unanswered(str(error)))
        return
    yield from contact.answered(greeting.seconds)
    if greeting.certificate is not None:
        yield from contact.expiring({"server": greeting.certificate}, time.time())
    if greeting.ahead is not None:
        yield from contact.agreeing(greeting.ahead)


def _cluster(node: CheckedNode) -> Cluster:
    path, facts = node.config.client_connection.kubeconfig, node.facts
    return load_cluster(str(node.path(path)) if path else "", facts.master if facts is not None else "")
