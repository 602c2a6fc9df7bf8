"""The table of Services that kube-proxy flows prints."""

import pytest

from kubeproxy.ask.flows.users import OTHERS, ClientUse, PortUse
from kubeproxy.commands.flows import _print_all


@pytest.mark.parametrize(
    ("ports", "busiest"),
    [
        ([{"10.0.0.2": (10, 0), "10.0.0.3": (12, 0)}, {"10.0.0.2": (10, 0)}], "10.0.0.2 (20)"),
        ([{"10.0.0.2": (0, 5)}, {"10.0.0.2": (0, 7), "10.0.0.3": (0, 9)}], "10.0.0.2 (12 closing)"),
        ([{OTHERS: (90, 0), "10.0.0.3": (1, 0)}], "10.0.0.3 (1)"),
    ],
)
def test_the_busiest_client_is_that_of_all_ports(capsys, ports, busiest):
    clients = [tuple(ClientUse(open_, closing, 0, at, "") for at, (open_, closing) in port.items()) for port in ports]
    _print_all([PortUse(1, 0, 0, "default/web", f"p{n}", "IPv4", 0.0, (), of) for n, of in enumerate(clients)])
    assert capsys.readouterr().out.splitlines()[1].endswith(busiest)
