"""What `kubectl kustomize` makes of deploy/kustomize, for machines without kubectl: only what those folders use.

A key that is not known is an error. test_kustomize.py compares with kubectl wherever there is one.
"""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import yaml

Json = dict[str, Any]
_KNOWN = {"apiVersion", "kind", "namespace", "resources", "configMapGenerator", "generatorOptions", "patches", "images"}
_CLUSTER_SCOPED = {"ClusterRole", "ClusterRoleBinding"}


def build(folder: Path) -> list[Json]:
    """The objects of a folder with a kustomization.yaml, as they are applied."""
    objects = _objects(folder)
    names = {o["metadata"]["name"]: _hashed(o) for o in objects if o["kind"] == "ConfigMap"}
    for o in objects:
        if o["kind"] == "ConfigMap":
            o["metadata"]["name"] = names[o["metadata"]["name"]]
        elif o["kind"] == "DaemonSet":
            for volume in o["spec"]["template"]["spec"]["volumes"]:
                if "configMap" in volume:
                    volume["configMap"]["name"] = names.get(volume["configMap"]["name"], volume["configMap"]["name"])
    return objects


def _objects(folder: Path) -> list[Json]:
    spec = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert spec.keys() <= _KNOWN, f"{folder}: {spec.keys() - _KNOWN} is more than this renderer knows"
    objects: list[Json] = []
    for name in spec.get("resources", ()):
        path = folder / name
        objects += _objects(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))
    for generator in spec.get("configMapGenerator", ()):
        _generate(folder, generator, spec, objects)
    for patch in spec.get("patches", ()):
        change = yaml.safe_load((folder / patch["path"]).read_text())
        key = (change["kind"], change["metadata"]["name"])
        (target,) = (o for o in objects if (o["kind"], o["metadata"]["name"]) == key)
        _merge(target, change)
    for image in spec.get("images", ()):
        for spec_of_pod in (o["spec"]["template"]["spec"] for o in objects if o["kind"] == "DaemonSet"):
            for container in [*spec_of_pod["initContainers"], *spec_of_pod["containers"]]:
                if container["image"].partition(":")[0] == image["name"]:
                    container["image"] = f"{image['newName']}:{image['newTag']}"
    for o in objects:
        if o["kind"] not in _CLUSTER_SCOPED:
            o["metadata"]["namespace"] = spec["namespace"]
    return objects


def _generate(folder: Path, generator: Json, spec: Json, objects: list[Json]) -> None:
    files = {name: (folder / name).read_text() for name in generator["files"]}
    if generator.get("behavior") == "merge":
        (made,) = (o for o in objects if o["kind"] == "ConfigMap" and o["metadata"]["name"] == generator["name"])
        made["data"] |= files
        return
    metadata = {"name": generator["name"]} | copy.deepcopy(spec.get("generatorOptions", {}))
    objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": files})


def _merge(target: Json, change: Json) -> None:
    """A strategic merge: maps by key, lists of named things by name, other lists as a whole."""
    for key, value in change.items():
        old = target.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            _merge(old, value)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            by_name = {item["name"]: item for item in old or ()}
            for item in value:
                _merge(by_name[item["name"]], item)
        else:
            target[key] = value


def _hashed(config_map: Json) -> str:
    """The name with kustomize's hash of the content (api/hasher of kustomize)."""
    name = config_map["metadata"]["name"]
    content = {"kind": "ConfigMap", "name": "", "data": config_map["data"]}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    digest = hashlib.sha256(text.encode()).hexdigest()[:10]
    return f"{name}-{digest.translate(str.maketrans('013ae', 'ghkmt'))}"
