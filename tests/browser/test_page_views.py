"""The page in a browser, with a fake proxy that a test controls: views, keys, and scripts that it must not run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from support.browser.driver import DESKTOP, PHONE, Browser
from support.browser.mock import MockProxy
from support.browser.scene import HTTP, Json, changed, facts, finding, past, sound

Make = Callable[[int], Awaitable[MockProxy]]
EVIL = "<img src=x onerror='window.ran=1'><script>window.ran=1</script>"
HREFS = ("#/", "#/services", "#/service/shop/api", "#/now")


async def _opened(page: Browser, mock: MockProxy, where: str = "#/") -> None:
    await page.open(mock.url + where)
    await page.until("return document.querySelector('#link').className === 'live'")


async def test_problems_come_first_and_the_worst_of_them_before_others(page: Browser, proxy: Make) -> None:
    mock = await proxy(40)
    shown = "return [...document.querySelectorAll('.problem h3')].map(e => e.innerText)"
    mock.problems = {
        "at": time.time(),
        "looking": False,
        "findings": [
            finding("note", "firewall guard drops some packets", "it may matter", "kube-proxy trace"),
            finding("broken", "net.ipv4.ip_forward is 0", "they time out", "sysctl -w net.ipv4.ip_forward=1"),
        ],
    }
    for row in mock.scene.rows.values():
        row[2] = row[3]
    await _opened(page, mock)
    await page.shows("#verdict-text", "1 thing is wrong on node-a")
    assert await page.run(shown) == ["net.ipv4.ip_forward is 0", "Firewall guard drops some packets"]
    assert "sysctl -w net.ipv4.ip_forward=1" in await page.text(".problem")
    assert (await page.run("return document.title")).startswith("(1) node-a")

    empty = mock.scene.rows["shop/api"]
    empty[2] = 0
    families = [sound("IPv4", None, refusal="the table is owned by another program", queued=3), sound("IPv6", 1.0)]
    full = {"count": 260_000, "max": 262_144}
    message = mock.scene.now(time.time(), [], [empty], families=families, conntrack=full, queued=3)
    await mock.send("now", message)
    await page.shows("#verdict-text", "3 things are wrong on node-a")
    assert (await page.run(shown))[:4] == [
        "IPv4: the kernel refuses what is planned; 3 Services wait",
        "Connection tracking is 99 % full: 260,000 of 262,144 entries",
        "net.ipv4.ip_forward is 0",
        "1 Service has no available endpoint",
    ]
    await page.press("j", "j", "j", "j", "Enter")
    await page.until("return location.hash === '#/service/shop/api'")


async def test_services_without_endpoints_are_to_look_at_and_nothing_wrong(page: Browser, proxy: Make) -> None:
    mock = await proxy(40)
    for row in mock.scene.rows.values():
        row[2] = row[3]
    mock.scene.rows["shop/api"][2:4] = 0, 0
    await _opened(page, mock)
    await page.shows("#verdict-text", "Nothing is wrong on node-a")
    await page.shows(".problem.look", "1 Service has no available endpoint")
    await page.shows("#verdict-sub", "1 thing to look at")
    assert await page.run("return [document.querySelector('#verdict').className, document.title]") == [
        "verdict ok",
        "node-a · Problems · kube-proxy",
    ]
    assert await page.run("return document.querySelector('#n-problems').hidden")


async def test_endpoints_without_the_port_are_not_called_unready(page: Browser, proxy: Make) -> None:
    mock = await proxy(40)
    mock.scene.rows["shop/api"][2:6] = 0, 7, "ClusterIP", "P"
    await _opened(page, mock, "#/service/shop/api")
    await page.shows("#service-view", "none of 7 endpoints has the port")
    await page.shows("#service-view", "no such port")


async def test_a_port_without_endpoints_is_to_look_at_beside_ports_that_have_them(page: Browser, proxy: Make) -> None:
    mock = await proxy(40)
    for row in mock.scene.rows.values():
        row[2] = row[3]
    mock.scene.rows["shop/api"][2:4] = 3, 3
    mock.scene.rows["shop/api"][8] = ["81/TCP", "82/UDP"]
    await _opened(page, mock)
    await page.shows("#verdict-sub", "1 thing to look at")
    await page.shows(".problem.look", "1 Service has a port without available endpoint")
    await page.shows(".problem.look", "shop/api 81/TCP, 82/UDP")
    without = "return document.querySelectorAll('#vitals .val')[1].firstChild.data"
    assert await page.run(without) == "1"
    await page.press("j", "Enter")
    await page.shows("#service-view", "3 of 3 endpoints ready; no endpoint is available for 81/TCP, 82/UDP")
    await page.press("2")
    await page.click("[data-filter=none]")
    await page.shows("#sum", "1 of 40 Services")
    label = "(one) => document.querySelector(`.row ${one}`).closest('[role=gridcell]').ariaLabel"
    labels = f"return ['.ends', '.dot'].map({label})"
    assert await page.run(labels) == [
        "3 of 3 endpoints ready; no endpoint is available for 81/TCP, 82/UDP",
        "programmed, no endpoint is available for 81/TCP, 82/UDP",
    ]
    assert await page.run("return document.querySelector('.row .ends').className") == "ends some"
    assert await page.run("return document.querySelector('.row .dot').offsetHeight") < 20


async def test_problems_are_looked_for_again_when_asked(page: Browser, proxy: Make) -> None:
    mock = await proxy(2)
    at = time.time() - 100
    mock.problems = {"at": at, "lookedAt": at, "every": 200.0, "looking": False, "findings": []}
    await _opened(page, mock)
    looked = time.strftime("%H:%M:%S", time.localtime(at))
    await page.shows("#verdict-sub", f"doctor looked at {looked}, 1")
    assert "at the latest after 3 min" in await page.run("return document.querySelector('#look').title")
    await page.click("#look")
    await page.press("l")
    await page.shows("#look", "Looking")
    mock.problems |= {"at": time.time(), "lookedAt": time.time(), "findings": [finding("broken", "found now", "", "")]}
    await mock.send("problems", mock.problems)
    await page.shows(".problem h3", "Found now")
    await page.shows("#look", "Look again")
    assert mock.seen.count("/ui/api/look") == 1


async def test_the_copy_button_of_a_fix_copies_its_command(page: Browser, proxy: Make) -> None:
    mock = await proxy(2)
    fixes = [
        "sysctl -w net.ipv4.ip_forward=1, and remove it from the file",
        "modprobe br_netfilter; sysctl -w net.bridge.bridge-nf-call-iptables=1, and remove it",
        "`kube-proxy trace SRC DST:PORT` shows which rule drops a connection",
        "the proxy puts it back; a firewall that does `nft flush ruleset` must keep to its own tables",
    ]
    mock.problems = {
        "at": time.time(),
        "findings": [finding("broken", f"w{n}", "", fix) for n, fix in enumerate(fixes)],
    }
    await _opened(page, mock)
    await page.until("return document.querySelectorAll('.problem.bad').length === 4")
    write = "window.copied = []; const writeText = async (text) => { window.copied.push(text); };"
    await page.run(f"{write} Object.defineProperty(navigator, 'clipboard', {{ value: {{ writeText }} }})")
    await page.run("document.querySelectorAll('.problem.bad .fix button').forEach((one) => one.click())")
    assert await page.run("return window.copied") == [
        "sysctl -w net.ipv4.ip_forward=1",
        "modprobe br_netfilter; sysctl -w net.bridge.bridge-nf-call-iptables=1",
        "kube-proxy trace SRC DST:PORT",
        fixes[3],
    ]


async def test_ten_thousand_services_are_searched_filtered_and_walked_through(page: Browser, proxy: Make) -> None:
    mock = await proxy(10_000)
    await _opened(page, mock, "#/services")
    await page.shows("#sum", "10,000 Services")
    rows = "return document.querySelectorAll('#spacer .row').length"
    selected = (
        "const r = document.querySelector('.row[aria-selected=true]'); return r && r.querySelector('.name').innerText"
    )
    few = await page.run(rows)
    assert few < 60
    assert await page.run("return document.querySelector('#grid').ariaRowCount") == "10001"

    await page.press("/")
    await page.type("shop mail-3")
    expected = sorted(name for name in mock.scene.rows if "shop" in name and "mail-3" in name)
    await page.shows("#sum", f"{len(expected)} of 10,000 Services")
    await page.press("Enter", "j")
    assert await page.run(selected) == expected[1]
    assert await page.run("return location.hash") == "#/services?q=shop+mail-3"
    await page.press("Enter")
    await page.until("return location.hash === arguments[0]", f"#/service/{expected[1]}")
    await page.until("return document.activeElement.id === 'main'")
    await page.press("Escape")
    await page.until("return document.activeElement.id === 'grid'")
    assert await page.run("return location.hash") == "#/services?q=shop+mail-3"
    assert await page.run(selected) == expected[1]

    await page.press("Escape", "End")
    last = max(mock.scene.rows)
    await page.until(f"{selected} === arguments[0]", last)
    assert await page.run("return document.activeElement.getAttribute('aria-activedescendant')")
    assert await page.run(rows) == few

    first = min(mock.scene.rows)
    mock.scene.rows[first][2] = 0
    gone = expected[0]
    del mock.scene.rows[gone]
    await mock.send("now", mock.scene.now(time.time(), [], [mock.scene.rows[first]], gone=[gone], revision=99))
    await page.shows("#sum", "9,999 Services")
    await page.click("[data-filter=none]")
    none = [name for name, row in mock.scene.rows.items() if row[2] == 0]
    await page.shows("#sum", f"{len(none)} of 9,999 Services")
    await page.shows(".row", first.partition("/")[2])
    assert mock.seen.count("/ui/api/services") == 1


async def test_connections_show_as_lines_and_balance_and_order_services(page: Browser, proxy: Make) -> None:
    mock = await proxy(300)
    await _opened(page, mock, "#/services?s=rate")
    await page.shows("#sum", "300 Services")
    # The shares are those of the port and family with the most connections.
    http = {"10.244.0.1:80": 0.6, "10.244.0.2:80": 0.2}
    busy = {"new": 1234.0, "endpoints": {HTTP: http, "http/TCP/IPv6": {"[fd00::1]:80": 0.1, "[fd00::2]:80": 0.1}}}
    await mock.send(
        "flows", {"at": time.time(), "seconds": 1, "sampled": 1, "services": {"shop/web": busy}, "error": ""}
    )
    await page.until("return document.querySelector('.row .name').innerText === 'shop/web'")
    assert "1,234/s" in await page.text(".row .rate")
    assert "max 75 %" in await page.text(".row .balance")
    assert await page.run("return document.querySelector('.row .spark').getAttribute('d').length") > 100
    await page.click("[data-filter=busy]")
    await page.shows("#sum", "1 of 300 Services")


async def test_the_address_of_an_endpoint_finds_its_services(page: Browser, proxy: Make) -> None:
    mock = await proxy(60)
    held = [name for name, row in mock.scene.rows.items() if row[3] > 5]
    await _opened(page, mock, "#/services")
    await page.press("/")
    await page.type("10.244.5.25:8080")
    await page.shows("#sum", f"{len(held)} of 60 Services")
    assert 0 < len(held) < 60
    await page.press("Escape")
    await page.shows("#sum", "60 Services")


async def test_services_are_sorted_by_keyboard_and_on_a_phone(page: Browser, proxy: Make) -> None:
    mock = await proxy(300)
    mock.scene.rows["shop/web"][7] = time.time() + 5
    await page.resize(*PHONE)
    await _opened(page, mock, "#/services?q=shop")
    assert await page.run("return document.querySelector('#sort').checkVisibility()")
    await page.press("s")
    await page.until("return document.activeElement.id === 'sort'")
    await page.type("last")
    await page.until("return document.querySelector('.row .name').innerText === 'shop/web'")
    assert await page.run("return location.hash") == "#/services?q=shop&s=changed"
    await page.press("Escape")
    await page.until("return document.activeElement.id === 'grid'")
    assert await page.run("return location.hash") == "#/services?q=shop&s=changed"


async def test_one_service_is_a_picture_that_follows_its_changes(page: Browser, proxy: Make) -> None:
    mock = await proxy(60)
    name = next(name for name, row in mock.scene.rows.items() if row[4] == "LoadBalancer")
    row = mock.scene.rows[name]
    row[2] = row[3] = 4
    await _opened(page, mock, f"#/service/{name}")
    await page.shows(".picture svg text", "10.244.0.20:8080")
    picture = await page.run("return document.querySelector('.picture svg').textContent")
    for part in (
        "Client",
        "Frontend",
        "Action",
        "Endpoint",
        "pods",
        "this node",
        "outside",
        "only from 198.51.100.0/24",
        "masqueraded",
        "node-b",
    ):
        assert part in picture
    assert "connections" not in picture  # nothing is known before the first second
    shown = "return document.querySelector('.picture svg').textContent.includes(arguments[0])"
    at, quiet = time.time(), {"seconds": 1, "sampled": 1, "services": {}, "error": ""}
    await mock.send("flows", {"at": at, **quiet})
    await page.until(shown, "none since the page connected")
    await mock.send("flows", {"at": at + 61, **quiet})
    await page.until(shown, "no new connections")
    other = {"10.244.0.20:8080": 0.25, "10.244.2.22:8080": 0.25}  # of a port with the same endpoints
    flow = {"new": 200.0, "endpoints": {HTTP: {"10.244.0.20:8080": 0.3, "10.244.1.21:8080": 0.2}, "m/TCP/IPv4": other}}
    await mock.send("flows", {"at": time.time(), "seconds": 1, "sampled": 1, "services": {name: flow}, "error": ""})
    await page.until("return document.querySelector('.picture svg').textContent.includes('60 % · 60/s')")
    widths = (
        "return [...document.querySelectorAll('.picture [data-as=bar]')].map(e => Math.round(e.getAttribute('width')))"
    )
    assert await page.run(widths) == [90, 60, 0, 0]

    detail = mock.scene.detail(name)
    address = "[2001:db8:1234:5678:9abc:def0:1234:5678]:443/TCP"
    detail["ports"][0]["frontends"][0]["address"] = address
    mock.details[name] = detail
    row[7] = time.time()
    await mock.send("now", mock.scene.now(time.time(), [], [row]))
    await page.shows(".picture text > title", address)
    shown = "return [...document.querySelectorAll('.picture text')].map((one) => one.firstChild.textContent)"
    assert f"{address[:23]}\u2026" in await page.run(shown)
    del mock.details[name]

    row[2] = 3
    change: Json = changed(time.time(), name, "endpoints -1, 3 now", 1.25)
    await mock.send("now", mock.scene.now(time.time(), [change], [row], [1.25]))
    await page.until("return document.querySelector('.picture svg').textContent.includes('out: not ready')")
    await page.shows("table td", "no: not ready (conditions.ready)")
    await page.shows(".feed", "endpoints -1, 3 now")

    await page.press("w", "Enter")
    await page.shows(".answer", "this node → ")
    await page.shows("#service-view code", f"kube-proxy trace node {row[6][0]}".partition("/")[0])
    await page.press("Escape", "w")
    await page.type("nonsense\ue007")
    await page.shows(".answer.bad", "SOURCE: expected an address or node, got 'nonsense'")

    targets = "return [...document.querySelector('[name=to]').options].map((one) => one.value)"
    assert [one for one in await page.run(targets) if one.startswith("192.0.2.11:30")]
    hidden = "return document.querySelector('[name=other]').parentNode.hidden"
    assert await page.run(hidden)
    await page.press("Escape")
    await page.run("document.querySelector('[name=to]').focus()")
    await page.type("other")
    assert not await page.run(hidden)
    await page.run("document.querySelector('[name=from]').value = 'node'")
    await page.run("document.querySelector('[name=other]').focus()")
    await page.type("198.51.100.7:81\ue007")
    await page.shows(".answer", "this node → 198.51.100.7:81")

    detail = mock.scene.detail(name)
    first, *others = detail["ports"][0]["endpoints"]
    detail["ports"][0] |= {
        "endpoints": others,
        "localEndpoints": [],
        "drainedEndpoints": [first],
        "weights": {others[0]: 3, others[1]: 1},
    }
    mock.details[name] = detail
    row[7] = time.time()
    await mock.send("now", mock.scene.now(time.time(), [], [row]))
    await page.until("return document.querySelector('.picture svg').textContent.includes('out: drained')")
    await page.shows("table td", "yes, weight 3")
    await page.shows(".picture title", "planned: 75 %")

    detail["ports"][0] |= {"drainedEndpoints": [], "ejectedEndpoints": {first: "connection refused, since 10:00"}}
    row[7] = time.time()
    await mock.send("now", mock.scene.now(time.time(), [], [row]))
    await page.shows("table td", "no: ejected on this node: connection refused, since 10:00 (kube-proxy-py/eject)")

    del mock.scene.rows[name], mock.details[name]
    await mock.send("now", mock.scene.now(time.time(), [], [], gone=[name]))
    await page.shows(".problem", f"no Service {name} that is watched")


async def test_endpoints_without_the_port_are_shown_as_out(page: Browser, proxy: Make) -> None:
    mock = await proxy(60)
    name = next(name for name, row in mock.scene.rows.items() if row[4] == "LoadBalancer")
    mock.scene.rows[name][2:4] = 3, 3
    detail = mock.scene.detail(name)
    detail["ports"][0] |= {"endpoints": [], "localEndpoints": []}
    bare = ("10.244.0.20", "10.244.1.21", "10.244.2.22")
    for one, address in zip(detail["endpoints"], bare, strict=True):
        one |= {"address": address, "port": None, "protocol": None}
    detail["endpoints"][2] |= {"address": "10.244.2.22:9090", "port": "metrics", "protocol": "TCP", "slice": "other"}
    mock.details[name] = detail
    await _opened(page, mock, f"#/service/{name}")
    await page.shows(".picture svg text", "10.244.0.20")
    picture = await page.run("return document.querySelector('.picture svg').textContent")
    assert [picture.count(f"{address}out: its EndpointSlice has no port http (TCP)") for address in bare] == [1, 1, 1]
    assert "no endpoint" not in picture
    await page.shows("table td", "no: its EndpointSlice has no port http (TCP) (ports)")


async def test_endpoints_of_other_nodes_are_out_by_policy_local(page: Browser, proxy: Make) -> None:
    mock = await proxy(60)
    name = next(name for name, row in mock.scene.rows.items() if row[4] == "ClusterIP")
    mock.scene.rows[name][2:6] = 3, 3, "ClusterIP", "lN"
    detail = mock.scene.detail(name)
    detail["ports"] = detail["ports"][:1]
    detail["ports"][0] |= {"endpoints": [], "localEndpoints": []}
    detail["endpoints"] = detail["endpoints"][1:]
    detail["endpoints"][1] |= {"node": None, "forZones": ["zone-7"]}
    mock.details[name] = detail
    await _opened(page, mock, f"#/service/{name}")
    await page.shows("table td", "no: it is on node-b, and the policy is Local (nodeName)")
    text = "no: its EndpointSlice names no node, and the policy is Local (endpoints[].nodeName)"
    await page.shows("table td", text)
    await page.shows(".picture svg text", "out: it is on node-b, and the policy is Local")
    await page.shows("#service-view .dim", "3 of 3 endpoints ready, none of them on this node")
    await page.open(f"{mock.url}#/services?q={name.replace('/', '+')}")
    await page.shows(".row .ends", "0 of 3")


async def test_a_window_that_becomes_narrow_has_words_for_the_picture(page: Browser, proxy: Make) -> None:
    mock = await proxy(60)
    name = next(name for name, row in mock.scene.rows.items() if row[4] == "LoadBalancer" and row[2] > 1)
    await _opened(page, mock, f"#/service/{name}")
    await page.shows(".picture svg text", "10.244.0.20:8080")
    words = "return document.querySelector('.ways').checkVisibility()"
    assert not await page.run(words)
    await page.resize(*PHONE)
    await page.until(words)
    await page.shows("td:first-child .under", "node-a · zone-1 · this node · ready")
    assert await page.run("const t = document.querySelector('.wide'); return t.scrollWidth <= t.clientWidth")
    await page.resize(*DESKTOP)
    await page.until("return document.querySelector('.picture').checkVisibility()")
    await page.until(f"return !(() => {{ {words} }})()")


async def test_the_view_now_begins_with_past_events(page: Browser, proxy: Make) -> None:
    mock = await proxy(60)
    at = time.time()
    mock.past = past(at)
    await page.open(f"{mock.url}#/now")
    await page.shows("#feed li.ok", "after 61.0 s: the API server cannot be reached")
    shown = (
        "return [...document.querySelectorAll('#feed li')].map((one) => one.innerText.split('\\n').slice(1).join(' '))"
    )
    last = [one["what"] for one in mock.past["changes"]][::-1]
    assert [text for text, what in zip(await page.run(shown), last, strict=True) if what not in text] == []
    await page.shows(".chart .foot", "most in 15 min: 30/s")
    assert await page.run("return document.querySelectorAll('#feed a').length") == 3
    await mock.send("now", mock.scene.change(at, 2))
    await page.until("return document.querySelectorAll('#feed li').length === arguments[0]", len(last) + 2)
    await mock.stop()
    await page.shows("#lost", "The connection to the proxy")
    mock.past["changes"].append(changed(at, "shop/web", "endpoints +5, 9 now", 1.0))
    await mock.start()
    await page.shows("#feed li", "endpoints +5, 9 now")
    assert mock.seen.count("/ui/api/journal") == 2


async def test_a_new_change_is_listed_with_its_delay(page: Browser, proxy: Make) -> None:
    mock = await proxy(500)
    await _opened(page, mock, "#/now")
    await page.shows("#feed", "Nothing has changed since the proxy started.")
    await mock.send("now", mock.scene.change(time.time(), 50))
    await page.until("return document.querySelectorAll('#feed li').length === 21")
    await page.shows("#feed li", "and 30 changes more")
    await page.shows(".chart", "200/s")
    label = "return document.querySelector('.chart canvas').getAttribute('aria-label')"
    assert " ms" in await page.run(label)
    await page.press("p")
    await mock.send("now", mock.scene.change(time.time(), 5))
    await page.shows(".chart", "20/s")
    assert await page.run("return document.querySelectorAll('#feed li').length") == 21
    await page.press("p")
    await page.until("return document.querySelectorAll('#feed li').length === 26")


async def test_a_lost_proxy_is_reported_and_reconnected(page: Browser, proxy: Make) -> None:
    mock = await proxy(30)
    await _opened(page, mock)
    await page.shows("#facts", "pid 812")
    await mock.stop()
    await page.shows("#lost", "The connection to the proxy (pid 812) is lost since ")
    await page.shows("#lost", "nothing answers at this address")
    assert "lost for" in await page.text("#link")
    assert (await page.run("return document.title")).startswith("(lost)")
    mock.facts = facts(time.time(), 940)
    mock.scene.rows.pop("shop/api")
    await mock.start()
    await page.shows("#facts", "pid 940")
    await page.shows("#say", "kube-proxy was restarted: pid 812 is now 940")
    assert await page.run("return document.querySelector('#lost').hidden")
    await page.until("return document.querySelector('#n-services').innerText === '29'")
    await asyncio.sleep(0)
    assert mock.pages == 1


async def test_a_page_above_the_limit_gets_the_reason(page: Browser, proxy: Make) -> None:
    mock = await proxy(5)
    said = "8 pages are already open: close a page"
    mock.refuse = {"/ui/api/events": (503, said), "/ui/api/facts": (503, said)}
    await page.open(mock.url)
    await page.shows("#lost", said)


async def test_no_text_of_a_cluster_is_executed(page: Browser, proxy: Make) -> None:
    mock = await proxy(3)
    name = f"shop/{EVIL.replace('/', '')}"
    row = [name, "refused", 0, 1, EVIL, "L", [EVIL, "10.0.0.1:80/tcp"], time.time()]
    mock.scene.rows[name] = row
    mock.details[name] = {
        "namespace": "shop",
        "name": EVIL,
        "state": "refused",
        "reason": EVIL,
        "resourceVersion": EVIL,
        "problems": [EVIL],
        "ports": [
            {
                "name": EVIL,
                "protocol": EVIL,
                "family": EVIL,
                "frontends": [
                    {
                        "kind": EVIL,
                        "address": EVIL,
                        "fromPods": EVIL,
                        "fromNode": EVIL,
                        "fromOutside": EVIL,
                        "sources": [EVIL],
                    }
                ],
                "endpoints": [EVIL],
                "localEndpoints": [],
                "otherEndpoints": [f"{EVIL}2"],
            }
        ],
    }
    mock.facts |= {"node": EVIL, "version": EVIL, "mode": EVIL, "ready": False, "unready": {EVIL: EVIL}}
    mock.problems = {"at": time.time(), "looking": False, "findings": [finding(EVIL, EVIL, EVIL, EVIL)]}
    change = changed(time.time(), name, EVIL, 1.0)
    for where in ("#/", "#/services", "#/now", f"#/service/{name}"):
        await page.open(mock.url)
        await page.run("location.hash = arguments[0]", where)
        await page.until("return document.querySelector('#link').className === 'live'")
        families = [sound(EVIL, None, refusal=EVIL, difference=EVIL)]
        await mock.send("now", mock.scene.now(time.time(), [change], [row], [1.0], families=families))
        await page.shows("main", "<img src=x")
        assert not await page.run("return document.querySelector('img') || document.scripts.length !== 1 || window.ran")
    await page.shows(".picture svg text", "<img src=x")
    assert not await page.run("return document.querySelector('img') || window.ran")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_each_view_fits_a_phone_and_has_a_heading(page: Browser, proxy: Make, scheme: str) -> None:
    mock = await proxy(200)
    await page.prefer(scheme, "reduce")
    await _opened(page, mock)
    for width, height in (PHONE, DESKTOP):
        await page.resize(width, height)
        for where in HREFS:
            await page.run("location.hash = arguments[0]", where)
            await page.until(
                "return [...document.querySelectorAll('main > section')].filter(s => !s.hidden).length === 1"
            )
            await page.until("return document.documentElement.scrollWidth <= arguments[0]", width)
            assert await page.run(_NAMELESS) == []
    dark = await page.run("return getComputedStyle(document.body).backgroundColor") == "rgb(14, 17, 19)"
    assert dark == (scheme == "dark")
    assert await page.run("return document.getAnimations().length") == 0
    assert (
        await page.run("return [...document.querySelectorAll('header, nav, main, [role=status], [role=grid]')].length")
        >= 5
    )


_NAMELESS = """
return [...document.querySelectorAll('button, a[href], input, select, canvas, [role=grid], section:not([hidden])')]
  .filter(e => e.checkVisibility() && !(e.innerText || e.getAttribute('aria-label') || e.labels && e.labels.length))
  .map(e => e.outerHTML.slice(0, 120))
"""


async def test_everything_works_by_keyboard_and_help_lists_the_keys(page: Browser, proxy: Make) -> None:
    mock = await proxy(20)
    await _opened(page, mock)
    await page.press("?")
    await page.until("return document.querySelector('#help').open")
    await page.press("Escape")
    await page.until("return !document.querySelector('#help').open")
    for key, where in (("2", "#/services"), ("3", "#/now"), ("1", "#/")):
        await page.press(key)
        await page.until("return location.hash === arguments[0]", where)
    await page.press("/")
    await page.until("return document.activeElement.id === 'search'")
    await page.type("zzz?2")
    assert await page.run("return [location.hash, document.querySelector('#help').open]") == [
        "#/services?q=zzz%3F2",
        False,
    ]
    await page.shows("#none", "No Service fits.")
    await page.press("Escape")
    await page.shows("#sum", "20 Services")
