"""Zones of endpoints, for the Services that weigh by zone.

Decoding zones costs time for every endpoint of a cluster, and keeping them memory. So only slices of these Services are
decoded with zones: new ones by the watch, earlier ones by another list.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Final
from urllib.parse import quote, urlencode

from kubeproxy.api.decode import decode_page, identity
from kubeproxy.api.http import HttpClient
from kubeproxy.api.source import ListPace, ResourceStatus, Trouble, WatchTarget
from kubeproxy.api.status import MalformedAnswer, waiting_wished
from kubeproxy.engine.pacing import TokenBucket
from kubeproxy.errors import SourceError
from kubeproxy.model.balancing import weighs_zones
from kubeproxy.model.events import Deleted, Event, Replaced, Sink, Upserted, ZonedSlice
from kubeproxy.model.objects import PlacedSlice, Service
from kubeproxy.model.plan import ServiceName

log = logging.getLogger("kubeproxy.api")

TOGETHER: Final = 50
"""Services in one request, by the label of their slices: 3 kB of a URL at most."""

BURST: Final = 20
"""Requests without a delay, as at a start; then one a second, so that annotations that come and go cause few requests
of all nodes."""

PATIENCE: Final = 5.0
"""Seconds for which the first list of Services waits for zones: without them a drained zone would get connections."""


class Zones:
    """Passes events of Services and slices on to the sink, and adds the zones. `run` ends only when cancelled.

    `services`: the Services with weights by zone; decoders read the set for each slice. `target` is the list and watch
    of slices.
    """

    def __init__(self, client: HttpClient, target: WatchTarget, sink: Sink, pace: ListPace) -> None:
        self.services: set[ServiceName] = set()
        self._client = client
        self._target = target
        self._sink = sink
        self._page = pace.page
        self._spread = pace.relist
        self._bucket = TokenBucket(1.0, BURST)
        self._backoff = pace.backoff(pace.first)
        self._trouble = Trouble(lambda text: log.warning("Weights by zone do not count yet: %s", text))
        self._unread: dict[ServiceName, None] = {}
        self._begun = self._slices_begun = False
        self._held: list[Event] | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()

    def take_services(self, events: Sequence[Event]) -> None:
        """Pass on events of Services; the first list only with its zones, as programming starts with that list."""
        for event in events:
            self._note(event)
        if self._unread and not self._begun:
            self._held = []
        self._begun = True
        if self._held is not None:
            self._held += events
        else:
            self._sink(events)
        self._proceed()

    def take_slices(self, events: Sequence[Event]) -> None:
        """Pass on events of slices."""
        self._sink(events)
        self._slices_begun = True
        self._proceed()

    def _proceed(self) -> None:
        if self._held is not None and self._slices_begun and self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(PATIENCE, self._release)
        if self._unread or self._held is not None:
            self._wake.set()

    def _release(self) -> None:
        """Pass on the held events."""
        held, self._held = self._held, None
        if self._patience is not None:
            self._patience.cancel()
        if held is not None:
            self._sink(held)

    def _note(self, event: Event) -> None:
        """Update the set of Services that use zone weights. A Service that stops using them stays in the set until it
        is deleted; this saves requests."""
        if isinstance(event, Upserted):
            self._add([event.object])
        elif isinstance(event, Deleted):
            self._forget([(event.namespace, event.name)])
        elif isinstance(event, Replaced):
            if self.services and event.kept is not None:
                self._forget(self.services - event.kept - set(map(identity, event.objects)))
            self._add(event.objects)

    def _add(self, found: Iterable[object]) -> None:
        wanted = [identity(one) for one in found if isinstance(one, Service) and weighs_zones(one.metadata.annotations)]
        self._unread.update(dict.fromkeys(name for name in wanted if name not in self.services))
        self.services.update(wanted)

    def _forget(self, names: Iterable[ServiceName]) -> None:
        for name in names:
            self.services.discard(name)
            self._unread.pop(name, None)

    async def run(self, status: ResourceStatus, listed: Callable[[], bool]) -> None:
        """Read zones when a Service begins to weigh by them. Failures are logged and retried.

        `status` is that of slices; `listed` returns whether their list is complete and no new one is needed.
        """
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._unread and listed():
                    await self._try(status)
                if not self._unread:
                    self._release()
        finally:
            if self._patience is not None:
                self._patience.cancel()

    async def _try(self, status: ResourceStatus) -> None:
        """Make one attempt, with a random delay except at a start: all nodes get a new Service at the same time."""
        wait = 0.0 if self._held is not None else random.uniform(0.0, self._spread)  # noqa: S311 - spreads load only
        await asyncio.sleep(self._bucket.reserve() + wait)
        names = [*self._unread][:TOGETHER]
        for name in names:  # a Service that is deleted and created again in the meantime needs another answer
            del self._unread[name]
        wished = 0.0
        try:
            await self._read(names, status)
        except SourceError as error:
            self._trouble.met(str(error))
            wished = waiting_wished(error)
        except Exception:
            log.exception("Asking for zones again after an internal error")
        else:
            self._backoff.succeeded()
            self._trouble.over()
            return
        self._unread = dict.fromkeys(name for name in names if name in self.services) | self._unread
        await asyncio.sleep(max(self._backoff.failed(), wished))

    async def _read(self, names: Sequence[ServiceName], status: ResourceStatus) -> None:
        """List the slices of Services, not older than the known ones, and pass on their zones."""
        path, namespaces = self._target.path, {namespace for namespace, _ in names}
        if len(namespaces) == 1:
            (namespace,) = namespaces
            path = path.replace("/endpointslices", f"/namespaces/{quote(namespace, safe='')}/endpointslices")
        chosen = f"kubernetes.io/service-name in ({','.join(sorted({name for _, name in names}))})"
        selector = {"limit": str(self._page), "labelSelector": f"{chosen},{self._target.labels}"}
        since = {"resourceVersion": status.resource_version, "resourceVersionMatch": "NotOlderThan"}
        query, token = selector | (since if status.resource_version else {}), ""
        while True:
            where = f"{path}?{urlencode(query, quote_via=quote, safe='')}"
            response = await self._client.request("GET", where, most=self._target.most)
            page = decode_page(self._target.resource, response.body, self.services)
            found = {identity(one): ZonedSlice(one) for one in page.objects if isinstance(one, PlacedSlice)}
            self._sink([*found.values(), *[one for one in page.rejected if (one.namespace, one.name) in found]])
            if not page.continue_token:
                return
            if page.continue_token == token:
                raise MalformedAnswer(f"the list of {self._target.resource} continues with the same token")
            token = page.continue_token
            query = selector | {"continue": token}
