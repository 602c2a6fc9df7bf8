"""kube-proxy as installed by an operator: the wheel in a separate environment, the objects of deploy/, the life of a
pod.

Without an image and a kubelet, this module implements their relevant parts: it mounts the files of the ConfigMap and of
the service account, starts the process with the user and the capabilities of its securityContext, and starts it again
when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import subprocess
import sys
import sysconfig
from email.parser import BytesParser
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, Self
from zipfile import ZipFile

import yaml

from kubeproxy.kernel.xtables import xtables
from lab.apiserver.authorization import Rbac
from lab.proxyprocess import Proxy
from lab.volumes import ServiceAccountVolume, Volume
from support import kustomize
from support.live import Live
from support.places import ROOT

Json = dict[str, Any]
CONFIG = """\
apiVersion: kubeproxy.config.k8s.io/v1alpha1
bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection:
  acceptContentTypes: ""
  burst: 0
  contentType: ""
  kubeconfig: /var/lib/kube-proxy/kubeconfig.conf
  qps: 0
clusterCIDR: 10.244.0.0/16
configSyncPeriod: 0s
conntrack: {maxPerCore: null, min: null, tcpBeLiberal: false, tcpCloseWaitTimeout: null, tcpEstablishedTimeout: null,
  udpStreamTimeout: 0s, udpTimeout: 0s}
detectLocal: {bridgeInterface: "", interfaceNamePrefix: ""}
detectLocalMode: ""
enableProfiling: false
healthzBindAddress: ""
hostnameOverride: ""
iptables: {localhostNodePorts: null, masqueradeAll: false, masqueradeBit: null, minSyncPeriod: 0s, syncPeriod: 0s}
ipvs: {excludeCIDRs: null, minSyncPeriod: 0s, scheduler: "", strictARP: false, syncPeriod: 0s, tcpFinTimeout: 0s,
  tcpTimeout: 0s, udpTimeout: 0s}
kind: KubeProxyConfiguration
logging: {flushFrequency: 0, options: {json: {infoBufferSize: "0"}, text: {infoBufferSize: "0"}}, verbosity: 0}
metricsBindAddress: ""
mode: ""
nftables: {masqueradeAll: false, masqueradeBit: null, minSyncPeriod: 0s, syncPeriod: 0s}
nodePortAddresses: null
oomScoreAdj: null
portRange: ""
showHiddenMetricsForVersion: ""
winkernel: {enableDSR: false, forwardHealthCheckVip: false, networkName: "", rootHnsEndpointName: "", sourceVip: ""}
"""
"""Return config.conf as kubeadm writes it: every field, most of them empty."""

KUBECONFIG = """\
apiVersion: v1
kind: Config
clusters:
- cluster:
    certificate-authority: MOUNT/ca.crt
    server: https://127.0.0.1:6443
  name: default
contexts:
- context:
    cluster: default
    namespace: default
    user: default
  name: default
current-context: default
users:
- name: default
  user:
    tokenFile: MOUNT/token
"""
"""Return kubeconfig.conf as kubeadm writes it; MOUNT is the mount point of the service account."""

RUNTIME = """\
touch /run/xtables.lock && mount --bind /run/xtables.lock /run/xtables.lock
mount --bind /proc/sys /proc/sys && mount -o remount,ro,bind /proc/sys
mount -o remount,ro,bind / && exec "$@"
"""
"""A container's view of files: only the lock file is writable, and no sysctl.

It needs the mount namespace of `ip netns`.
"""

USER = "system:serviceaccount:kube-system:kube-proxy-py"


def install(folder: Path) -> Path:
    """Build the wheel, install it and its declared dependencies into an empty environment; return the command.

    The dependencies are copied from this environment, which was installed from the lock file: no network is needed.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    _run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder / "dist"), str(ROOT))
    (wheel,) = (folder / "dist").iterdir()
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder / "env"))
    python = folder / "env/bin/python"
    _run(*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    library = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "env")}))
    for name in _needed(wheel):
        _copy(name, library)
    return folder / "env/bin/kube-proxy"


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"


def _needed(wheel: Path) -> list[str]:
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = BytesParser().parsebytes(archive.read(name))
    wanted = [line for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line]
    return [re.split(r"[<>=!~\[; ]", line)[0] for line in wanted]


def _copy(name: str, library: Path) -> None:
    found = distribution(name)
    for file in found.files or ():
        source = Path(str(found.locate_file(file)))
        if source.is_file() and ".." not in file.parts:
            (library / file.parent).mkdir(parents=True, exist_ok=True)
            shutil.copy(source, library / file)


def built(folder: str) -> list[Json]:
    """Return the objects of a folder of deploy/kustomize."""
    return kustomize.build(ROOT / "deploy/kustomize" / folder)


def rules() -> Rbac:
    """Return the RBAC rules of deploy/, in effect."""
    return Rbac(built("kubeadm"))


class Container:
    """The pod of a DaemonSet on node-a: mounts its files, runs its command, and restarts it when it ends.

    `exits` are the exit statuses of the command without a signal.
    """

    def __init__(self, live: Live, command: Path) -> None:
        self.exits: list[int] = []
        self._ends = 0
        self._live = live
        self._command = command
        self._folder = live.cluster.folder / "pod"
        self._life: asyncio.Task[None] | None = None
        self._objects = built("kubeadm")
        assert live.cluster.certificates is not None
        self.account = ServiceAccountVolume(
            self._folder / "account", live.cluster.server.tokens, USER, live.cluster.certificates.ca
        )
        self.config = Volume(self._folder / "config")
        self.configure({})
        # Another user's process reads the files, as in a pod; on this machine only root can enter the parent folders.
        for path in (self._folder.parents[1], self._folder.parent, self._folder):
            path.chmod(0o711)

    @property
    def proxy(self) -> Proxy:
        """The running process, or the last one."""
        return self._live.proxy

    def configure(self, changes: Json) -> None:
        """Change the ConfigMap, as `kubectl edit` and the kubelet do."""
        # Namespaces share the machine's limits, which a test must not change.
        config = yaml.safe_load(CONFIG)
        config["conntrack"] |= {"maxPerCore": 0, "min": 0}
        config["clientConnection"]["kubeconfig"] = str(self.config.folder / "kubeconfig.conf")
        kubeconfig = KUBECONFIG.replace("MOUNT", str(self.account.folder))
        self.config.write({"config.conf": yaml.safe_dump(config | changes), "kubeconfig.conf": kubeconfig})

    def apply(self, folder: str) -> None:
        """Use the security context of another folder of deploy/kustomize from the next start on."""
        self._objects = built(folder)

    def argv(self, *more: str) -> list[str]:
        """Return the command line of the container, with its privileges and its view of files."""
        (container,) = self._pod()["containers"]
        privileges = _privileges(container["securityContext"], self._command)
        return ["sh", "-ec", RUNTIME, "sh", *privileges, *self._command_of(container), *more]

    async def prepare(self) -> None:
        """Run the init container, which is privileged."""
        (container,) = self._pod()["initContainers"]
        assert container["securityContext"]["privileged"] is True
        status, out, err = await self._live.cluster.exec("node", self._command_of(container))
        assert status == 0, out + err

    def _pod(self) -> Json:
        (found,) = (o for o in self._objects if o["kind"] == "DaemonSet")
        spec: Json = found["spec"]["template"]["spec"]
        return spec

    def _command_of(self, container: Json) -> list[str]:
        folder = str(self.config.folder)
        arguments = [a.replace("/var/lib/kube-proxy", folder) for a in container["args"]]
        return [str(self._command), *(a.replace("$(NODE_NAME)", "node-a") for a in arguments)]

    async def __aenter__(self) -> Self:
        await self.prepare()
        await self._launch()
        self._life = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _launch(self) -> None:
        proxy = await self._live.cluster.launch_proxy(self.argv(), self.config.folder / "config.conf")
        self._live.proxies.append(proxy)

    async def _keep(self) -> None:
        while True:
            self.exits.append(await self.proxy.wait())
            await self._launch()

    async def restarted(self, status: int) -> None:
        """Wait until the container has ended once more, with this status, and is running and ready again."""
        self._ends += 1
        await self._live.until(lambda: len(self.exits) >= self._ends, f"an end with status {status}")
        assert self.exits[self._ends - 1 :] == [status], self._live.proxies[-2].tail()
        await self.ready()

    async def ready(self) -> None:
        """Wait until the container is ready."""
        await self._live.eventually(self._live.unready)

    async def stop(self) -> int:
        """Delete the pod; return the exit status."""
        if self._life is not None:
            self._life.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._life
            self._life = None
        return await self.proxy.stop(15.0)


def _privileges(security: Json, command: Path) -> list[str]:
    """Return setpriv's arguments for a securityContext: capabilities dropped and added, user, escalation.

    The image gives capabilities to the files; ambient capabilities replace these.
    """
    capabilities = [f"+{name.lower()}" for name in security["capabilities"]["add"]]
    user = security["runAsUser"]
    if not user:
        bounds = ",".join(["-all", *capabilities])
        escalation = [] if security["allowPrivilegeEscalation"] else ["--no-new-privs"]
        return ["setpriv", "--inh-caps", "-all", "--bounding-set", bounds, *escalation]
    if not all(_open_to_all(path) for path in (Path(sys.base_prefix), ROOT, command)):
        capabilities.append("+dac_read_search")  # a Python in a home folder, or a folder of this test
    bounds = ",".join(["-all", *capabilities])
    group = str(security["runAsGroup"])
    return [
        *["setpriv", "--reuid", str(user), "--regid", group, "--clear-groups"],
        *["--inh-caps", bounds, "--ambient-caps", bounds, "--bounding-set", bounds],
    ]


def _open_to_all(path: Path) -> bool:
    return all(parent.stat().st_mode & 0o001 for parent in [path, *path.parents])


IPTABLES = re.compile(r"table ip6? (filter|nat|mangle|raw|security) \{")
"""Chains that iptables-nft creates itself, and leaves without rules."""

NOT_OURS = re.compile(r"[A-Z]+|(-A )?KUBE-FIREWALL( .*)?|-A (INPUT|OUTPUT) -j KUBE-FIREWALL")
"""Built-in chains, and the chain that kubelet also creates: a clean-up keeps them (Go's CleanupLeftovers)."""


def kernel_rules() -> list[str]:
    """Return all rules and chains of this namespace for comparisons, without those that other programs create."""
    rules: list[str] = []
    table = ""
    # One call lists everything: after a list of tables, a table might be deleted before it is listed.
    for line in _lines("nft", "list", "ruleset"):
        table = line if line.startswith("table ") else table
        if not IPTABLES.fullmatch(table) and not line.startswith("#"):
            rules.append(line)
    for variant in xtables.installed():
        for saved in xtables.tables(variant):
            names = [name for name in (*saved.chains, *saved.rules) if not NOT_OURS.fullmatch(name)]
            rules += [f"{variant} {saved.name} {name}" for name in names]
    return rules


def _lines(*argv: str) -> list[str]:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
