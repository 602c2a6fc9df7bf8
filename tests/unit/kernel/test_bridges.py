"""Which bridges pass their packets to the rules, from fake files in /proc and /sys."""

from kubeproxy.kernel.route import Bridge, bridges
from kubeproxy.model.addresses import Family


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_bridges(tmp_path):
    sys, sysctls = tmp_path / "sys", tmp_path / "sysctls"
    assert bridges(sys, sysctls) == []
    write(sys / "cni0/bridge/nf_call_iptables", "0\n")
    write(sys / "docker0/bridge/nf_call_iptables", "1\n")
    write(sys / "eth0/address", "")
    assert bridges(sys, sysctls) == [Bridge("cni0", ()), Bridge("docker0", ())]  # without br_netfilter
    write(sysctls / "bridge-nf-call-iptables", "0\n")
    write(sysctls / "bridge-nf-call-ip6tables", "1\n")
    assert bridges(sys, sysctls) == [
        Bridge("cni0", (Family.IPV6,)),
        Bridge("docker0", (Family.IPV4, Family.IPV6)),
    ]
