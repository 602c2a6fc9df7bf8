"""python -m lab up | down | status | demo: a cluster for experiments with kubectl."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import time

from kubeproxy.errors import KubeProxyError
from lab.apiserver.server import ServerConfig
from lab.cluster import ClusterConfig, LabCluster
from lab.demo import command as demo
from lab.netns import names
from lab.objects import whoami_rc
from lab.runfolder import RUN, clusters, owner_pid, remove_leftovers, run_folder
from lab.topology import PREFIX

START_WITHIN = 15.0
STOP_WITHIN = 15.0


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = _parser().parse_args(argv)
    try:
        if args.command == "up":
            return _up_detached(args) if args.detach else asyncio.run(_up(args))
        if args.command == "demo":
            return demo.play(args)
        return _down(args.id) if args.command == "down" else _status()
    except KubeProxyError as e:
        print(f"lab: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lab", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="bring a cluster up and keep it until Ctrl-C")
    up.add_argument("--id", default="dev", help="id of the cluster (default: dev); several clusters can run")
    up.add_argument("--detach", action="store_true", help="return when the cluster is up, and leave it running")
    up.add_argument("--proxy", action="store_true", help="run kube-proxy on node-a")
    up.add_argument("--pods", type=int, default=0, metavar="N", help="start a ReplicationController of N whoami pods")
    up.add_argument("--port", type=int, default=0, help="port of the API server on 127.0.0.1 (default: a free one)")
    up.add_argument("--tls", action="store_true", help="serve HTTPS with a new certificate authority")
    up.add_argument("--token", default="", help="the bearer token that the API server requires of clients")
    down = commands.add_parser("down", help="remove a cluster, or the remains of a killed cluster")
    down.add_argument("--id", default="dev")
    commands.add_parser("status", help="list the clusters on this machine")
    demo.add_arguments(
        commands.add_parser("demo", help="run the whoami example with a real kube-proxy, and check each answer")
    )
    return parser


def _config(args: argparse.Namespace) -> ClusterConfig:
    server = ServerConfig(tokens={args.token: "admin"} if args.token else {})
    return ClusterConfig(cluster_id=args.id, server=server, tls=args.tls, host_port=args.port)


async def _up(args: argparse.Namespace) -> int:
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with LabCluster(_config(args)) as cluster:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, over.set)
        if args.pods:
            cluster.create(whoami_rc("whoami", args.pods))
            await cluster.pods_ready("app=whoami", args.pods, timeout=30)
        page = ""
        if args.proxy:
            await cluster.start_proxy()
            page = await cluster.page()
            (cluster.folder / "page").write_text(page)
        (cluster.folder / "ready").touch()
        print(how_to_use(args.id, page), flush=True)
        await over.wait()
        print("taking the cluster down", flush=True)
    return 0


def how_to_use(cluster_id: str, page: str) -> str:
    """Return the next commands to type, and the URL of the proxy's page, if it has one."""
    kubeconfig = run_folder(cluster_id) / "kubeconfig"
    inside = f"ip netns exec {PREFIX}{cluster_id}"
    seen = f"  see it:      {page} in a browser\n" if page else ""
    return f"""lab {cluster_id} is up.
{seen}  use it:      export KUBECONFIG={kubeconfig}; kubectl get nodes,pods,svc -A -o wide
  on the node: {inside}-node-a nft list table ip kube-proxy
  outside:     {inside}-outside curl http://ADDRESS:PORT/
  stop it:     {sys.executable} -m lab down --id {cluster_id}"""


def _up_detached(args: argparse.Namespace) -> int:
    folder = run_folder(args.id)
    RUN.mkdir(mode=0o700, parents=True, exist_ok=True)
    log_file = RUN / f"{args.id}.log"
    given = [a for a in sys.argv[1:] if a != "--detach"]
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "lab", *given],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_WITHIN
    while not ((folder / "ready").exists() and owner_pid(folder) == process.pid):
        if process.poll() is not None or time.monotonic() > deadline:
            print(log_file.read_text(errors="replace").strip(), file=sys.stderr)
            return 1
        time.sleep(0.02)
    page = folder / "page"
    print(how_to_use(args.id, page.read_text() if page.exists() else ""))
    return 0


def _down(cluster_id: str) -> int:
    pid = owner_pid(run_folder(cluster_id))
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_WITHIN
        while owner_pid(run_folder(cluster_id)) is not None and time.monotonic() < deadline:
            time.sleep(0.02)
    (RUN / f"{cluster_id}.log").unlink(missing_ok=True)
    found = remove_leftovers(cluster_id) or pid is not None
    print(f"lab {cluster_id} is {'down' if found else 'not there: nothing to do'}")
    return 0


def _status() -> int:
    known = clusters()
    left = {n.removeprefix(PREFIX).partition("-")[0] for n in names(PREFIX)} - set(known)
    for cluster_id, pid in known.items():
        state = f"running, pid {pid}" if pid else f"killed; remove it: down --id {cluster_id}"
        print(f"{cluster_id}: {state}")
    for cluster_id in sorted(left):
        print(f"{cluster_id}: killed; remove it: down --id {cluster_id}")
    if not known and not left:
        print("no lab on this machine")
    return 0


if __name__ == "__main__":
    sys.exit(main())
