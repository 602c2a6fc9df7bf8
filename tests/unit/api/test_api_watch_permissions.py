"""Missing credentials and permissions of a watch, and servers that require another form of request."""

import asyncio
import time

import pytest

from kubeproxy.api.credentials import TokenFile
from support.scripted import listed, service
from support.watch_scripts import CIDRS, fails, kinds, lists, scripted, watch, watches


def test_a_refused_token_is_read_again(tmp_path):
    token = tmp_path / "token"
    token.write_text("old\n")

    async def script(request, reply):
        if request.headers["authorization"] != "Bearer new":
            token.write_text("new\n")
            return await reply.recorded("list-unauthorized")
        return await lists(service("a"))(request, reply) if request.kind == "list" else await watches()(request, reply)

    async def use(seen, server, reflector):
        await seen.until(1)
        return kinds(server)[:2]

    assert watch(script, use, credentials=TokenFile(str(token))) == ["list", "list"]


def test_unknown_credentials_are_tried_slowly(tmp_path, caplog):
    async def use(seen, server, reflector):
        await asyncio.sleep(0.5)
        return len(server.requests), reflector.status.trouble

    token = tmp_path / "token"
    token.write_text("wrong")
    requests, trouble = watch(scripted(fails(401, "Unauthorized")), use, credentials=TokenFile(str(token)))
    assert requests < 25
    assert caplog.text.count("does not accept our credentials") == 1
    assert trouble == (
        f"services: the API server does not accept our credentials (the token in {token}): Unauthorized (code 401)"
    )


def test_a_missing_permission_is_named_once(caplog):
    async def forbidden(request, reply):
        await reply.recorded("list-forbidden")

    async def use(seen, server, reflector):
        await asyncio.sleep(0.5)
        while len(server.requests) <= 3:  # noqa: ASYNC110 - the server has no event
            await asyncio.sleep(0.1)
        return len(server.requests), list(seen)

    requests, seen = watch(scripted(forbidden), use)
    assert requests < 25
    assert seen == []
    assert caplog.text.count("allow the verbs list and watch of services") == 1


@pytest.mark.parametrize("code", [403, 404])
def test_servicecidrs_may_be_missing(code, caplog):
    there = False

    async def script(request, reply):
        if not there:
            await reply.status(code)
        elif request.kind == "list":
            cidr = {"metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.0.0.0/16"]}}
            await reply.answer(200, listed(cidr, kind="ServiceCIDR"))
        else:
            await watches()(request, reply)

    async def use(seen, server, reflector):
        nonlocal there
        await seen.until(1)
        assert reflector.status.synced
        assert ("code 403" in reflector.status.trouble) is (code == 403)
        assert reflector.status.staleness(time.monotonic() + 500) == 0.0
        await asyncio.sleep(0.15)
        assert len(seen) == 1
        there = True
        await seen.until(2)
        assert reflector.status.trouble == ""
        return seen

    assert watch(script, use, target=CIDRS) == ["=", "= kubernetes"]
    assert caplog.text.count("Cannot watch") == 1


def test_retry_after_is_honoured():
    script = scripted(fails(429, **{"Retry-After": "1"}), lists(), watches())

    async def use(seen, server, reflector):
        await seen.until(1)
        return server.requests[1].at - server.requests[0].at

    assert watch(script, use) >= 1.0


def test_a_server_without_the_field_selector_gets_requests_without_it():
    async def script(request, reply):
        if "fieldSelector" in request.query:
            return await reply.status(400, 'field label not supported: "spec.clusterIP"')
        return await (lists() if request.kind == "list" else watches())(request, reply)

    async def use(seen, server, reflector):
        await seen.until(1)
        return kinds(server)[:2]

    assert watch(script, use) == ["list", "list"]
