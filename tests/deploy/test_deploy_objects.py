"""The objects of deploy/: valid by Kubernetes' own schema, complete, least privileged, and equal to the chart's."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from kubeproxy.api.kubeconfig import load_cluster
from kubeproxy.config.flags import BY_NAME
from kubeproxy.config.load import read_text
from kubeproxy.config.options import build_options
from kubeproxy.config.pflag import parse
from kubeproxy.kernel.proc import namespaces
from kubeproxy.release import NUMBER
from support import helm, kustomize, schema
from support.documents import document
from support.places import ROOT

Json = dict[str, Any]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "chart"
MODES = ("nftables", "iptables", "ipvs", "userspace")
FOLDERS = (*MODES, "nftables-nonroot", "kubeadm")
ON_ALL_ADDRESSES = {"config": {"metricsBindAddress": "0.0.0.0:10249"}}
SET = {"apiServer": "https://api.cluster.example:6443", "clusterCIDR": "10.244.0.0/16"}
KUBEADM = {"existingConfigMap": "kube-proxy", "nodeSelector": {"kube-proxy": "py"}}
VALUES: dict[str, Json] = {mode: SET | {"mode": mode} for mode in MODES} | {
    "nftables-nonroot": SET | {"nonRoot": True},
    "kubeadm": KUBEADM,
}
"""The values with which the chart should render the objects of each folder."""
DIGEST = f"sha256:{'0123456789abcdef' * 4}"
LINUX = {"matchExpressions": [{"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}]}
MORE_VALUES: dict[str, Json] = {
    "every value": SET
    | {
        "image": {"repository": "images.example/kubeproxy", "tag": "1", "digest": DIGEST, "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "registry"}],
        "mode": "ipvs",
        "clusterCIDR": "10.0.0.0/8,fd00::/8",
        "config": {
            "ipvs": {"scheduler": "lc", "strictARP": True},
            "nodePortAddresses": ["primary"],
            "metricsBindAddress": "[::]:19249",
            "healthzBindAddress": "0.0.0.0:19256",
        },
        "extraArgs": ["-v=4"],
        "env": [
            {"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"},
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        "tolerations": [],
        "affinity": {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [LINUX]}}
        },
        "podAnnotations": {"example.com/owner": "network"},
        "podLabels": {"team": "network"},
        "updateStrategy": {"type": "OnDelete"},
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "interval": "15s"},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}, "runbooks": "https://git.example/"},
    },
    "monitoring beside a ConfigMap of kubeadm": KUBEADM | {"podMonitor": {"enabled": True}},
}
AUTHORITY = ROOT / "tests/support/tls/ca.crt"
SCHEMA = json.loads((Path(__file__).parent / "kinds.schema.json").read_text())


def defaults() -> Json:
    return yaml.safe_load((CHART / "values.yaml").read_text())


def from_chart(values: Json) -> list[Json]:
    return helm.template(CHART, values, "kube-system")


NAMES = [*(f"kustomize {name}" for name in FOLDERS), *(f"chart {name}" for name in VALUES | MORE_VALUES)]


def built(name: str) -> list[Json]:
    """Return the objects of a folder, or of the chart with some values; each caller gets a copy."""
    maker, _, which = name.partition(" ")
    if maker == "chart":
        return from_chart((VALUES | MORE_VALUES)[which])
    return kustomize.build(DEPLOY / "kustomize" / which)


@pytest.fixture(params=NAMES)
def objects(request: pytest.FixtureRequest) -> list[Json]:
    return built(request.param)


def one(objects: list[Json], kind: str) -> Json:
    (found,) = (o for o in objects if o["kind"] == kind)
    return found


def pod(objects: list[Json]) -> Json:
    return one(objects, "DaemonSet")["spec"]["template"]["spec"]


def by_kind(objects: list[Json]) -> dict[str, Json]:
    return {o["kind"]: o for o in objects}


@pytest.mark.parametrize("name", VALUES)
def test_the_chart_makes_the_same_as_the_folder(name: str) -> None:
    chart, folder = (by_kind(built(f"{maker} {name}")) for maker in ("chart", "kustomize"))
    for objects in (chart, folder):
        spec = objects["DaemonSet"]["spec"]["template"]["spec"]
        for container in [*spec["initContainers"], *spec["containers"]]:
            container.pop("imagePullPolicy", None)
        if "ConfigMap" in objects:  # each name contains a different hash
            config_map = objects["ConfigMap"]
            config_map["metadata"].pop("annotations", None)
            config_map["data"] = {key: yaml.safe_load(text) for key, text in config_map["data"].items()}
            assert spec["volumes"][0]["configMap"]["name"] == config_map["metadata"]["name"]
            spec["volumes"][0]["configMap"]["name"] = config_map["metadata"]["name"] = "kube-proxy-py"
    assert chart == folder


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
    assert any("hostNetwork: 'yes' is no boolean" in what for what in found)


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
        runs = container in spec["containers"]  # and commands query it
        # The kubelet lets every user write to an emptyDir, so the proxy needs a separate folder in it for its socket.
        socket = {str(Path(BY_NAME["control-socket"].default).parents[1])} if runs else set()
        assert mounts.keys() == {"/var/lib/kube-proxy", "/lib/modules", "/run/xtables.lock"} | socket
        assert set(mounts.values()) == volumes.keys() - (set() if runs else {"control"})
    used = volumes["config"]["configMap"]["name"]
    assert ("ConfigMap", used) in names or used == "kube-proxy"
    labels = one(objects, "DaemonSet")["spec"]["template"]["metadata"]["labels"]
    assert one(objects, "DaemonSet")["spec"]["selector"]["matchLabels"].items() <= labels.items()


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
        assert load_cluster(str(tmp_path / "kubeconfig"), "").server.url == SET["apiServer"]
        # The configuration that every one of them runs with, as the command reads it.
        (tmp_path / "config").write_text(config_map["data"]["config.conf"])
        options = build_options(parse(["--config", str(tmp_path / "config"), "--hostname-override", "node-a"]))
        assert options.config.hostname_override == "node-a"


@pytest.mark.parametrize("mode", MODES)
def test_each_folder_has_its_mode(mode: str) -> None:
    for maker in ("kustomize", "chart"):
        config = yaml.safe_load(one(built(f"{maker} {mode}"), "ConfigMap")["data"]["config.conf"])
        assert config["mode"] == mode


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
    "mode": ({"mode": "ebpf"}, "'/mode': value must be one of 'nftables'"),
    "a key that is none": ({"clusterCidr": "10.0.0.0/8"}, "additional properties 'clusterCidr' not allowed"),
    "plain HTTP": ({"apiServer": "http://a:6443"}, "'/apiServer': 'http://a:6443' does not match"),
    "no network": ({"clusterCIDR": "10.0.0.0"}, "'/clusterCIDR': "),
    "what has a value of its own": ({"config": {"mode": "ipvs"}}, "config.mode: set the value mode instead"),
    "the kubeconfig": ({"config": {"clientConnection": {}}}, "clientConnection: set the value apiServer instead"),
    "what the chart writes": ({"config": {"kind": "X"}}, "config.kind: the chart writes it"),
    "a user of its own in iptables mode": ({"mode": "iptables", "nonRoot": True}, "'/mode': value must be 'nftables'"),
    "a user of its own that traces": ({"nonRoot": True, "podTrace": True}, "'/podTrace': value must be false"),
    "wrong type": ({"extraArgs": "-v=4"}, "'/extraArgs': got string, want array"),
    "the label that finds its pods": ({"podLabels": {"k8s-app": "mine"}}, "podLabels.k8s-app: the chart writes it"),
    "a number, where labels are text": ({"podLabels": {"rank": 1}}, "'/podLabels/rank': got number, want string"),
    "part of a digest": ({"image": {"digest": "sha256:1234"}}, "'/image/digest': 'sha256:1234' does not match"),
    "an address without a port": ({"config": {"metricsBindAddress": "0.0.0.0"}}, "'/config/metricsBindAddress': "),
    "affinity of no kind": ({"affinity": {"nodeAffinty": {}}}, "additional properties 'nodeAffinty' not allowed"),
    "a secret's name alone": ({"imagePullSecrets": ["registry"]}, "'/imagePullSecrets/0': got string, want object"),
    "a variable without a name": ({"env": [{"value": "1"}]}, "'/env/0': missing property 'name'"),
    "a taint with its effect": ({"startupTaint": "a/b:NoSchedule"}, "'/startupTaint': "),
    "an interval without a unit": ({"podMonitor": {"enabled": True, "interval": "30"}}, "'/podMonitor/interval': "),
    "no address of the API server": ({"apiServer": ""}, "apiServer: set it to where nodes reach the API server"),
    "metrics that are on loopback alone": (
        {"podMonitor": {"enabled": True}},
        "podMonitor.enabled: Prometheus asks the node's address",
    ),
    "and said to be": (
        {"podMonitor": {"enabled": True}, "config": {"metricsBindAddress": "[::1]:10249"}},
        "set config.metricsBindAddress to 0.0.0.0:10249",
    ),
}


@pytest.mark.parametrize(("values", "said"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_bad_values(values: Json, said: str) -> None:
    with pytest.raises(helm.RefusedError) as refused:
        from_chart(SET | values)
    assert said in str(refused.value)


def test_a_changed_configuration_rolls_node_by_node() -> None:
    """Pods of the previous revision of the DaemonSet keep their configuration: a pod restarts only in its turn."""
    names = set()
    changes: list[Json] = [{"config": {"nodePortAddresses": ["primary"]}}, {"mode": "ipvs"}, {"podLabels": {"a": "b"}}]
    for values in ({}, *changes):
        objects = from_chart(SET | values)
        config_map = one(objects, "ConfigMap")
        assert config_map["immutable"] is True
        assert config_map["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
        names.add(config_map["metadata"]["name"])
        assert pod(objects)["volumes"][0]["configMap"]["name"] == config_map["metadata"]["name"]
    assert len(names) == 3  # labels of pods are no configuration
    assert one(built("kustomize nftables"), "ConfigMap")["immutable"] is True


def test_releases_do_not_collide() -> None:
    asked = SET | ON_ALL_ADDRESSES | {"podMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}}
    asked |= {"startupTaint": "kube-proxy-py/not-ready"}
    where = [("kube-proxy-py", "kube-system"), ("canary", "kube-system"), ("kube-proxy-py", "network")]
    where.append(("kube-proxy-py-network", "kube-system"))
    whole = {"ClusterRole", "ClusterRoleBinding"}
    seen: set[tuple[str, str, str]] = set()
    for release, namespace in where:
        objects = helm.template(CHART, asked, namespace, release)
        named = {(o["kind"], "" if o["kind"] in whole else namespace, o["metadata"]["name"]) for o in objects}
        assert not named & seen
        seen |= named
        bindings = [o for o in objects if o["kind"] == "ClusterRoleBinding"]
        account = one(objects, "ServiceAccount")["metadata"]
        for binding in bindings:
            (subject,) = binding["subjects"]
            assert (subject["name"], subject["namespace"]) == (account["name"], namespace)
            assert ("ClusterRole", "", binding["roleRef"]["name"]) in named
        assert pod(objects)["serviceAccountName"] == account["name"]
        template = one(objects, "DaemonSet")["spec"]["template"]
        selectors = [one(objects, kind)["spec"]["selector"]["matchLabels"] for kind in ("DaemonSet", "PodMonitor")]
        assert selectors == [{"k8s-app": account["name"]}] * 2
        assert template["metadata"]["labels"]["k8s-app"] == account["name"]
        assert re.search("kube-proxy", account["name"])  # the job's name, which the alerts use
        assert f"-l k8s-app={account['name']} " in str(one(objects, "PrometheusRule")["spec"])
    assert len(seen) == len(where) * len(objects)


def test_helm_has_nothing_against_the_chart() -> None:
    for values in (VALUES | MORE_VALUES).values():
        assert helm.lint(CHART, values) == ""


def test_the_notes_say_where_metrics_of_an_existing_configuration_must_be_served() -> None:
    values = SET | KUBEADM | {"podMonitor": {"enabled": True}}
    assert "set metricsBindAddress to 0.0.0.0:10249 in kube-proxy" in helm.notes(CHART, values, "kube-system")
    assert "metricsBindAddress" not in helm.notes(CHART, SET | KUBEADM, "kube-system")


@pytest.mark.parametrize(
    ("values", "port"), [({}, 10249), ({"config": {"metricsBindAddress": "0.0.0.0:20249"}}, 20249)]
)
def test_the_notes_have_the_address_of_the_page_and_the_doctor_command(values: Json, port: int) -> None:
    said = helm.notes(CHART, SET | values, "kube-system")
    assert f"kubectl -n kube-system port-forward $POD {port}\n" in said + "\n"
    assert f"http://localhost:{port}/ui/" in said
    assert "kubectl -n kube-system exec $POD -c kube-proxy -- kube-proxy doctor" in said


def test_every_value_is_in_the_schema_and_used() -> None:
    rules = json.loads((CHART / "values.schema.json").read_text())
    assert defaults().keys() | {"global"} == rules["properties"].keys()
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    assert [key for key in defaults() if f".Values.{key}" not in templates] == []


def test_values_are_where_they_belong() -> None:
    objects = built("chart every value")
    template = one(objects, "DaemonSet")["spec"]["template"]
    spec, values = template["spec"], MORE_VALUES["every value"]
    assert template["metadata"] == {
        "labels": {"k8s-app": "kube-proxy-py", "team": "network"},
        "annotations": {"example.com/owner": "network"},
    }
    assert (spec["affinity"], spec["imagePullSecrets"]) == (values["affinity"], values["imagePullSecrets"])
    (prepare,), (proxy,) = spec["initContainers"], spec["containers"]
    assert {prepare["image"], proxy["image"]} == {f"images.example/kubeproxy:1@{DIGEST}"}
    assert proxy["env"][1:] == values["env"]
    assert {port["name"]: port["containerPort"] for port in proxy["ports"]} == {"healthz": 19256, "metrics": 19249}
    monitor = one(objects, "PodMonitor")
    assert monitor["metadata"]["labels"] == {"k8s-app": "kube-proxy-py", "release": "prometheus"}
    assert monitor["spec"]["podMetricsEndpoints"][0]["interval"] == "15s"


def test_monitoring_is_off_by_default() -> None:
    made = [built(name) for name in NAMES if "chart" in name and name.partition(" ")[2] in VALUES]
    assert {obj["kind"] for objects in made for obj in objects} & {"PodMonitor", "PrometheusRule"} == set()


def test_the_chart_makes_the_same_monitoring_as_the_folder() -> None:
    folder = kustomize.build(DEPLOY / "kustomize/monitoring")
    chart = from_chart(SET | ON_ALL_ADDRESSES | {"podMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}})
    assert by_kind(folder) == {kind: obj for kind, obj in by_kind(chart).items() if kind in by_kind(folder)}
    for obj in folder:
        assert schema.errors(obj, {"$ref": f"#/definitions/{SCHEMA['kinds'][obj['kind']]}"}, SCHEMA) == []


def test_runbook_urls_follow_the_published_location() -> None:
    where = "https://git.example/kubeproxy/blob/main/"
    made = from_chart(SET | {"prometheusRule": {"enabled": True, "runbooks": where}})
    (group,) = one(made, "PrometheusRule")["spec"]["groups"]
    urls = [rule["annotations"]["runbook_url"] for rule in group["rules"]]
    assert all(url.startswith(f"{where}docs/monitoring.md#kubeproxy") for url in urls)


def test_no_alert_has_the_name_of_a_stock_one() -> None:
    """An alert of kubernetes-mixin, as in kube-prometheus: both would fire under one name, for different reasons."""
    text = (DEPLOY / "alerts/kube-proxy.rules.yaml").read_text()
    assert not {"KubeProxyDown", "KubeProxyUnreachable", "KubeProxyInstanceUnreachable"} & set(
        re.findall(r"alert: (\w+)", text)
    )


def test_the_alerts_are_those_of_the_rule_file() -> None:
    """After a change run deploy/alerts/spread.py."""
    for path, text in runpy.run_path(str(DEPLOY / "alerts/spread.py"))["copies"]().items():
        assert path.read_text() == text
    rule = one(kustomize.build(DEPLOY / "kustomize/monitoring"), "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((DEPLOY / "alerts/kube-proxy.rules.yaml").read_text())


def test_a_monitor_finds_the_pods_and_their_port() -> None:
    (monitor, _) = kustomize.build(DEPLOY / "kustomize/monitoring")
    for folder in FOLDERS:
        template = one(built(f"kustomize {folder}"), "DaemonSet")["spec"]["template"]
        assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
        assert {end["port"] for end in monitor["spec"]["podMetricsEndpoints"]} <= ports
        assert template["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "kube-proxy-py"


def test_the_right_to_patch_nodes_is_granted_only_on_request(tmp_path: Path) -> None:
    """As in docs/beyond.md: the component in addition to a mode's folder, and the chart's value."""
    shown = [line.strip() for _, line in document("docs/beyond.md").commands]
    text = "\n".join(line for line in shown if line.startswith(("resources:", "components:")))
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "kustomization.yaml").write_text(text.replace("deploy/", "../deploy/"))
    made = kustomize.build(folder)
    chart = from_chart(VALUES["nftables"] | {"startupTaint": "kube-proxy-py/not-ready"})

    def added(objects: list[Json]) -> list[Json]:
        return sorted(
            (o for o in objects if o["metadata"]["name"] == "kube-proxy-py-startup-taint"), key=lambda o: str(o["kind"])
        )

    assert [o["kind"] for o in added(made)] == ["ClusterRole", "ClusterRoleBinding"]
    assert added(made) == added(chart)
    for objects in (made, chart):
        assert pod(objects)["containers"][0]["args"][-1] == "--startup-taint=kube-proxy-py/not-ready"
        parse(pod(objects)["containers"][0]["args"])
        for obj in added(objects):
            assert schema.errors(obj, {"$ref": f"#/definitions/{SCHEMA['kinds'][obj['kind']]}"}, SCHEMA) == []
    for name in NAMES:
        assert not added(built(name))


def test_traces_from_pods_get_their_rights_only_on_request(tmp_path: Path) -> None:
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    folder = tmp_path / "mine"
    folder.mkdir()
    base, component = (f"../deploy/kustomize/{name}" for name in ("nftables", "pod-trace"))
    (folder / "kustomization.yaml").write_text(f"resources: [{base}]\ncomponents: [{component}]\n")
    for made in map(pod, (kustomize.build(folder), from_chart(VALUES["nftables"] | {"podTrace": True}))):
        container, where = made["containers"][0], str(namespaces.FOLDERS[0])
        assert container["securityContext"]["capabilities"]["add"] == ["NET_ADMIN", "NET_RAW", "SYS_ADMIN"]
        mount = {"name": "netns", "mountPath": where, "mountPropagation": "HostToContainer", "readOnly": True}
        assert container["volumeMounts"][-1] == mount
        assert made["volumes"][-1] == {"name": "netns", "hostPath": {"path": where, "type": "DirectoryOrCreate"}}
    for name in NAMES:
        assert "SYS_ADMIN" not in str(pod(built(name)))


def test_versions() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["version"] == about["appVersion"] == NUMBER
    for folder in FOLDERS:
        spec = pod(built(f"kustomize {folder}"))
        images = {container["image"] for container in [*spec["initContainers"], *spec["containers"]]}
        assert images == {f"kubeproxy:{NUMBER}"}
