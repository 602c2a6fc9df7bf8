"""Network namespaces of one Kubernetes node and its neighbours. Needs root, iproute2, veth and bridges.

    ext  (192.168.100.1)──eth0─┐                ┌─cbr0── pods    (10.244.0.101-120, answer on any port of PORTS)
                               ├── node (SUT) ──┤
    remote (10.244.1.0/24) ─r0─┘                └─cbr0── client  (10.244.0.10)

The proxy under test runs in `node`. All other namespaces only send probes or answer them.
"""

import shlex
import subprocess

NODE, EXT, PODS, CLIENT, REMOTE = (f"cf-{n}" for n in ("node", "ext", "pods", "client", "remote"))
NODE_NAME = "node-a"
NODE_IP, NODE_IP6 = "192.168.100.2", "fd00:100::2"
NODE_IP_2 = "172.31.0.2"  # a second node address, not the primary one
EXT_IP, EXT_IP_2, EXT_IP6 = "192.168.100.1", "192.168.100.50", "fd00:100::1"
CLUSTER_CIDR, CLUSTER_CIDR6 = "10.244.0.0/16", "fd00:244::/32"
CLIENT_IP, CLIENT_IP6 = "10.244.0.10", "fd00:244::10"
LOCAL_POD_IPS = [f"10.244.0.{i}" for i in range(101, 121)]
LOCAL_POD_IPS6 = [f"fd00:244::{i}" for i in range(101, 121)]
VIP_ROUTES = ["10.96.0.0/12", "198.51.100.0/24", "203.0.113.0/24", "172.31.0.0/24"]
VIP_ROUTES6 = ["fd00:10:96::/112", "2001:db8:1::/64", "2001:db8:2::/64"]
PORTS = (8080, 9090, 5353)

EACH_SYSCTL = ["net.ipv6.conf.all.accept_dad=0", "net.ipv6.conf.default.accept_dad=0"]
NODE_SYSCTL = [
    *("net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"),
    *("net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.default.rp_filter=0"),
    *("net.ipv4.icmp_ratelimit=0", "net.ipv6.icmp.ratelimit=0"),
]
REMOTE_SYSCTL = ["net.ipv6.ip_nonlocal_bind=1", "net.ipv4.ip_nonlocal_bind=1"]


def run(command: str, *, must: bool = True) -> str:
    """Run a command and return its output. Raises RuntimeError if the command fails, unless `must` is false."""
    done = subprocess.run(shlex.split(command), text=True, capture_output=True, check=False)
    if must and done.returncode:
        raise RuntimeError(f"{command}\n{done.stderr}")
    return done.stdout


def ip(namespace: str, *commands: str, must: bool = True) -> None:
    """Run ip in a namespace, once for each command."""
    for command in commands:
        run(f"ip -n {namespace} {command}", must=must)


def sysctl(namespace: str, settings: list[str]) -> None:
    """Set values in a namespace."""
    run(f"ip netns exec {namespace} sysctl -qw {' '.join(settings)}")


def up() -> None:
    """Create all namespaces, after removing those of an earlier run."""
    down()
    for namespace in (NODE, EXT, PODS, CLIENT, REMOTE):
        run(f"ip netns add {namespace}")
        ip(namespace, "link set lo up")
        sysctl(namespace, EACH_SYSCTL)
    sysctl(NODE, NODE_SYSCTL)
    _links()
    for namespace, device in ((NODE, "eth0"), (NODE, "r0"), (NODE, "cbr0"), (EXT, "eth0"), (REMOTE, "eth0")):
        ip(namespace, f"link set {device} up")
    _routes()
    # Pods of the other node: the namespace answers on every address of their range.
    ip(REMOTE, *(f"route add local {net} dev lo" for net in ("10.244.1.0/24", "10.244.2.0/24")))
    ip(REMOTE, *(f"-6 route add local {net} dev lo" for net in ("fd00:244:1::/64", "fd00:244:2::/64")))
    sysctl(REMOTE, REMOTE_SYSCTL)


def _links() -> None:
    run(f"ip link add eth0 netns {NODE} type veth peer name eth0 netns {EXT}")
    ip(NODE, *(f"addr add {a} dev eth0" for a in (f"{NODE_IP}/24", f"{NODE_IP_2}/24", f"{NODE_IP6}/64 nodad")))
    ip(EXT, *(f"addr add {a} dev eth0" for a in (f"{EXT_IP}/24", f"{EXT_IP_2}/24", f"{EXT_IP6}/64 nodad")))
    run(f"ip link add r0 netns {NODE} type veth peer name eth0 netns {REMOTE}")
    ip(NODE, "addr add 192.168.102.1/24 dev r0", "addr add fd00:102::1/64 dev r0 nodad")
    ip(REMOTE, "addr add 192.168.102.2/24 dev eth0", "addr add fd00:102::2/64 dev eth0 nodad")
    ip(NODE, "link add cbr0 type bridge", "addr add 10.244.0.1/24 dev cbr0", "addr add fd00:244::1/64 dev cbr0 nodad")
    for namespace, port in ((PODS, "vpods"), (CLIENT, "vclient")):
        run(f"ip link add {port} netns {NODE} type veth peer name eth0 netns {namespace}")
        ip(NODE, f"link set {port} master cbr0 up", f"link set {port} type bridge_slave hairpin on")
        ip(namespace, "link set eth0 up")
    ip(PODS, *(f"addr add {a}/24 dev eth0" for a in LOCAL_POD_IPS))
    ip(PODS, *(f"addr add {a}/64 dev eth0 nodad" for a in LOCAL_POD_IPS6))
    ip(CLIENT, f"addr add {CLIENT_IP}/24 dev eth0", f"addr add {CLIENT_IP6}/64 dev eth0 nodad")


def _routes() -> None:
    ip(NODE, "route add 10.244.0.0/16 via 192.168.102.2", f"-6 route add {CLUSTER_CIDR6} via fd00:102::2")
    ip(NODE, f"route add default via {EXT_IP}", f"-6 route add default via {EXT_IP6}")
    for namespace, gateway, gateway6 in (
        (PODS, "10.244.0.1", "fd00:244::1"),
        (CLIENT, "10.244.0.1", "fd00:244::1"),
        (REMOTE, "192.168.102.1", "fd00:102::1"),
        (EXT, NODE_IP, NODE_IP6),
    ):
        # Outside, 172.31.0.0/24 is also on the link, but the route through the node takes precedence.
        ip(namespace, *(f"route add {net} via {gateway}" for net in VIP_ROUTES), must=False)
        ip(namespace, *(f"-6 route add {net} via {gateway6}" for net in VIP_ROUTES6))
        if namespace != EXT:
            ip(namespace, f"route add default via {gateway}", f"-6 route add default via {gateway6}")
        else:
            ip(EXT, f"route add 10.244.0.0/16 via {gateway}", f"-6 route add {CLUSTER_CIDR6} via {gateway6}")


def down() -> None:
    """Remove all namespaces and end their processes."""
    for namespace in (NODE, EXT, PODS, CLIENT, REMOTE):
        if pids := run(f"ip netns pids {namespace}", must=False).split():
            run(f"kill -9 {' '.join(pids)}", must=False)
        run(f"ip netns del {namespace}", must=False)
