"""The share of the event loop's time that clients of the HTTP servers get."""

import pytest

from kubeproxy.server.admission import BURST, LEAST, REMOTE_SHARE, SHARE, Budget


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def played(clients, seconds, cost, remote=True):
    """Return the seconds spent on answers to each client; each client sends its next request after an answer."""
    clock = Clock()
    budget = Budget(clock)
    end = clock.now + seconds
    due = {client: clock.now + budget.reserve(client, remote=remote) for client in clients}
    used = dict.fromkeys(clients, 0.0)
    while True:
        client = min(due, key=due.get)
        if due[client] >= end:
            return used
        clock.now = max(clock.now, due[client])
        clock.now += cost
        used[client] += cost
        budget.spend(client, cost, remote=remote)
        due[client] = clock.now + budget.reserve(client, remote=remote)


@pytest.mark.parametrize("cost", [LEAST / 2, LEAST, 0.001, 0.05])
def test_one_client_gets_its_share_and_a_burst(cost):
    used = played([b"a"], 100, cost)[b"a"]
    assert used <= (100 + BURST) * SHARE + 2 * cost
    assert cost < LEAST or used >= 100 * SHARE * 0.9 - cost


def test_all_remote_clients_together_have_a_share():
    used = played([b"%d" % n for n in range(100)], 100, 0.001)
    assert 100 * REMOTE_SHARE * 0.9 <= sum(used.values()) <= (100 + BURST) * REMOTE_SHARE + 100 * 0.002
    assert max(used.values()) < 2 * min(used.values())


def test_clients_of_the_node_wait_for_no_remote_client():
    clock = Clock()
    budget = Budget(clock)
    for n in range(1000):
        budget.reserve(b"%d" % n, remote=True)
        budget.spend(b"%d" % n, 0.1, remote=True)
    assert budget.reserve(b"pod", remote=True) > 10
    assert budget.reserve(b"kubelet", remote=False) == 0


def test_an_idle_client_is_forgotten():
    clock = Clock()
    budget = Budget(clock)
    for n in range(20_000):
        budget.reserve(b"%d" % n, remote=True)
        clock.now += BURST
    assert len(budget._free_at) < 10_000
