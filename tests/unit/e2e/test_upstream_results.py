from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from e2e.binaries import PACKAGES, build_command, build_environment, etcd, outdated_etcd, programs
from e2e.errors import E2EError
from e2e.images import IMAGES, tags
from e2e.page import PAGE, explained, render
from e2e.results import Result, Verdict, names_in, read, verdict, write
from e2e.run import begin, resume, run

SERVE = "[sig-network] Services should serve endpoints"
TARGET = "[sig-network] LoadBalancers should only target nodes with endpoints"
INTERNET = "[sig-network] Networking should provide Internet connection"


def spec(name: str, state: str, message: str = "", leaf: str = "It") -> dict:
    texts = ["[sig-network] Services"]
    return {
        "ContainerHierarchyTexts": texts,
        "LeafNodeType": leaf,
        "LeafNodeText": name,
        "State": state,
        "Failure": {"Message": message},
    }


def report(*specs: dict) -> list[dict]:
    return [{"SpecReports": list(specs)}]


def result(proxy: str, mode: str, pending: Sequence[str] = (), **tests: Verdict | str) -> Result:
    names = {"serve": SERVE, "internet": INTERNET}
    found = {
        names[key]: Verdict(each, "" if each == "passed" else "timed out") if isinstance(each, str) else each
        for key, each in tests.items()
    }
    versions = {"kubernetes": "1.36"}
    return Result(proxy, mode, ["2026-11-26"], ["abc1234"], versions, 600, "", found, list(pending), {"x": "why"})


def test_a_report_gives_the_verdict_of_the_test_that_ran():
    filtered = spec("is filtered", "skipped")
    assert verdict(report(filtered, spec("serves", "passed")), 7.6) == Verdict("passed", "", 8)
    failed = spec("fails", "failed", "\ntimed out in services-1234x now\nmore")
    assert verdict(report(failed, filtered)) == Verdict("failed", "timed out in services-* now")
    lacking = spec("lacks nodes", "skipped", "requires 3 nodes")
    assert verdict(report(filtered, lacking)) == Verdict("skipped", "requires 3 nodes")
    assert verdict(report(filtered)) is None
    assert verdict([{"SpecReports": None}]) is None


def test_a_failure_before_the_test_is_its_verdict():
    before = spec("", "failed", "no node is ready", leaf="SynchronizedBeforeSuite")
    assert verdict(report(before, spec("serves", "skipped"))) == Verdict(
        "failed", "SynchronizedBeforeSuite: no node is ready"
    )


def test_a_report_names_all_tests_of_a_dry_run():
    assert names_in(report(spec("serves", "skipped"), spec("", "passed", leaf="BeforeSuite"))) == [
        "[sig-network] Services serves"
    ]


def test_a_verdict_keeps_the_count_of_tries_and_the_first_failure():
    failed, passed = Verdict("failed", "timed out", 9), Verdict("passed", "", 3)
    assert passed.after(None) is passed
    assert passed.after(failed) == Verdict("passed", "", 3, 2, "timed out")
    assert failed.after(failed) == Verdict("failed", "timed out", 9, 2)
    assert passed.after(failed.after(failed)).tries == 3


class FakeRunner:
    """Rates tests by a table: the states of a test's attempts, in order."""

    def __init__(self, states: dict[str, list[str]]) -> None:
        self.states = states
        self.calls: list[tuple[list[str], int]] = []

    def play(self, names: Sequence[str], workers: int, judged: Callable[[str, Verdict], None]) -> None:
        self.calls.append((list(names), workers))
        for name in names:
            judged(name, Verdict(self.states[name].pop(0)))


def test_tests_run_side_by_side_then_serial_ones_and_failed_ones_alone():
    made = begin("ours", "nftables", "", ["a", "b", "c [Serial]"], {})
    runner = FakeRunner({"a": ["passed"], "b": ["failed", "passed"], "c [Serial]": ["failed", "failed"]})
    saved: list[int] = []
    run(runner, made, 4, lambda: saved.append(len(made.pending)))
    assert runner.calls == [(["a", "b"], 4), (["c [Serial]"], 1), (["b"], 1), (["c [Serial]"], 1)]
    assert saved == [2, 1, 0, 0, 0]
    assert made.failed == ["c [Serial]"]
    assert made.tests["b"].tries == 2


def test_a_resumed_run_keeps_passed_tests_and_repeats_failed_ones():
    earlier = begin("ours", "nftables", "", ["a", "b", "c", "gone"], {})
    earlier.tests = {"a": Verdict("passed"), "b": Verdict("failed", "no"), "gone": Verdict("failed")}
    made = resume(earlier, begin("ours", "nftables", "", ["a", "b", "c"], {"d": "why"}))
    assert (made.pending, made.left_out, set(made.tests)) == (["c"], {"d": "why"}, {"a", "b"})
    runner = FakeRunner({"b": ["passed"], "c": ["passed"]})
    run(runner, made, 2, lambda: None)
    assert runner.calls == [(["c"], 2), (["b"], 1)]
    with pytest.raises(E2EError, match=r"had FOCUS=\(none\), this one affinity"):
        resume(earlier, begin("ours", "nftables", "affinity", ["a"], {}))


def test_a_result_is_read_as_it_was_written(tmp_path):
    made = result("ours", "nftables", serve="passed", internet="failed")
    assert write(made, tmp_path / "results").name == "ours-nftables.json"
    assert read(tmp_path / "results") == [made]
    assert made.failed == [INTERNET]


def test_the_page_has_a_row_for_each_test_and_a_column_for_each_run():
    page = render(
        [result("go", "nftables", serve="passed", internet="failed"), result("ours", "nftables", serve="failed")]
    )
    assert "| test | ours nftables | Go nftables |" in page
    assert "| should serve endpoints | **failed** | passed |" in page
    assert "| should provide Internet connection | not run | **failed** |" in page
    assert "No run has been recorded: ours iptables, Go iptables." in page
    assert "| x | why |" in page


def test_the_page_lists_interrupted_tests_and_tests_that_pass_only_alone():
    second = Verdict("passed", "", 3, 2, "timed out")
    page = render([result("ours", "nftables", pending=[INTERNET], serve=second)])
    assert "**ours nftables was interrupted** after 1 of 2 tests." in page
    assert "| should serve endpoints | passed (2 tries) |" in page
    assert "| Services should serve endpoints | ours nftables | timed out |" in page


def test_the_environment_is_a_reason_only_where_the_go_kube_proxy_fails_too():
    assert explained(TARGET) == "asks an IPv6 health port of an IPv4 Service"
    assert explained(SERVE) == ""
    alone = render([result("ours", "nftables", internet="failed"), result("go", "nftables", internet="passed")])
    assert "| ours nftables | timed out |" in alone


def test_the_page_is_that_of_the_recorded_results():
    assert PAGE.read_text() == render(read()), "python -m e2e page"


def test_an_image_has_the_names_under_which_tests_ask_for_it():
    upstream = [
        "registry.k8s.io/e2e-test-images/agnhost:2.63.0",
        "registry.k8s.io/pause:3.10.2",
        "x.io/busybox:1.37.0-1",
    ]
    assert tags(IMAGES[0], upstream) == [upstream[0], upstream[2]]
    assert tags(IMAGES[1], upstream) == [upstream[1]]


def test_a_folder_of_binaries_must_have_all_of_them(tmp_path):
    with pytest.raises(E2EError, match=r"no kube-proxy, .*; name a Kubernetes source tree"):
        programs(tmp_path)
    for name in PACKAGES:
        (tmp_path / name).touch(mode=0o755)
    assert programs(tmp_path) == tmp_path


def test_a_source_tree_keeps_programs_in_a_folder_that_its_git_ignores(tmp_path):
    (tmp_path / "go.mod").touch()
    built = tmp_path / "_output/e2e"
    built.mkdir(parents=True)
    for name in PACKAGES:
        (built / name).touch(mode=0o755)
    assert programs(tmp_path) == built


def test_builds_are_static_and_use_the_vendor_folder(tmp_path):
    assert "GOPROXY" not in build_environment(tmp_path) or "GOPROXY" in __import__("os").environ
    (tmp_path / "vendor").mkdir()
    assert build_environment(tmp_path)["GOFLAGS"] == "-mod=vendor"
    assert build_command("e2e.test", Path("x"))[4:6] == ["test", "-c"]
    assert build_command("kubelet", Path("x"))[-1] == "./cmd/kubelet"


def test_etcd_is_that_of_the_folder_before_that_of_the_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    for folder in ("path", "programs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "path/etcd").touch(mode=0o755)
    assert etcd(tmp_path / "programs") == str(tmp_path / "path/etcd")
    (tmp_path / "programs/etcd").touch(mode=0o755)
    assert etcd(tmp_path / "programs") == str(tmp_path / "programs/etcd")


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("etcd Version: 3.4.23", "older than 3.4.31"),
        ("etcd Version: 3.4.31", ""),
        ("etcd Version: 3.5.12", "older than 3.5.13"),
        ("etcd Version: 3.5.16", ""),
        ("etcd Version: 3.6.0", ""),
        ("etcd Version: 3.3.25", "older than 3.5.13"),
        ("", "not a version"),
    ],
)
def test_an_etcd_without_progress_notifications_is_outdated(line, wrong):
    assert wrong in outdated_etcd(line)
    assert bool(wrong) == bool(outdated_etcd(line))
