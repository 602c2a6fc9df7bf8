"""The objects of deploy/: right by Kubernetes' own schema, complete, least privileged, the same from the chart."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kubeproxy import __version__
from kubeproxy.api.kubeconfig import load_cluster
from kubeproxy.config.load import read_text
from kubeproxy.config.options import build_options
from kubeproxy.config.pflag import parse
from support import helm, kustomize, schema
from support.places import ROOT

Json = dict[str, Any]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "chart"
MODES = ("nftables", "iptables", "ipvs", "userspace")
FOLDERS = (*MODES, "nftables-nonroot", "kubeadm")
SET = {"apiServer": "https://api.cluster.example:6443", "clusterCIDR": "10.244.0.0/16"}
KUBEADM = {"existingConfigMap": "kube-proxy", "nodeSelector": {"kube-proxy": "py"}}
VALUES: dict[str, Json] = {mode: SET | {"mode": mode} for mode in MODES} | {
    "nftables-nonroot": SET | {"nonRoot": True},
    "kubeadm": KUBEADM,
}
"""The values of the chart that are meant to give what a folder gives."""
MORE_VALUES: dict[str, Json] = {
    "every value": SET
    | {
        "image": {"repository": "images.example/kubeproxy", "tag": "1", "pullPolicy": "Always"},
        "mode": "ipvs",
        "clusterCIDR": "10.0.0.0/8,fd00::/8",
        "config": {"ipvs": {"scheduler": "lc", "strictARP": True}, "nodePortAddresses": ["primary"]},
        "extraArgs": ["-v=4"],
        "tolerations": [],
        "updateStrategy": {"type": "OnDelete"},
    },
}
AUTHORITY = ROOT / "tests/support/tls/ca.crt"
SCHEMA = json.loads((Path(__file__).parent / "kinds.schema.json").read_text())


def defaults() -> Json:
    return yaml.safe_load((CHART / "values.yaml").read_text())


def from_chart(values: Json) -> list[Json]:
    return helm.template(CHART, helm.merged(defaults(), values), "kube-system")


BUILT = {f"kustomize {name}": kustomize.build(DEPLOY / "kustomize" / name) for name in FOLDERS} | {
    f"chart {name}": from_chart(values) for name, values in (VALUES | MORE_VALUES).items()
}
every = pytest.mark.parametrize("objects", BUILT.values(), ids=BUILT)


def one(objects: list[Json], kind: str) -> Json:
    (found,) = (o for o in objects if o["kind"] == kind)
    return found


def pod(objects: list[Json]) -> Json:
    return one(objects, "DaemonSet")["spec"]["template"]["spec"]


@pytest.mark.skipif(not shutil.which("kubectl"), reason="no kubectl, which renders the folders as well")
@pytest.mark.parametrize("folder", [*FOLDERS, "base"])
def test_kubectl_makes_the_same(folder: str) -> None:
    path = DEPLOY / "kustomize" / folder
    done = subprocess.run(["kubectl", "kustomize", str(path)], capture_output=True, text=True, check=True)
    assert by_kind(list(yaml.safe_load_all(done.stdout))) == by_kind(kustomize.build(path))


def by_kind(objects: list[Json]) -> dict[str, Json]:
    return {o["kind"]: o for o in objects}


@pytest.mark.parametrize("name", VALUES)
def test_the_chart_makes_the_same_as_the_folder(name: str) -> None:
    chart, folder = (by_kind(copy.deepcopy(BUILT[f"{built} {name}"])) for built in ("chart", "kustomize"))
    for objects in (chart, folder):
        spec = objects["DaemonSet"]["spec"]["template"]["spec"]
        for container in [*spec["initContainers"], *spec["containers"]]:
            container.pop("imagePullPolicy", None)
        if "ConfigMap" in objects:  # kustomize adds a hash to the name
            config_map = objects["ConfigMap"]
            config_map["data"] = {key: yaml.safe_load(text) for key, text in config_map["data"].items()}
            assert spec["volumes"][0]["configMap"]["name"] == config_map["metadata"]["name"]
            spec["volumes"][0]["configMap"]["name"] = config_map["metadata"]["name"] = "kube-proxy-py"
    assert chart == folder


@every
def test_schema(objects: list[Json]) -> None:
    for obj in objects:
        kind = SCHEMA["kinds"][obj["kind"]]
        assert schema.errors(obj, {"$ref": f"#/definitions/{kind}"}, SCHEMA) == []


def test_the_schema_finds_mistakes() -> None:
    broken = json.loads(json.dumps(one(kustomize.build(DEPLOY / "kustomize/base"), "DaemonSet")))
    spec = broken["spec"]["template"]["spec"]
    spec["hostNetwork"] = "yes"
    spec["containers"][0]["privileged"] = True
    del spec["containers"][0]["name"]
    kind = SCHEMA["kinds"]["DaemonSet"]
    found = schema.errors(broken, {"$ref": f"#/definitions/{kind}"}, SCHEMA)
    assert len(found) == 3
    assert "hostNetwork: 'yes' is no boolean" in found[0]


@every
def test_names_lead_somewhere(objects: list[Json]) -> None:
    names = {(o["kind"], o["metadata"]["name"]) for o in objects}
    spec = pod(objects)
    binding = one(objects, "ClusterRoleBinding")
    (subject,) = binding["subjects"]
    account = one(objects, "ServiceAccount")["metadata"]
    assert ("ServiceAccount", spec["serviceAccountName"]) in names
    assert (subject["name"], subject["namespace"]) == (account["name"], account["namespace"])
    assert ("ClusterRole", binding["roleRef"]["name"]) in names
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    for container in [*spec["initContainers"], *spec["containers"]]:
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        runs = container in spec["containers"]  # and is asked by commands
        socket = {"/run/kube-proxy"} if runs else set()
        assert mounts.keys() == {"/var/lib/kube-proxy", "/lib/modules", "/run/xtables.lock"} | socket
        assert set(mounts.values()) == volumes.keys() - (set() if runs else {"control"})
    used = volumes["config"]["configMap"]["name"]
    assert ("ConfigMap", used) in names or used == "kube-proxy"
    labels = one(objects, "DaemonSet")["spec"]["template"]["metadata"]["labels"]
    assert one(objects, "DaemonSet")["spec"]["selector"]["matchLabels"].items() <= labels.items()


@every
def test_configuration(objects: list[Json], tmp_path: Path) -> None:
    for container in [*pod(objects)["initContainers"], *pod(objects)["containers"]]:
        line = parse(container["args"])
        assert line.given["config"] == "/var/lib/kube-proxy/config.conf"
        assert line.given["hostname-override"] == "$(NODE_NAME)"
        assert not line.words
    config_maps = [o for o in objects if o["kind"] == "ConfigMap"]
    for config_map in config_maps:
        config, strict = read_text(config_map["data"]["config.conf"])
        assert strict == []
        assert config.client_connection.kubeconfig == "/var/lib/kube-proxy/kubeconfig.conf"
        mount = "/var/run/secrets/kubernetes.io/serviceaccount"
        kubeconfig = config_map["data"]["kubeconfig.conf"]
        assert f"{mount}/token" in kubeconfig
        (tmp_path / "kubeconfig").write_text(kubeconfig.replace(f"{mount}/ca.crt", str(AUTHORITY)))
        assert load_cluster(str(tmp_path / "kubeconfig"), "").url == SET["apiServer"]
        # What every one of them runs with, as the command reads it.
        (tmp_path / "config").write_text(config_map["data"]["config.conf"])
        options = build_options(parse(["--config", str(tmp_path / "config"), "--hostname-override", "node-a"]))
        assert options.config.hostname_override == "node-a"


@pytest.mark.parametrize("mode", MODES)
def test_each_folder_has_its_mode(mode: str) -> None:
    for built in ("kustomize", "chart"):
        config = yaml.safe_load(one(BUILT[f"{built} {mode}"], "ConfigMap")["data"]["config.conf"])
        assert config["mode"] == mode


@every
def test_privileges(objects: list[Json]) -> None:
    spec = pod(objects)
    (prepare,), (proxy,) = spec["initContainers"], spec["containers"]
    assert "--init-only" in prepare["args"]
    security = proxy["securityContext"]
    assert security["capabilities"]["drop"] == ["ALL"]
    assert set(security["capabilities"]["add"]) <= {"NET_ADMIN", "NET_RAW"}
    assert security["readOnlyRootFilesystem"] is True
    assert "privileged" not in security
    if security.get("runAsNonRoot"):
        assert security["capabilities"]["add"] == ["NET_ADMIN"]
    else:
        assert security["allowPrivilegeEscalation"] is False
    assert spec["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}}
    assert not spec.keys() & {"hostPID", "hostIPC"}
    assert all("*" not in field for rule in one(objects, "ClusterRole")["rules"] for field in rule.values())


@every
def test_it_runs_on_every_node_before_the_network_is_there(objects: list[Json]) -> None:
    spec = pod(objects)
    assert spec["hostNetwork"] is True
    assert spec["priorityClassName"] == "system-node-critical"
    (proxy,) = spec["containers"]
    assert {probe["httpGet"]["path"] for probe in (proxy["livenessProbe"], proxy["readinessProbe"])} == {
        "/livez",
        "/readyz",
    }
    assert "limits" not in proxy["resources"]


BAD_VALUES: dict[str, tuple[Json, str]] = {
    "mode": ({"mode": "ebpf"}, ".mode: 'ebpf' is none of"),
    "a key that is none": ({"clusterCidr": "10.0.0.0/8"}, ".clusterCidr: is not known"),
    "plain HTTP": ({"apiServer": "http://a:6443"}, ".apiServer: "),
    "no network": ({"clusterCIDR": "10.0.0.0"}, ".clusterCIDR: "),
    "what has a value of its own": ({"config": {"mode": "ipvs"}}, ".config: is not allowed"),
    "a user of its own in iptables mode": (
        {"mode": "iptables", "nonRoot": True},
        ".mode: 'iptables' is not 'nftables'",
    ),
    "wrong type": ({"extraArgs": "-v=4"}, ".extraArgs: '-v=4' is no array"),
}


def values_errors(values: Json) -> list[str]:
    rules = json.loads((CHART / "values.schema.json").read_text())
    return schema.errors(helm.merged(defaults(), values), rules, rules)


@pytest.mark.parametrize("values", [{}, *VALUES.values(), *MORE_VALUES.values()])
def test_good_values(values: Json) -> None:
    assert values_errors(values) == []


@pytest.mark.parametrize(("values", "said"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_bad_values(values: Json, said: str) -> None:
    (found,) = values_errors(values)
    assert found.startswith(said)


def test_what_the_chart_cannot_guess_it_asks_for() -> None:
    with pytest.raises(helm.RequiredError, match="apiServer"):
        from_chart({})


def test_every_value_is_in_the_schema_and_used() -> None:
    rules = json.loads((CHART / "values.schema.json").read_text())
    assert defaults().keys() | {"global"} == rules["properties"].keys()
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    assert [key for key in defaults() if f".Values.{key}" not in templates] == []


def test_versions() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["version"] == about["appVersion"] == __version__
    for folder in FOLDERS:
        spec = pod(BUILT[f"kustomize {folder}"])
        images = {container["image"] for container in [*spec["initContainers"], *spec["containers"]]}
        assert images == {f"kubeproxy:{__version__}"}
