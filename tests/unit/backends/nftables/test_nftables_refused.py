"""Each message of a change is refused once, and each answer is lost once: the kernel is unchanged, or repaired."""

import errno
import itertools
from functools import cache

import pytest

from kubeproxy.errors import ApplyError
from kubeproxy.kernel.netlink.protocol import NetlinkError
from support.effort import stride
from support.nftables_disturbances import disturbed
from support.nftables_ground import FakeGround, resync, sync, without_slots
from support.nftables_plans import plans_of, sticky

AFTER = {
    ("default", "b"): plans_of("b", 2, 6),
    ("default", "c"): plans_of("c", 3, 2),
    ("default", "d"): sticky("d", 4, 5),
    ("default", "e"): plans_of("e", 5, 3, ingress=["198.51.100.1"], load_balancer_source_ranges=["172.16.0.0/16"]),
}
GONE = (("default", "a"), ())


def whole(ground):
    return (ground.header(), ground.contents(), ground.chains()) if ground.header() is not None else None


@cache
def contents_made_at_once():
    with FakeGround.fresh() as ground:
        resync(ground.start(), AFTER)
        return without_slots(ground.contents())


def mended(ground, backend):
    """After a full sync the state is the same as with a single sync."""
    resync(backend, AFTER)
    assert ground.difference(backend) is None
    assert without_slots(ground.contents()) == contents_made_at_once()


CHANGES = {
    "sync": lambda ground, backend: sync(backend, GONE, *AFTER.items()),
    "resync": lambda ground, backend: resync(backend, AFTER),
    "restart": lambda ground, backend: resync(ground.start(), AFTER),
    "replacement": lambda ground, backend: resync(backend, AFTER),
    "first sync": lambda ground, backend: resync(backend, AFTER),
}


def prepared(ground, how):
    backend, _ = disturbed(ground)
    if how == "replacement":
        ground.disturb("delete table ip kube-proxy", "add table ip kube-proxy", "add chain ip kube-proxy services")
    if how == "first sync":
        ground.disturb("delete table ip kube-proxy")
    return backend


@pytest.mark.parametrize("how", CHANGES)
def test_a_transaction_that_is_refused_anywhere_leaves_nothing_behind(how):
    # Each line of a text counts as a message: of many hundreds the test refuses only a few.
    for messages in itertools.count(0, stride(3 if how == "sync" else 41)):
        with FakeGround.fresh() as ground:
            backend = prepared(ground, how)
            transactions = [whole(ground)]

            def note(ground=ground, transactions=transactions):
                transactions.append(whole(ground))

            ground.after_commit = note
            ground.kernel.refuse(messages, errno.ENOMEM)
            try:
                CHANGES[how](ground, backend)
            except ApplyError:
                assert whole(ground) == transactions[-1]
                mended(ground, backend)
            else:
                break
    assert messages > 5


@pytest.mark.parametrize("how", CHANGES)
def test_after_a_lost_answer_a_full_sync_repairs_the_uncertain_state(how):
    for answers in itertools.count():
        with FakeGround.fresh() as ground:
            backend = prepared(ground, how)
            left = [answers]

            def lose(left=left):
                left[0] -= 1
                if left[0] == -1:
                    raise NetlinkError(errno.ETIMEDOUT, "no answer from nf_tables")

            ground.after_commit = lose
            try:
                CHANGES[how](ground, backend)
            except NetlinkError:
                mended(ground, backend)
            else:
                break
    assert answers > 0


@pytest.mark.parametrize("how", CHANGES)
def test_after_a_failed_dump_a_full_sync_repairs_the_uncertain_state(how):
    for reads in itertools.count(0, stride(5)):
        with FakeGround.fresh() as ground:
            backend = prepared(ground, how)
            left = [reads]

            def fail(left=left):
                left[0] -= 1
                if left[0] == -1:
                    raise NetlinkError(errno.EINTR, "cannot read")

            ground.before_read = fail
            try:
                CHANGES[how](ground, backend)
            except NetlinkError:
                mended(ground, backend)
            else:
                break
    assert (reads == 0) if how == "sync" else (reads > 2)


@pytest.mark.parametrize("code", [errno.ENOBUFS, errno.ENOMEM, errno.EINTR, errno.EPERM])
def test_a_repair_of_rules_that_is_refused_for_a_moment_is_tried_again(code):
    """A replacement of the table would lose the clients of session affinity."""
    with FakeGround.fresh() as ground:
        backend, plans = disturbed(ground)
        header, chains = ground.header(), ground.chains()
        ground.disturb("add rule ip kube-proxy services drop")

        def refuse():
            ground.before_commit = lambda: None
            raise NetlinkError(code, "the kernel refused an nf_tables transaction")

        ground.before_commit = refuse
        with pytest.raises(NetlinkError):
            resync(backend, plans)
        resync(backend, plans)
        assert ground.header() == header
        assert ground.chains() == chains
