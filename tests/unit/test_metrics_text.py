"""The registry's text form, and the names, labels and buckets of all metrics."""

from __future__ import annotations

import asyncio
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.backends.iptables import metrics as iptables
from kubeproxy.registry import MetricRegistry, number_text
from kubeproxy.report.metrics import PROGRAMMING_BUCKETS, ProxyMetrics, conntrack
from kubeproxy.setup import modes


def test_each_kind_is_written_as_prometheus_expects() -> None:
    registry = MetricRegistry()
    registry.counter("b_total", "Counts.\nTwo \\ lines").labels().inc(3)
    gauge = registry.gauge("a", "Help", "z", "path")
    gauge.labels("1", 'C:\\"x"\n').set(-0.5)
    histogram = registry.histogram("c_seconds", "Time", (0.5, 1), "ip_family").labels("IPv4")
    for value in (0.5, 0.7, 5):
        histogram.observe(value)
    assert registry.render().decode() == (
        "# HELP a Help\n"
        "# TYPE a gauge\n"
        'a{path="C:\\\\\\"x\\"\\n",z="1"} -0.5\n'
        "# HELP b_total Counts.\\nTwo \\\\ lines\n"
        "# TYPE b_total counter\n"
        "b_total 3\n"
        "# HELP c_seconds Time\n"
        "# TYPE c_seconds histogram\n"
        'c_seconds_bucket{ip_family="IPv4",le="0.5"} 1\n'
        'c_seconds_bucket{ip_family="IPv4",le="1"} 2\n'
        'c_seconds_bucket{ip_family="IPv4",le="+Inf"} 3\n'
        'c_seconds_sum{ip_family="IPv4"} 6.2\n'
        'c_seconds_count{ip_family="IPv4"} 3\n'
    )


def test_a_family_without_series_is_not_shown() -> None:
    registry = MetricRegistry()
    family = registry.counter("a_total", "Help", "code")
    assert registry.render() == b""
    family.labels("200").inc()
    family.clear()
    assert registry.render() == b""


def test_wrong_use_is_an_error() -> None:
    registry = MetricRegistry()
    family = registry.counter("a_total", "Help", "code")
    with pytest.raises(ValueError, match="a_total has the labels code, got 0 values"):
        family.labels()
    with pytest.raises(ValueError, match="cannot go down"):
        family.labels("1").inc(-1)
    with pytest.raises(ValueError, match="exists already"):
        registry.gauge("a_total", "Help")


def test_a_counter_takes_over_a_total_of_the_kernel() -> None:
    counter = MetricRegistry().counter("a_total", "Help").labels()
    counter.set(5)
    counter.set(3)
    assert counter.value == 5


# The results of Go's strconv.FormatFloat(v, 'g', -1, 64).
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1, "1"),
        (-1.5, "-1.5"),
        (0.001, "0.001"),
        (16.384, "16.384"),
        (0.0001, "0.0001"),
        (0.00001, "1e-05"),
        (0.0000125, "1.25e-05"),
        (999999, "999999"),
        (1000000, "1e+06"),
        (1048576, "1.048576e+06"),
        (16777216, "1.6777216e+07"),
        (1763701447.123456, "1.763701447123456e+09"),
        (-2.5e300, "-2.5e+300"),
        (1e21, "1e+21"),
        (2.0**-24, "5.960464477539063e-08"),
        (math.inf, "+Inf"),
        (-math.inf, "-Inf"),
        (math.nan, "NaN"),
    ],
)
def test_numbers_are_written_as_go_writes_them(value: float, text: str) -> None:
    assert number_text(value) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_survive(value: float) -> None:
    assert float(number_text(value)) == value


# Name, kind and labels of kube-proxy v1.36 (docs/reference.md "Metrics"; pkg/proxy/metrics).
FAMILY = {"ip_family"}
KUBE_PROXY = {
    "kubeproxy_sync_proxy_rules_duration_seconds": ("histogram", FAMILY),
    "kubeproxy_sync_full_proxy_rules_duration_seconds": ("histogram", FAMILY),
    "kubeproxy_sync_partial_proxy_rules_duration_seconds": ("histogram", FAMILY),
    "kubeproxy_network_programming_duration_seconds": ("histogram", FAMILY),
    "kubeproxy_conntrack_reconciler_sync_duration_seconds": ("histogram", FAMILY),
    "kubeproxy_sync_proxy_rules_last_timestamp_seconds": ("gauge", FAMILY),
    "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds": ("gauge", FAMILY),
    "kubeproxy_sync_proxy_rules_endpoint_changes_pending": ("gauge", set()),
    "kubeproxy_sync_proxy_rules_service_changes_pending": ("gauge", set()),
    "kubeproxy_sync_proxy_rules_iptables_total": ("gauge", {"table", "ip_family"}),
    "kubeproxy_sync_proxy_rules_iptables_last": ("gauge", {"table", "ip_family"}),
    "kubeproxy_sync_proxy_rules_no_local_endpoints_total": ("gauge", {"traffic_policy", "ip_family"}),
    "kubeproxy_sync_proxy_rules_endpoint_changes_total": ("counter", set()),
    "kubeproxy_sync_proxy_rules_service_changes_total": ("counter", set()),
    "kubeproxy_sync_proxy_rules_iptables_restore_failures_total": ("counter", FAMILY),
    "kubeproxy_sync_proxy_rules_iptables_partial_restore_failures_total": ("counter", FAMILY),
    "kubeproxy_sync_proxy_rules_nftables_sync_failures_total": ("counter", FAMILY),
    "kubeproxy_conntrack_reconciler_deleted_entries_total": ("counter", FAMILY),
    "kubeproxy_proxy_healthz_total": ("counter", {"code"}),
    "kubeproxy_proxy_livez_total": ("counter", {"code"}),
    "kubeproxy_iptables_ct_state_invalid_dropped_packets_total": ("counter", set()),
    "kubeproxy_iptables_localhost_nodeports_accepted_packets_total": ("counter", set()),
    "kubeproxy_source_staleness_seconds": ("gauge", {"resource"}),
    "kubeproxy_ready": ("gauge", set()),
    "kubeproxy_repairs_total": ("counter", set()),
    "kubeproxy_config_invalid": ("gauge", set()),
    "kubeproxy_services": ("gauge", FAMILY),
    "kubeproxy_endpoints": ("gauge", FAMILY),
    "kubeproxy_services_without_endpoints": ("gauge", FAMILY),
    "kubeproxy_ejected_endpoints": ("gauge", FAMILY),
    "kubeproxy_endpoint_ejections_total": ("counter", FAMILY),
    "kubeproxy_certificate_expiration_timestamp_seconds": ("gauge", {"certificate"}),
    "kubeproxy_conntrack_entries": ("gauge", set()),
    "kubeproxy_conntrack_entries_limit": ("gauge", set()),
    "kubeproxy_sync_errors_total": ("counter", FAMILY),
    "kubeproxy_iptables_lock_wait_seconds_total": ("counter", FAMILY),
    "registered_metrics_total": ("counter", {"deprecated_version", "stability_level"}),
    "disabled_metrics_total": ("counter", set()),
    "hidden_metrics_total": ("counter", set()),
    "rest_client_request_duration_seconds": ("histogram", {"verb", "host"}),
    "rest_client_request_size_bytes": ("histogram", {"verb", "host"}),
    "rest_client_response_size_bytes": ("histogram", {"verb", "host"}),
    "rest_client_rate_limiter_duration_seconds": ("histogram", {"verb", "host"}),
    "rest_client_requests_total": ("counter", {"code", "method", "host"}),
    "kubernetes_build_info": (
        "gauge",
        {"major", "minor", "git_version", "git_commit", "git_tree_state", "build_date"}
        | {"go_version", "compiler", "platform"},
    ),
    "kubernetes_feature_enabled": ("gauge", {"name", "stage"}),
    **{f"process_{name}": ("gauge", set()) for name in (
        "max_fds", "open_fds", "resident_memory_bytes", "start_time_seconds",
        "virtual_memory_bytes", "virtual_memory_max_bytes",
    )},
    "process_cpu_seconds_total": ("counter", set()),
    "process_network_receive_bytes_total": ("counter", set()),
    "process_network_transmit_bytes_total": ("counter", set()),
    "go_goroutines": ("gauge", set()),
    "go_threads": ("gauge", set()),
}  # fmt: skip


def conntrack_of(metrics: ProxyMetrics, folder: Path) -> None:
    """Make a folder report how full connection tracking is, instead of the kernel, which may not track connections."""
    (folder / "nf_conntrack_count").write_text("17\n")
    (folder / "nf_conntrack_max").write_text("262144\n")
    metrics.registry.collect(lambda: conntrack(folder))


def test_the_metrics_of_connection_tracking(tmp_path: Path) -> None:
    metrics = ProxyMetrics()
    conntrack_of(metrics, tmp_path)
    text = metrics.render().decode()
    assert "\nkubeproxy_conntrack_entries 17\n" in text
    assert "\nkubeproxy_conntrack_entries_limit 262144\n" in text
    assert list(conntrack(tmp_path / "none")) == []


def test_refusals_are_there_from_the_start() -> None:
    metrics = ProxyMetrics()
    metrics.count_refusals("memory_refusals_total", "Help")
    metrics.begin(["IPv4"])
    text = metrics.render().decode()
    assert '\nkubeproxy_sync_errors_total{ip_family="IPv4"} 0\n' in text
    assert '\nmemory_refusals_total{ip_family="IPv4"} 0\n' in text
    assert "IPv6" not in text


def test_metrics_are_counted_by_their_stability_for_any_registrant() -> None:
    metrics = ProxyMetrics()

    def alpha() -> int:
        text = metrics.render().decode()
        return int(re.search(r'registered_metrics_total{deprecated_version="",stability_level="ALPHA"} (\d+)', text)[1])

    before = alpha()
    metrics.registry.counter("of_a_mode_total", "[ALPHA] Help")
    metrics.registry.counter("ours_total", "Help")
    assert alpha() == before + 1


def test_certificates_are_those_in_use() -> None:
    metrics = ProxyMetrics()
    metrics.own.show_certificates({"client": 4e9, "authority": 5e9})
    metrics.own.show_certificates({"authority": 6e9})
    text = metrics.render().decode()
    assert 'kubeproxy_certificate_expiration_timestamp_seconds{certificate="authority"} 6e+09\n' in text
    assert "client" not in re.findall(r'certificate="(\w+)"', text)


def test_all_metrics_have_their_names_and_labels(tmp_path: Path) -> None:
    metrics = ProxyMetrics()
    conntrack_of(metrics, tmp_path)
    iptables.Metrics(metrics.registry, ())
    for mode in modes.every():
        if mode.refusals:
            metrics.count_refusals(*mode.refusals)
    for family in metrics.registry._families.values():
        if not family._children:
            family.labels(*family._names)
    text = metrics.render().decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    labels: dict[str, set[str]] = {name: set() for name in kinds}
    for name, pairs in re.findall(r"^([a-z_]+)(?:{(.*)})? \S+$", text, re.M):
        base = name if name in kinds else re.sub(r"_(bucket|sum|count)$", "", name)
        labels[base] |= set(re.findall(r'(?:^|,)(\w+)="', pairs)) - {"le"}
    assert {name: (kind, labels[name]) for name, kind in kinds.items()} == KUBE_PROXY


def test_metrics_without_labels_exist_from_the_start_except_those_of_iptables() -> None:
    text = ProxyMetrics().render().decode()
    assert "\nkubeproxy_sync_proxy_rules_service_changes_total 0\n" in text
    assert "iptables" not in text


def test_buckets_are_those_of_kube_proxy() -> None:
    metrics = ProxyMetrics()
    metrics.sync_duration.labels("IPv4").observe(0.003)
    bounds = re.findall(r'sync_proxy_rules_duration_seconds_bucket{.*le="(.*?)"}', metrics.render().decode())
    assert bounds == [
        *("0.001", "0.002", "0.004", "0.008", "0.016", "0.032", "0.064", "0.128", "0.256", "0.512"),
        *("1.024", "2.048", "4.096", "8.192", "16.384", "+Inf"),
    ]
    assert len(PROGRAMMING_BUCKETS) == 1 + 2 + 59 + 12 + 7
    assert list(PROGRAMMING_BUCKETS) == sorted(set(PROGRAMMING_BUCKETS))


def test_concurrent_tasks_are_counted() -> None:
    async def ask() -> str:
        waiting = [asyncio.create_task(asyncio.sleep(60)) for _ in range(3)]
        text = ProxyMetrics().render().decode()
        for task in waiting:
            task.cancel()
        return text

    text = asyncio.run(ask())
    threads = int(re.search(r"^go_threads (\d+)$", text, re.M)[1])
    assert f"\ngo_goroutines {threads + 3 + 1}\n" in text


def test_feature_gates_are_shown_with_their_stage() -> None:
    metrics = ProxyMetrics()
    metrics.show_features([("AllAlpha", "ALPHA", False), ("NFTablesProxyMode", "", True)])
    text = metrics.render().decode()
    assert '\nkubernetes_feature_enabled{name="AllAlpha",stage="ALPHA"} 0\n' in text
    assert '\nkubernetes_feature_enabled{name="NFTablesProxyMode",stage=""} 1\n' in text


def test_staleness_is_computed_at_each_scrape() -> None:
    metrics, ages = ProxyMetrics(), iter((7.5, 0.0))
    metrics.own.staleness.labels("services").follow(lambda: next(ages))
    for shown in ("7.5", "0"):
        assert f'kubeproxy_source_staleness_seconds{{resource="services"}} {shown}\n' in metrics.render().decode()
