"""The soak: its verdicts, its changes of a cluster, and a few seconds of a real one."""

import json
import subprocess
import sys
from collections import Counter

import pytest

from bench import objects
from bench.report import ROOT
from prove.soak import cluster, verdict


def sampled(**last):
    """Return samples of an hour, constant except for these figures in the last ten minutes."""
    healthy = {"rss": 100.0, "descriptors": 20.0, "threads": 4.0, "parts": 1000.0, "lag": 2.0, "cpu": 0.8}
    return [healthy] * 300 + [healthy | last] * 60


def test_a_flat_hour_is_fine():
    assert all(line.flat for line in verdict.lines(sampled(), beside=False))
    assert all(line.flat for line in verdict.lines(sampled(rss=104.9, parts=900.0), beside=False))


@pytest.mark.parametrize("name", ["rss", "descriptors", "parts", "lag", "cpu"])
def test_a_growing_figure_is_found(name):
    grown = {name: sampled()[0][name] * 1.06}
    assert [line.name for line in verdict.lines(sampled(**grown), beside=False) if not line.flat] == [name]


def test_a_pool_of_threads_that_fills_is_no_growth_and_more_threads_are():
    full = verdict.KINDS["threads"].bound
    assert all(line.flat for line in verdict.lines(sampled(threads=full), beside=False))
    grown = verdict.lines(sampled(threads=full + 1), beside=False)
    assert [line.name for line in grown if not line.flat] == ["threads"]


def test_figures_that_other_work_increases_are_not_judged():
    lines = {line.name: line for line in verdict.lines(sampled(lag=20.0, rss=120.0), beside=True)}
    assert lines["lag"].flat
    assert not lines["rss"].flat
    assert str(lines["rss"]) == "FAIL rss: 100.00 to 120.00 MB (+20.0%)"


def test_warming_up_is_no_growth():
    cold = [sampled()[0] | {"rss": 60.0}] * 60
    assert all(line.flat for line in verdict.lines(cold + sampled()[60:], beside=False))


def test_too_few_samples_are_no_verdict():
    with pytest.raises(ValueError, match="too few"):
        verdict.lines(sampled()[:5], beside=False)


def test_the_cluster_changes_all_the_time_and_does_not_grow():
    made = cluster.Cluster(objects.parse_size("200x10"), seed=3)
    beginning = list(made.beginning())
    assert Counter(write.resource for write in beginning) == {"services": 202, "endpointslices": 202}
    there = {(write.resource, write.key): write.body for write in beginning}
    kinds = Counter()
    for _ in range(20_000):
        for write in made.change("2026-01-01T00:00:00.000000+00:00"):
            before = there.pop((write.resource, write.key), "")
            assert write.body != before
            kinds[write.resource, bool(before), bool(write.body)] += 1
            if write.body:
                there[write.resource, write.key] = write.body
    services, endpoints = made.counts
    assert 200 <= services <= 204
    assert endpoints / services == pytest.approx(10, rel=0.1)
    assert {(resource, True, False) for resource in ("services", "endpointslices")} <= kinds.keys()
    for (resource, _), body in there.items():
        if resource == "endpointslices":
            addresses = [address for one in json.loads(body)["endpoints"] for address in one["addresses"]]
            assert len(set(addresses)) == len(addresses) <= cluster.MOST
            number = int(json.loads(body)["metadata"]["labels"]["app"].rpartition("-")[2])
            packed = [bytes(map(int, address.split("."))) for address in addresses]
            assert {cluster.owner(address) for address in packed} == {number}


@pytest.mark.slow("a soak")
@pytest.mark.long(45)
@pytest.mark.parametrize(
    ("mode", "times"),
    [("nftables", "--rate 40 --minutes 0.12 --every 0.6"), ("ipvs", "--rate 2 --minutes 0.6 --every 3")],
)
def test_a_few_seconds(tmp_path, mode, times):
    given = f"--mode {mode} --size 60x10 {times} --beside --out"
    command = [sys.executable, "-m", "prove.soak", *given.split(), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=100)
    written = json.loads((tmp_path / f"soak-{mode}.json").read_text())
    assert (done.returncode, written["wrong"]) == (0, []), done.stdout + done.stderr
    assert "ok   descriptors" in done.stdout
    assert "<svg" in (tmp_path / f"soak-{mode}.svg").read_text()
    assert len(written["samples"]) == 12
    assert min(written["asked"][kind] for kind in ("new", "lasting", "udp")) > 0
    assert all(sample["parts"] > 600 and sample["lag"] > 0 and sample["cpu"] > 0 for sample in written["samples"][1:])
