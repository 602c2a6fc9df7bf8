"""The judgement of run.py's output: intended differences are counted, all others are failures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.guest.differences import Judge, summary

LOCAL, REMOTE = "10.244.0.5|80", "10.244.1.5|80"
NOBODY = {"ready": False, "serving": True, "terminating": False}


def answer(*endpoints: str, source: str = "10.244.0.10") -> dict:
    return {"endpoints": {endpoint: [source] for endpoint in endpoints}}


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    labels = {"kubernetes.io/service-name": "empty"}
    slices = [{"addressType": "IPv4", "metadata": {"labels": labels}, "endpoints": [{"conditions": NOBODY}]}]
    slices.append({"addressType": "IPv6", "metadata": {"labels": labels}, "endpoints": [{}]})
    labels = {"kubernetes.io/service-name": "local"}
    slices.append({"addressType": "IPv4", "metadata": {"labels": labels}, "endpoints": [NOBODY, {}]})
    services = [
        {"metadata": {"name": n}, "spec": {"externalTrafficPolicy": n.title()}} for n in ("local", "cluster", "empty")
    ]
    fronts = [("203.0.113.1", 80), ("10.96.0.1", 80), ("10.96.0.2", 80), ("10.96.0.2", 80)]
    probes = [{"proto": "tcp", "dst": address, "port": port} for address, port in fronts]
    step = {
        "objects": {"services": services, "endpointslices": slices},
        "probes": [{"dst": "203.0.113.1", "port": 30100}, *probes],
        "expected": {"iptables": [{"code": 200}, *[answer(LOCAL, REMOTE)] * len(probes)]},
    }
    for seed, config in ((1, {}), (2, {"nodePortAddresses": ["primary"]})):
        case = {"config": config, "steps": [step]}
        (tmp_path / f"{seed:04d}.json").write_text(json.dumps(case))
    return tmp_path


def printed(probe: str, expected: object, saw: object) -> list[str]:
    return [f"  seed {probe}", f"      expected {json.dumps(expected)}", f"      saw      {json.dumps(saw)}"]


@pytest.mark.parametrize(
    ("probe", "expected", "saw", "reason"),
    [
        ("1 step 0: nodeport-lo local:p from host to tcp 127.0.0.1:30000", answer(LOCAL), "refused", "loopback"),
        ("1 step 0: nodeport-lo local:p from host to tcp 127.0.0.1:30000", "dropped", answer(LOCAL), ""),
        ("1 step 0: lb local:p from pod to tcp 203.0.113.1:80", answer(LOCAL, REMOTE), answer(LOCAL), "policy Local"),
        ("1 step 0: lb local:p from ext to tcp 203.0.113.1:80", answer(LOCAL, REMOTE), answer(LOCAL), ""),
        ("1 step 0: lb cluster:p from pod to tcp 203.0.113.1:80", answer(LOCAL, REMOTE), answer(LOCAL), ""),
        ("1 step 0: lb local:p from pod to tcp 203.0.113.1:80", answer(LOCAL, REMOTE), answer(REMOTE), ""),
        ("1 step 0: lb local:p from pod to tcp 203.0.113.1:80", answer(LOCAL), answer(LOCAL, source="10.244.0.1"), ""),
        ("1 step 0: cluster local:p from pod to tcp 10.96.0.1:80", answer(LOCAL, REMOTE), answer(LOCAL), ""),
        ("1 step 0: lb empty:p from host to udp 203.0.113.1:80", "dropped", "refused", "without endpoints"),
        ("1 step 0: lb empty:p from host to udp 2001:db8::1:80", "dropped", "refused", ""),
        ("1 step 0: lb empty:p from host to udp 203.0.113.1:80", "refused", "dropped", ""),
        ("1 step 0: nodeport2 local:p from ext to udp 172.31.0.2:30000", "dropped", "refused", ""),
        ("2 step 0: nodeport2 local:p from ext to udp 172.31.0.2:30000", "dropped", "refused", "nodePortAddresses"),
    ],
)
def test_differences_on_purpose(cases: Path, probe: str, expected: object, saw: object, reason: str) -> None:
    judge = Judge(cases)
    lines = printed(probe, expected, saw)
    shown = [judge.read(f"{line}\n") for line in lines]
    closing = judge.read("FAIL 0001.json 9 probes, 1 wrong\n")
    if reason:
        assert shown == ["", "", ""]
        assert closing == "ok   0001.json 9 probes, 0 wrong, 1 differ on purpose\n"
        assert [reason in each for each in judge.reasons] == [True]
    else:
        *reported, closing = "".join([*shown, closing]).splitlines(keepends=True)
        assert "".join(reported).splitlines() == lines
        assert closing == "FAIL 0001.json 9 probes, 1 wrong, 0 differ on purpose\n"
    assert judge.held == (["0001.json"] if reason else [])


def test_few_eligible_endpoints_use_sparse_turns(cases: Path) -> None:
    judge = Judge(cases)
    lines = printed("1 step 0: cluster cluster:p from pod to tcp 10.96.0.2:80", answer(LOCAL, REMOTE), answer(LOCAL))
    assert [judge.read(line) for line in lines] == ["", "", ""]
    assert judge.read("FAIL 0001.json 9 probes, 1 wrong\n") == "ok   0001.json 9 probes, 0 wrong, 1 differ on purpose\n"
    assert [judge.read(line) for line in lines * 2] == [""] * 6
    closing = judge.read("FAIL 0001.json 9 probes, 2 wrong\n").splitlines()
    assert closing == [*lines, *lines, "FAIL 0001.json 9 probes, 2 wrong, 0 differ on purpose"]


def test_all_cases_must_be_seen_and_trouble_is_wrong(cases: Path) -> None:
    judge = Judge(cases)
    assert judge.read("ok   0001.json 9 probes\n") == "ok   0001.json 9 probes, 0 wrong, 0 differ on purpose\n"
    assert summary([judge], "ipvs", 1)[1]
    assert not summary([judge], "ipvs", 2)[1]
    trouble = "  seed 2: no sync within 30 s (log: /tmp/proxy-2.log)\n"
    assert judge.read(trouble) == trouble
    assert judge.read("FAIL 0002.json 9 probes, 1 wrong\n").startswith("FAIL")
    assert not summary([judge], "ipvs", 2)[1]
    assert judge.read("Traceback\n") == "Traceback\n"
