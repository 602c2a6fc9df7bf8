"""The owner of a key that several Services claim: the Service the API server allocated it to, else the oldest."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kubeproxy.model.claims import Claimant, Claims, Right

OLD, MID, NEW = (
    Claimant(Right.ALLOCATED, "2024-01-01T00:00:00Z", "ns", "old"),
    Claimant(Right.ALLOCATED, "2024-02-01T00:00:00Z", "ns", "mid"),
    Claimant(Right.ALLOCATED, "2025-01-01T00:00:00Z", "ns", "new"),
)
K, L = b"k", b"l"
KEYS = (b"a", b"b", b"c")


def name(claimant):
    return claimant.service


def owner(claims, key):
    claimant = claims.owner(key)
    return claimant.service if claimant is not None else None


def claim(claims, claimant, *keys, before=()):
    return told(claims, claims.replace(claimant if before else None, claimant, before, keys)) - {name(claimant)}


def release(claims, claimant, *keys):
    return told(claims, claims.replace(claimant, None, keys, ()))


def told(claims, moved):
    """Return the Services to compile again: all claimants of keys whose owner changed."""
    return {service for key in moved for service in claims.asking(key)}


@pytest.mark.parametrize("order", list(itertools.permutations([OLD, MID, NEW])))
def test_the_oldest_owns_whatever_the_order(order):
    claims = Claims()
    for claimant in order:
        claim(claims, claimant, K)
    assert owner(claims, K) == name(OLD)
    assert claims.contested


@pytest.mark.parametrize("order", list(itertools.permutations([OLD, MID, NEW])))
def test_the_next_oldest_takes_over(order):
    claims = Claims()
    for claimant in (NEW, OLD, MID):
        claim(claims, claimant, K)
    left = [OLD, MID, NEW]
    for claimant in order:
        release(claims, claimant, K)
        left.remove(claimant)
        assert owner(claims, K) == (name(left[0]) if left else None)
        assert claims.contested is (len(left) > 1)


def test_an_unclaimed_key_has_no_owner():
    assert Claims().owner(K) is None


def test_services_to_compile_again():
    claims = Claims()
    assert claim(claims, MID, K) == set()
    assert claim(claims, NEW, K) == set()  # the claimant loses the key, and reports this
    assert claim(claims, OLD, K) >= {name(MID)}  # the claimant lost the key before
    assert release(claims, OLD, K) >= {name(MID)}  # the claimant owns the key again


def test_claimants_without_ownership_get_a_new_owner_too():
    """The reports of the losers name the owner."""
    claims = Claims()
    for claimant in (OLD, MID, NEW):
        claim(claims, claimant, K)
    assert release(claims, OLD, K) == {name(MID), name(NEW)}
    assert claim(claims, OLD, K) == {name(MID), name(NEW)}


def test_keys_are_independent():
    claims = Claims()
    claim(claims, OLD, K)
    claim(claims, NEW, K, L)
    assert (owner(claims, K), owner(claims, L)) == (name(OLD), name(NEW))
    claim(claims, OLD, L, before=[K])
    assert (owner(claims, K), owner(claims, L)) == (name(NEW), name(OLD))


def test_the_same_claim_again_changes_nothing():
    claims = Claims()
    claim(claims, OLD, K)
    claim(claims, NEW, K)
    assert claim(claims, OLD, K, before=[K]) == set()
    assert claim(claims, NEW, K, before=[K]) == set()
    release(claims, NEW, K)
    assert not claims.contested
    assert owner(claims, K) == name(OLD)


def test_a_service_made_again_is_younger():
    claims = Claims()
    claim(claims, OLD, K)
    claim(claims, MID, K)
    again = replace(OLD, created="2026-01-01T00:00:00Z")
    assert told(claims, claims.replace(OLD, again, [K], [K])) == {name(MID), name(OLD)}
    assert owner(claims, K) == name(MID)
    release(claims, MID, K)
    assert claims.owner(K) == again


def test_of_the_same_age_the_first_by_name_owns():
    claims = Claims()
    first, second = (Claimant(Right.WRITTEN, "t", *service) for service in (("a", "z"), ("b", "a")))
    claim(claims, second, K)
    claim(claims, first, K)
    assert owner(claims, K) == ("a", "z")


@pytest.mark.parametrize("order", list(itertools.permutations([OLD.writing, MID.writing, NEW])))
def test_allocated_addresses_precede_written_ones(order):
    """Otherwise a user who may write externalIPs could take the cluster IPs of all younger Services."""
    claims = Claims()
    for claimant in order:
        claim(claims, claimant, K)
    assert owner(claims, K) == name(NEW)
    assert release(claims, NEW, K) == {name(OLD), name(MID)}
    assert owner(claims, K) == name(OLD)


def test_a_service_may_ask_by_both_rights():
    claims = Claims()
    claim(claims, OLD, K)
    assert claim(claims, OLD.writing, K) == set()
    assert claim(claims, NEW, K) == set()
    assert release(claims, OLD, K) == {name(OLD), name(NEW)}
    assert owner(claims, K) == name(NEW)


claimants = st.sampled_from(
    [
        OLD,
        MID.writing,
        NEW,
        replace(OLD, created="2026"),
        Claimant(Right.ALLOCATED, "", "ns", "ageless"),
        Claimant(Right.WRITTEN, "", "ns", "ageless"),
    ]
)


@given(st.lists(st.tuples(claimants, st.frozensets(st.sampled_from(KEYS)))))
def test_ownership_depends_on_the_last_claims_only(steps):
    claims = Claims()
    held = {}
    for claimant, keys in steps:
        service = name(claimant)
        old, before = held.get(service, (None, frozenset()))
        new = claimant if keys else None
        owners = {key: owner(claims, key) for key in KEYS}
        touched = told(claims, claims.replace(old, new, before, keys))
        if keys:
            held[service] = (claimant, keys)
        else:
            held.pop(service, None)
        for key in KEYS:
            asking = sorted(c for c, wanted in held.values() if key in wanted)
            assert owner(claims, key) == (name(asking[0]) if asking else None)
            if owners[key] != owner(claims, key):
                assert {name(c) for c in asking} - {service} <= touched
    assert claims.contested is any(sum(key in wanted for _, wanted in held.values()) > 1 for key in KEYS)


class Counted(Claimant, frozen=True, order=True):
    """A claimant that counts its comparisons with other claimants."""

    def __lt__(self, other):
        compared[0] += 1
        return super().__lt__(other)

    def __eq__(self, other):
        compared[0] += 1
        return super().__eq__(other)

    def __hash__(self):
        return super().__hash__()


compared = [0]


@pytest.mark.parametrize("coming", ["oldest first", "youngest first", "anyhow"])
@pytest.mark.parametrize("going", ["oldest first", "youngest first", "anyhow"])
def test_the_cost_of_many_claimants_of_the_same_keys_is_linear(coming, going):
    """3,000 Services that shared 20 external IPs delayed the first list by 36 s."""

    def cost(number):
        compared[0] = heard = 0
        claims = Claims()
        claimants = [Counted(Right.WRITTEN, f"{n:04}", "ns", f"s{n}") for n in range(number)]
        for claimant in ordered(claimants, coming):
            heard += len(claims.replace(None, claimant, (), KEYS))
        for claimant in ordered(claimants, going):
            heard += len(claims.replace(claimant, None, KEYS, ()))
        return compared[0] + heard

    few, many = cost(250), cost(1000)
    assert many < 4 * few * 1.5  # each is compared with a number of others that grows logarithmically


def ordered(claimants, order):
    if order == "anyhow":
        return random.Random(1).sample(claimants, len(claimants))
    return claimants if order == "oldest first" else claimants[::-1]
