"""Implements the verbs on the store: metadata, defaults, validation, versions, graceful deletion. No sockets.

The HTTP server calls the methods with decoded bodies; the lab's controllers call them directly. All methods are
synchronous, so a read, its checks and the write are atomic.
"""

from __future__ import annotations

import copy
import datetime as dt
import uuid
from typing import Any

import msgspec

from lab.apiserver import status
from lab.apiserver.allocation import Allocations
from lab.apiserver.event_versions import from_core, to_core
from lab.apiserver.fieldsets import paths_of
from lab.apiserver.kinds import CHECKS
from lab.apiserver.managers import Manager, Operation, Owners, apply_to
from lab.apiserver.names import (
    DNS_1035_MESSAGE,
    SUBDOMAIN_MESSAGE,
    dns_1035,
    dns_subdomain,
    generated,
)
from lab.apiserver.ownership import LAB, Write, Writer, kind_of
from lab.apiserver.patching import apply_patch
from lab.apiserver.resources import Resource, by_plural
from lab.apiserver.services import ServiceStrategy
from lab.apiserver.status import FieldErrors, Json
from lab.apiserver.store import Key, Record, Store

_APISERVER = Writer("kube-apiserver")
_NAMESPACES = by_plural("namespaces")
_KEPT_METADATA = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation")


def timestamp() -> str:
    """Return the present time in the format of metadata.creationTimestamp."""
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def render(resource: Resource, record: Record) -> bytes:
    """Return the JSON of one object in the version of `resource`."""
    raw = record.raw
    if resource.group == "events.k8s.io":
        raw = msgspec.json.encode(from_core(record.decode()))
    return type_header(resource) + raw[1:]


def type_header(resource: Resource) -> bytes:
    """Return the start of an object's JSON, up to the first field after kind and apiVersion."""
    return f'{{"kind":"{resource.kind}","apiVersion":"{resource.api_version}",'.encode()


class Rest:
    """The verbs. Raises ApiError for every refusal."""

    def __init__(self, store: Store, service_cidrs: tuple[str, ...]) -> None:
        self.store = store
        self._cidrs = list(service_cidrs)
        self.allocations = Allocations(store, service_cidrs)
        self._services = ServiceStrategy(self.allocations)

    def create_system_objects(self) -> None:
        """Create the objects that a kube-apiserver creates itself: the namespaces, the ServiceCIDR and the Service of
        the API."""
        for name in ("default", "kube-node-lease", "kube-public", "kube-system"):
            self.create(_NAMESPACES, {"metadata": {"name": name}})
        cidrs = by_plural("servicecidrs")
        self.create(cidrs, {"metadata": {"name": "kubernetes"}, "spec": {"cidrs": self._cidrs}}, writer=_APISERVER)
        self._make_ready(cidrs)
        first = str(self.allocations.ranges[0].network[1])
        service = {
            "metadata": {"name": "kubernetes", "labels": {"component": "apiserver", "provider": "kubernetes"}},
            "spec": {
                "clusterIP": first,
                "ipFamilyPolicy": "SingleStack",
                "ports": [{"name": "https", "port": 443, "targetPort": 6443}],
            },
        }
        self.create(by_plural("services"), service, "default", writer=_APISERVER)

    def _make_ready(self, cidrs: Resource) -> None:
        """The status that the controller of ServiceCIDRs applies; Go encodes a missing reason as an empty text."""
        cidr = self.get(cidrs, ("", "kubernetes")).decode()
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": timestamp()}
        ready["message"] = "Kubernetes default Service CIDR is ready"
        self.store.put(cidrs.storage, cidr | {"status": {"conditions": [ready | {"reason": ""}]}})
        state = {"status": {"conditions": [ready]}}
        self.apply(cidrs, state, ("", "kubernetes"), "status", name="kubernetes-service-cidr-controller")

    # reading

    def get(self, resource: Resource, key: Key) -> Record:
        """Return the object; raises ApiError 404."""
        record = self.store.get(resource.storage, key)
        if record is None:
            raise status.not_found(resource.plural, resource.group, key[1])
        return record

    # writing

    def create(
        self,
        resource: Resource,
        obj: Json,
        namespace: str = "",
        *,
        dry_run: bool = False,
        writer: Writer | None = None,
    ) -> Record:
        """Create an object from a body; return the stored object."""
        write = Write(resource, "", writer, paths_of(obj, kind_of(resource))) if writer else None
        if resource.group == "events.k8s.io":
            obj = to_core(obj)
        metadata = obj["metadata"] = obj.get("metadata") or {}
        self._settle_namespace(resource, metadata, namespace)
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = generated(metadata["generateName"])
        self._check_name(resource, metadata)
        if metadata.get("resourceVersion"):
            raise status.bad_request("resourceVersion should not be set on objects to be created")
        if resource.namespaced:
            self._check_namespace(metadata["namespace"])
        key = (metadata.get("namespace", ""), metadata["name"])
        if self.store.get(resource.storage, key) is not None:
            raise status.already_exists(resource.plural, resource.group, key[1])
        for name in ("selfLink", "deletionTimestamp", "managedFields"):
            metadata.pop(name, None)
        metadata["uid"] = str(uuid.uuid4())
        metadata["creationTimestamp"] = timestamp()
        if resource.generation:
            metadata["generation"] = 1
        if "status" in resource.subresources:
            obj.pop("status", None)
        self._finish(resource, obj, None)
        if write is not None:
            metadata["managedFields"] = write.entries(None, obj, [], timestamp())
        return self._write(resource, obj, dry_run)

    def update(
        self,
        resource: Resource,
        obj: Json,
        key: Key,
        subresource: str = "",
        *,
        dry_run: bool = False,
        writer: Writer | None = None,
    ) -> Record:
        """Replace an object (or its status) with a body; return the stored object.

        After an apply the body contains the new managedFields; for other writes they are computed.
        """
        record = self.get(resource, key)
        old = record.decode()
        managed = writer or old["metadata"].get("managedFields")
        write = Write(resource, subresource, writer or LAB, paths_of(obj, kind_of(resource))) if managed else None
        if resource.group == "events.k8s.io":
            obj = to_core(obj)
        metadata = obj["metadata"] = obj.get("metadata") or {}
        self._settle_namespace(resource, metadata, key[0])
        self._settle_name(metadata, key[1])
        given = metadata.get("resourceVersion")
        if given and given != "0" and given != str(record.revision):
            raise status.conflict(resource.plural, resource.group, key[1])
        if metadata.get("uid") not in {None, "", old["metadata"]["uid"]}:
            is_now = old["metadata"]["uid"]
            why = f"Precondition failed: UID in precondition: {metadata['uid']}, UID in object meta: {is_now}"
            raise status.conflict(resource.plural, resource.group, key[1], why)
        entries = metadata.get("managedFields", old["metadata"].get("managedFields"))
        new = self._merge_parts(resource, obj, old, subresource)
        if subresource != "status":
            self._finish(resource, new, old)
        if write is not None and write.writer.operation is Operation.UPDATE:
            entries = write.entries(old, new, entries or [], timestamp())
        if entries:
            new["metadata"]["managedFields"] = entries
        new["metadata"]["resourceVersion"] = str(record.revision)
        new.pop("kind", None)
        new.pop("apiVersion", None)
        if new == old:
            return record
        if resource.generation and not subresource and _generation_counts(new, old):
            new["metadata"]["generation"] = old["metadata"].get("generation", 0) + 1
        if old["metadata"].get("deletionTimestamp") and not _is_held(new, old):
            return record if dry_run else self.store.remove(resource.storage, key, new)
        return self._write(resource, new, dry_run)

    def patch(
        self,
        resource: Resource,
        patch: Any,
        content_type: str,
        key: Key,
        subresource: str = "",
        *,
        dry_run: bool = False,
    ) -> Record:
        """Apply a patch in one of patching.FORMATS; return the stored object."""
        record = self.get(resource, key)
        current = msgspec.json.decode(render(resource, record))
        patched = apply_patch((resource.api_version, resource.kind), current, patch, content_type)
        return self.update(resource, patched, key, subresource, dry_run=dry_run)

    def apply(
        self,
        resource: Resource,
        config: Json,
        key: Key,
        subresource: str = "",
        *,
        name: str,
        force: bool = False,
        dry_run: bool = False,
    ) -> tuple[Record, bool]:
        """Apply a configuration as a manager with that name; return the stored object, and whether it was created.

        Raises ApiError 409 if other managers own a field that would change, unless `force`.
        """
        writer = Writer(name, Operation.APPLY)
        metadata = config["metadata"] = config.get("metadata") or {}
        if metadata.get("managedFields"):
            raise status.bad_request("metadata.managedFields must be nil")
        self._settle_name(metadata, key[1])
        record = self.store.get(resource.storage, key)
        if record is None and not subresource:
            return self.create(resource, config, key[0], dry_run=dry_run, writer=writer), True
        live = self.get(resource, key).decode()
        for part in ("status",) if "status" in resource.subresources and not subresource else ():
            config.pop(part, None)
        if subresource:
            config = {"metadata": {"name": key[1]}, subresource: config.get(subresource) or {}}
        owners = Owners(live["metadata"].get("managedFields") or [], timestamp())
        manager = Manager(name, Operation.APPLY, resource.api_version, subresource)
        result = apply_to(live, config, kind_of(resource), owners, manager, force=force)
        result["metadata"]["managedFields"] = owners.entries()
        result["metadata"]["resourceVersion"] = metadata.get("resourceVersion") or ""
        return self.update(resource, result, key, subresource, dry_run=dry_run, writer=writer), False

    def delete(self, resource: Resource, key: Key, options: Json | None = None) -> Record:
        """Delete an object, or begin its deletion: a pod is deleted after its grace period, an object with finalizers
        after the last is removed, a namespace after its content."""
        options = options or {}
        record = self.get(resource, key)
        obj = record.decode()
        metadata = obj["metadata"]
        self._check_preconditions(resource, record, metadata, options.get("preconditions") or {})
        if options.get("propagationPolicy") == "Orphan" or options.get("orphanDependents"):
            self._orphan(key[0], metadata["uid"])
        dry_run = bool(options.get("dryRun"))
        grace = self._grace(resource, obj, options)
        if grace or metadata.get("finalizers") or resource is _NAMESPACES:
            if metadata.get("deletionTimestamp") and metadata.get("deletionGracePeriodSeconds", 0) <= grace:
                return record
            until = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=grace)
            metadata["deletionTimestamp"] = until.strftime("%Y-%m-%dT%H:%M:%SZ")
            if resource is _NAMESPACES:
                obj["status"]["phase"] = "Terminating"
            else:
                metadata["deletionGracePeriodSeconds"] = grace
            return self._write(resource, obj, dry_run)
        return record if dry_run else self.store.remove(resource.storage, key, obj)

    # scale (autoscaling/v1)

    def get_scale(self, resource: Resource, key: Key) -> Json:
        """Return the Scale of a ReplicationController."""
        obj = self.get(resource, key).decode()
        wanted = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
        selector = ",".join(f"{k}={v}" for k, v in sorted((obj["spec"].get("selector") or {}).items()))
        return {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {k: obj["metadata"][k] for k in wanted},
            "spec": {"replicas": obj["spec"]["replicas"]},
            "status": {"replicas": obj.get("status", {}).get("replicas", 0), "selector": selector},
        }

    def set_scale(self, resource: Resource, scale: Json, key: Key) -> Json:
        """Set the replicas of a ReplicationController from a Scale; return the new Scale."""
        obj = self.get(resource, key).decode()
        obj["spec"]["replicas"] = (scale.get("spec") or {}).get("replicas") or 0
        obj["metadata"]["resourceVersion"] = (scale.get("metadata") or {}).get("resourceVersion") or ""
        self.update(resource, obj, key)
        return self.get_scale(resource, key)

    # parts

    @staticmethod
    def _settle_name(metadata: Json, name: str) -> None:
        if metadata.setdefault("name", name) != name:
            why = f"the name of the object ({metadata['name']}) does not match the name on the URL ({name})"
            raise status.bad_request(why)

    def _settle_namespace(self, resource: Resource, metadata: Json, namespace: str) -> None:
        if not resource.namespaced:
            metadata.pop("namespace", None)
            return
        given = metadata.get("namespace")
        if given and namespace and given != namespace:
            raise status.bad_request(
                f"the namespace of the provided object does not match the namespace sent on the request"
                f" ({given} and {namespace})"
            )
        metadata["namespace"] = given or namespace or "default"

    def _check_namespace(self, namespace: str) -> None:
        record = self.store.get("namespaces", ("", namespace))
        if record is None:
            raise status.not_found("namespaces", "", namespace)
        if record.fields.get("status.phase") == "Terminating":
            message = f"unable to create new content in namespace {namespace} because it is being terminated"
            raise status.ApiError(403, "Forbidden", message)

    @staticmethod
    def _check_name(resource: Resource, metadata: Json) -> None:
        errors = FieldErrors()
        name = metadata.get("name") or ""
        if not name:
            errors.required("metadata.name", "name or generateName is required")
        elif resource.plural == "services":
            if not dns_1035(name):
                errors.invalid("metadata.name", name, DNS_1035_MESSAGE)
        elif not dns_subdomain(name):
            errors.invalid("metadata.name", name, SUBDOMAIN_MESSAGE)
        errors.raise_if_any(resource.kind, resource.group, name)

    def _finish(self, resource: Resource, obj: Json, old: Json | None) -> None:
        if resource.plural == "services":
            if old is None:
                self._services.create(obj)
            else:
                self._services.update(obj, old)
            return
        errors = FieldErrors()
        CHECKS[resource.kind](obj, old, errors)
        errors.raise_if_any(resource.kind, resource.group, obj["metadata"]["name"])

    @staticmethod
    def _merge_parts(resource: Resource, obj: Json, old: Json, subresource: str) -> Json:
        """Return the object to store: a write of the status changes only the status, any other write everything except
        the status."""
        if subresource == "status":
            new = copy.deepcopy(old)
            new["status"] = obj.get("status") or {}
            return new
        new = obj
        if "status" in resource.subresources:
            new["status"] = copy.deepcopy(old.get("status", {}))
        for name in _KEPT_METADATA:
            if name in old["metadata"]:
                new["metadata"][name] = old["metadata"][name]
            else:
                new["metadata"].pop(name, None)
        for name in ("managedFields", "selfLink"):
            new["metadata"].pop(name, None)
        for name in ("labels", "annotations"):
            if not new["metadata"].get(name):
                new["metadata"].pop(name, None)
        return new

    def _write(self, resource: Resource, obj: Json, dry_run: bool) -> Record:
        if not dry_run:
            return self.store.put(resource.storage, obj)
        scratch = Store(history=1)
        scratch.revision = self.store.revision - 1
        return scratch.put(resource.storage, obj)

    @staticmethod
    def _check_preconditions(resource: Resource, record: Record, metadata: Json, wanted: Json) -> None:
        for name, is_now in (("uid", metadata["uid"]), ("resourceVersion", str(record.revision))):
            if wanted.get(name) not in {None, "", is_now}:
                why = f"Precondition failed: {name} in precondition: {wanted[name]}, in object meta: {is_now}"
                raise status.conflict(resource.plural, resource.group, metadata["name"], why)

    @staticmethod
    def _grace(resource: Resource, obj: Json, options: Json) -> int:
        if resource.plural != "pods" or not obj["spec"].get("nodeName"):
            return 0
        asked = options.get("gracePeriodSeconds")
        return int(obj["spec"].get("terminationGracePeriodSeconds", 30) if asked is None else asked)

    def _orphan(self, namespace: str, uid: str) -> None:
        for record in self.store.records("pods", namespace):
            obj = record.decode()
            owners = obj["metadata"].get("ownerReferences") or []
            left = [o for o in owners if o.get("uid") != uid]
            if len(left) != len(owners):
                obj["metadata"]["ownerReferences"] = left
                self.store.put("pods", obj)


def _is_held(new: Json, old: Json) -> bool:
    """Return whether a deleted object must still exist: it has a finalizer, or a pod's grace period is not over."""
    if new["metadata"].get("finalizers"):
        return True
    graceful = (old["metadata"].get("deletionGracePeriodSeconds") or 0) > 0
    return bool(old["metadata"].get("deletionTimestamp")) and graceful


def _generation_counts(new: Json, old: Json) -> bool:
    """The generation counts changes of the desired state, not of metadata or status."""
    return any(new.get(k) != old.get(k) for k in {*new, *old} - {"metadata", "status", "kind", "apiVersion"})
