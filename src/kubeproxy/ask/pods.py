"""Looks up the names of pods with the credentials of the proxy: an answer is better with them, and does without."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from kubeproxy.api.places import pod_names
from kubeproxy.ask import api
from kubeproxy.ask.facts import Facts
from kubeproxy.errors import KubeProxyError
from kubeproxy.model.plan import ServiceName

PATIENCE = 5.0
"""Seconds to wait for the API server."""


def names(facts: Facts, service: ServiceName | None) -> tuple[Mapping[bytes, str], str]:
    """Return names of pods by packed address, of a Service's or of all, and why there are none, '' if there are."""
    if facts.manifests:
        return {}, "the objects come from files"
    try:
        return api.ask(facts, partial(pod_names, service=service), PATIENCE), ""
    except (KubeProxyError, OSError) as error:
        return {}, str(error)
