"""Zones of endpoints, for the Services that weigh by zone: which those are, and where their endpoints are.

Decoding zones costs every endpoint of a cluster, and keeping them more. So slices are decoded with them for these
Services alone, by the watch from then on; those that the watch brought before are asked for once more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final
from urllib.parse import quote, urlencode

from kubeproxy.api.client import ApiClient
from kubeproxy.api.decode import decode_page, identity
from kubeproxy.api.source import Pace, ResourceStatus
from kubeproxy.api.status import MalformedAnswer
from kubeproxy.api.targets import Target
from kubeproxy.api.trouble import Trouble
from kubeproxy.errors import SourceError
from kubeproxy.model.balancing import weighs_zones
from kubeproxy.model.events import Deleted, Event, Placed, Replaced, Sink, Upserted
from kubeproxy.model.objects import PlacedSlice, Service
from kubeproxy.model.plan import ServiceName

log = logging.getLogger("kubeproxy.api")

APART: Final = 20
"""Services that are asked for one by one; of more all slices are read through, page by page."""

PATIENCE: Final = 5.0
"""Seconds that the first list of Services waits for zones: without them a drained zone would get connections."""


class Zones:
    """Stands between the reflectors of Services and slices and the sink. `run` ends only when cancelled.

    `services` are those that weigh by zone: decoders are to look at it for each slice. `target` is that of slices.
    """

    def __init__(self, client: ApiClient, target: Target, sink: Sink, pace: Pace) -> None:
        self.services: set[ServiceName] = set()
        self._client = client
        self._target = target
        self._sink = sink
        self._page = pace.page
        self._backoff = pace.backoff(pace.first)
        self._trouble = Trouble(lambda text: log.warning("Weights by zone do not count yet: %s", text))
        self._unread: dict[ServiceName, None] = {}
        self._begun = self._slices_begun = False
        self._held: list[Event] | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()

    # -- sinks ------------------------------------------------------------------------------------------------------

    def take_services(self, events: Sequence[Event]) -> None:
        """Pass events of Services on; the first ones once zones are known, as whatever is programmed waits for them."""
        for event in events:
            self._note(event)
        if self._unread and not self._begun:
            self._held = []
        self._begun = True
        if self._held is not None:
            self._held += events
        else:
            self._sink(events)
        self._go_on()

    def take_slices(self, events: Sequence[Event]) -> None:
        """Pass events of slices on."""
        self._sink(events)
        self._slices_begun = True
        self._go_on()

    def _go_on(self) -> None:
        if self._held is not None and self._slices_begun and self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(PATIENCE, self._let_go)
        if self._unread or self._held is not None:
            self._wake.set()

    def _let_go(self) -> None:
        """Pass on what waited."""
        held, self._held = self._held, None
        if self._patience is not None:
            self._patience.cancel()
        if held is not None:
            self._sink(held)

    def _note(self, event: Event) -> None:
        if isinstance(event, Upserted):
            self._wish([event.object], (identity(event.object),))
        elif isinstance(event, Deleted):
            self._wish((), ((event.namespace, event.name),))
        elif isinstance(event, Replaced):
            self._wish(event.objects, self.services - event.kept)

    def _wish(self, found: Iterable[object], instead_of: Iterable[ServiceName]) -> None:
        """Take note of who weighs by zone among Services, and of those who do not any more."""
        wanted = {identity(one) for one in found if isinstance(one, Service) and weighs_zones(one.metadata.annotations)}
        for name in set(instead_of) - wanted:
            self.services.discard(name)
            self._unread.pop(name, None)
        self._unread.update(dict.fromkeys(wanted - self.services))
        self.services |= wanted

    # -- reading ----------------------------------------------------------------------------------------------------

    async def run(self, status: ResourceStatus, listed: Callable[[], bool]) -> None:
        """Get zones whenever a Service begins to weigh by them. Failures are logged and retried.

        `listed` returns whether the slices were listed and are not being listed anew, `status` is theirs.
        """
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._unread and listed():
                    await self._try(status)
                if not self._unread:
                    self._let_go()
        finally:
            if self._patience is not None:
                self._patience.cancel()

    async def _try(self, status: ResourceStatus) -> None:
        try:
            await self._read(list(self._unread), status)
        except SourceError as error:
            self._trouble.met(str(error))
        except Exception:
            log.exception("Asking for zones again after an internal error")
        else:
            self._backoff.succeeded()
            self._trouble.over()
            return
        await asyncio.sleep(self._backoff.failed())

    async def _read(self, names: Sequence[ServiceName], status: ResourceStatus) -> None:
        """Ask for the slices of Services, not older than those that are known, and pass their zones on."""
        if len(names) > APART:
            await self._read_pages(self._target.path, "", status, names)
            return
        for namespace, name in names:
            path = self._target.path.replace(
                "/endpointslices", f"/namespaces/{quote(namespace, safe='')}/endpointslices"
            )
            await self._read_pages(path, f"kubernetes.io/service-name={name}", status, [(namespace, name)])

    async def _read_pages(self, path: str, label: str, status: ResourceStatus, names: Sequence[ServiceName]) -> None:
        query = {"limit": str(self._page), "labelSelector": ",".join(filter(None, (label, self._target.labels)))}
        if status.resource_version:
            query |= {"resourceVersion": status.resource_version, "resourceVersionMatch": "NotOlderThan"}
        token = ""
        while True:
            response = await self._client.http.request("GET", f"{path}?{urlencode(query, quote_via=quote, safe='')}")
            page = decode_page(self._target.resource, response.body, self.services)
            found = {identity(one): Placed(one) for one in page.objects if isinstance(one, PlacedSlice)}
            self._sink([*found.values(), *[one for one in page.rejected if (one.namespace, one.name) in found]])
            if page.continue_token == token or not page.continue_token:
                break
            token = page.continue_token
            query = {"limit": query["limit"], "labelSelector": query["labelSelector"], "continue": token}
        if page.continue_token:
            raise MalformedAnswer(f"the list of {self._target.resource} continues with the same token")
        for name in names:
            self._unread.pop(name, None)
