"""The capabilities that the proxy keeps, for the needs of a node and a configuration."""

from __future__ import annotations

import pytest

from kubeproxy.api.cluster import Cluster, Trust, parse_server
from kubeproxy.api.credentials import Credentials, ExecConfig, ExecPlugin, TokenFile
from kubeproxy.config.options import Options
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.proc.capability import Capability
from kubeproxy.program import lifetime
from kubeproxy.program.lifetime import needed
from kubeproxy.report.metrics import ProxyMetrics
from kubeproxy.setup.sources import open_sources

ALWAYS = {Capability.NET_ADMIN, Capability.NET_BIND_SERVICE}
EXEC = ExecConfig(api_version="client.authentication.k8s.io/v1", command="login")


@pytest.mark.parametrize(
    ("needs", "more"),
    [
        (((), (), ""), set()),
        ((("ip6tables-legacy",), (), ""), {Capability.NET_RAW}),
        (((), ("/token",), ""), {Capability.DAC_READ_SEARCH}),
        (((), (), "/bin/login"), {Capability.DAC_READ_SEARCH}),
        ((("iptables",), ("/token",), "login"), {Capability.NET_RAW, Capability.DAC_READ_SEARCH}),
    ],
)
def test_kept_capabilities(needs, more):
    assert needed(*needs) == ALWAYS | more


def test_the_files_that_are_read_again_are_known(tmp_path):
    server = parse_server("http://10.0.0.1", "test")
    trust = Trust(ca_file="/ca", certificate_file="/crt", key_file="/key")
    assert Cluster(server, trust, TokenFile("/token")).files == ("/ca", "/crt", "/key", "/token")
    assert Cluster(server, Trust(ca_data=b"x"), Credentials()).files == ()
    assert (ExecPlugin(EXEC, "u").program, TokenFile("/token").program) == ("login", "")
    (tmp_path / "web.yaml").write_text("")
    folder = open_sources(Options(manifests=str(tmp_path)), "n", print, ProxyMetrics())
    assert folder.files() == [str(tmp_path), str(tmp_path / "web.yaml")]


@pytest.fixture
def steps(monkeypatch):
    """The dropped capabilities in order; this process keeps its own rights."""
    made = []
    monkeypatch.setattr(lifetime.xtables, "installed", lambda: ["iptables-nft", "ip6tables-legacy"])
    monkeypatch.setattr(lifetime, "beyond_permission", lambda paths: [path for path in paths if path == "/others"])
    monkeypatch.setattr(lifetime, "keep_only", made.append)
    monkeypatch.setattr(lifetime, "forbid_new_privileges", lambda: made.append("no new privileges"))
    return made


def test_all_of_it_is_given_up_at_once(steps):
    lifetime.give_up(["/config"], "")
    lifetime.give_up(["/config", "/others"], "")
    raw = ALWAYS | {Capability.NET_RAW}
    assert steps == [raw, "no new privileges", raw | {Capability.DAC_READ_SEARCH}, "no new privileges"]


def test_a_node_of_a_refusing_kernel_is_reported_and_served(steps, monkeypatch, caplog):
    def refuses(wanted):
        raise ApplyError("cannot set capabilities: Operation not permitted")

    monkeypatch.setattr(lifetime, "keep_only", refuses)
    lifetime.give_up([], "")
    assert [record.getMessage() for record in caplog.records] == [
        "Running with more rights than needed: cannot set capabilities: Operation not permitted"
    ]


@pytest.mark.parametrize(("mode", "gives"), [(0o755, False), (0o4755, True), (0o2755, True)])
def test_a_plugin_with_rights_of_its_own_keeps_them(steps, tmp_path, mode, gives):
    plugin = tmp_path / "login"
    plugin.touch()
    plugin.chmod(mode)
    lifetime.give_up([], str(plugin))
    assert (steps == []) is gives
