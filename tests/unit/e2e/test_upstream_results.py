from __future__ import annotations

from pathlib import Path

import pytest

from e2e.binaries import PACKAGES, build_command, build_environment, programs
from e2e.errors import E2EError
from e2e.images import IMAGES, tags
from e2e.page import PAGE, explained, render
from e2e.results import Result, Verdict, read, verdicts, write
from e2e.run import progress

SERVE = "[sig-network] Services should serve endpoints"
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


def result(proxy: str, mode: str, **tests: str) -> Result:
    names = {"serve": SERVE, "internet": INTERNET}
    found = {names[key]: Verdict(state, "timed out") for key, state in tests.items()}
    return Result(proxy, mode, "2026-11-26", "abc1234", {"kubernetes": "1.36"}, 600, False, found)


def test_a_report_gives_the_tests_that_ran_or_skipped_themselves():
    report = [
        {
            "SpecReports": [
                spec("serves", "passed"),
                spec("fails", "failed", "\ntimed out in services-1234x now\nmore"),
                spec("is filtered", "skipped"),
                spec("lacks nodes", "skipped", "requires 3 nodes"),
                spec("", "passed", leaf="BeforeSuite"),
            ]
        }
    ]
    assert verdicts(report) == {
        "[sig-network] Services serves": Verdict("passed"),
        "[sig-network] Services fails": Verdict("failed", "timed out in services-* now"),
        "[sig-network] Services lacks nodes": Verdict("skipped", "requires 3 nodes"),
    }
    assert verdicts([{"SpecReports": None}]) == {}


def test_progress_counts_what_a_log_has_finished():
    log = """------------------------------
• [6.212 seconds]
[sig-network] Services should serve
• [FAILED] [301.002 seconds]
S [SKIPPED] [0.000 seconds]
  • [not at a line's begin]
"""
    assert progress(log) == (2, 1)
    assert progress("") == (0, 0)


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
    assert "| should provide Internet connection |  | **failed** |" in page


def test_the_environment_is_a_reason_only_where_the_go_kube_proxy_fails_too():
    assert explained(INTERNET) == "the cluster has no Internet"
    assert explained(SERVE) == ""
    alone = render([result("ours", "nftables", internet="failed"), result("go", "nftables", internet="passed")])
    assert "the cluster has no Internet" not in alone
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
