"""The fields of each kind, for the validation of JSON, the removal of unknown fields, patches, server-side apply and
OpenAPI.

Contains only tables; their types are in fieldtypes.py. Open structs keep unnamed fields (a Pod has hundreds of fields
that nothing here reads). Source: core/v1, discovery.k8s.io/v1, networking.k8s.io/v1, events.k8s.io/v1.
"""

from __future__ import annotations

from lab.apiserver.fieldtypes import (
    BOOL,
    INT32,
    INT64,
    INT_OR_STRING,
    LABEL_SELECTOR,
    QUANTITY,
    STRING,
    STRING_MAP,
    STRING_SET,
    STRINGS,
    TIME,
    ListOf,
    MapOf,
    Struct,
    Type,
    list_map,
    named,
)

MICRO_TIME = named("v1.MicroTime")

OWNER = Struct(
    "v1.OwnerReference",
    {
        "apiVersion": STRING,
        "kind": STRING,
        "name": STRING,
        "uid": named("types.UID"),
        "controller": BOOL,
        "blockOwnerDeletion": BOOL,
    },
    is_atomic=True,
)
OBJECT_META = Struct(
    "v1.ObjectMeta",
    {
        "name": STRING,
        "generateName": STRING,
        "namespace": STRING,
        "selfLink": STRING,
        "uid": named("types.UID"),
        "resourceVersion": STRING,
        "generation": INT64,
        "creationTimestamp": TIME,
        "deletionTimestamp": TIME,
        "deletionGracePeriodSeconds": INT64,
        "labels": STRING_MAP,
        "annotations": STRING_MAP,
        "ownerReferences": list_map(OWNER, "uid"),
        "finalizers": STRING_SET,
        "managedFields": ListOf(Struct("v1.ManagedFieldsEntry", {}, is_open=True)),
    },
)
CONDITION = Struct(
    "v1.Condition",
    {
        "type": STRING,
        "status": named("v1.ConditionStatus"),
        "observedGeneration": INT64,
        "lastHeartbeatTime": TIME,
        "lastProbeTime": TIME,
        "lastTransitionTime": TIME,
        "reason": STRING,
        "message": STRING,
    },
)
CONDITIONS = list_map(CONDITION, "type")
OBJECT_REFERENCE = Struct(
    "v1.ObjectReference",
    {
        "kind": STRING,
        "namespace": STRING,
        "name": STRING,
        "uid": named("types.UID"),
        "apiVersion": STRING,
        "resourceVersion": STRING,
        "fieldPath": STRING,
    },
    is_atomic=True,
)

SERVICE_PORT = Struct(
    "v1.ServicePort",
    {
        "name": STRING,
        "protocol": named("v1.Protocol"),
        "appProtocol": STRING,
        "port": INT32,
        "targetPort": INT_OR_STRING,
        "nodePort": INT32,
    },
)
SERVICE_SPEC = Struct(
    "v1.ServiceSpec",
    {
        "ports": list_map(SERVICE_PORT, "port", "protocol"),
        "selector": LABEL_SELECTOR,
        "clusterIP": STRING,
        "clusterIPs": STRINGS,
        "type": named("v1.ServiceType"),
        "externalIPs": STRINGS,
        "sessionAffinity": named("v1.ServiceAffinity"),
        "loadBalancerIP": STRING,
        "loadBalancerSourceRanges": STRINGS,
        "externalName": STRING,
        "externalTrafficPolicy": named("v1.ServiceExternalTrafficPolicy"),
        "healthCheckNodePort": INT32,
        "publishNotReadyAddresses": BOOL,
        "sessionAffinityConfig": Struct(
            "v1.SessionAffinityConfig",
            {"clientIP": Struct("v1.ClientIPConfig", {"timeoutSeconds": INT32}, is_pointer=True)},
            is_pointer=True,
        ),
        "ipFamilies": ListOf(named("v1.IPFamily")),
        "ipFamilyPolicy": named("v1.IPFamilyPolicy"),
        "allocateLoadBalancerNodePorts": BOOL,
        "loadBalancerClass": STRING,
        "internalTrafficPolicy": named("v1.ServiceInternalTrafficPolicy"),
        "trafficDistribution": STRING,
    },
)
PORT_STATUS = Struct("v1.PortStatus", {"port": INT32, "protocol": named("v1.Protocol"), "error": STRING})
INGRESS = Struct(
    "v1.LoadBalancerIngress",
    {"ip": STRING, "hostname": STRING, "ipMode": named("v1.LoadBalancerIPMode"), "ports": ListOf(PORT_STATUS)},
)
SERVICE_STATUS = Struct(
    "v1.ServiceStatus",
    {"loadBalancer": Struct("v1.LoadBalancerStatus", {"ingress": ListOf(INGRESS)}), "conditions": CONDITIONS},
)

CONTAINER_PORT = Struct(
    "v1.ContainerPort",
    {"name": STRING, "hostPort": INT32, "containerPort": INT32, "protocol": named("v1.Protocol"), "hostIP": STRING},
)
CONTAINER = Struct(
    "v1.Container",
    {
        "name": STRING,
        "image": STRING,
        "command": STRINGS,
        "args": STRINGS,
        "ports": list_map(CONTAINER_PORT, "containerPort", "protocol"),
        "env": list_map(Struct("v1.EnvVar", {"name": STRING, "value": STRING}, is_open=True), "name"),
        "readinessProbe": Struct("v1.Probe", {}, is_open=True, is_pointer=True),
    },
    is_open=True,
)
POD_SPEC = Struct(
    "v1.PodSpec",
    {
        "containers": list_map(CONTAINER, "name", is_required=True),
        "nodeName": STRING,
        "nodeSelector": LABEL_SELECTOR,
        "terminationGracePeriodSeconds": INT64,
        "hostNetwork": BOOL,
        "restartPolicy": named("v1.RestartPolicy"),
    },
    is_open=True,
)
POD_STATUS = Struct(
    "v1.PodStatus",
    {
        "phase": named("v1.PodPhase"),
        "conditions": CONDITIONS,
        "podIP": STRING,
        "podIPs": list_map(Struct("v1.PodIP", {"ip": STRING}), "ip"),
        "hostIP": STRING,
    },
    is_open=True,
)
POD_TEMPLATE = Struct("v1.PodTemplateSpec", {"metadata": OBJECT_META, "spec": POD_SPEC}, is_pointer=True)

NODE_SPEC = Struct(
    "v1.NodeSpec",
    {
        "podCIDR": STRING,
        "podCIDRs": STRING_SET,
        "providerID": STRING,
        "unschedulable": BOOL,
        "taints": ListOf(
            Struct("v1.Taint", {"key": STRING, "value": STRING, "effect": named("v1.TaintEffect"), "timeAdded": TIME})
        ),
    },
    is_open=True,
)
NODE_ADDRESS = Struct("v1.NodeAddress", {"type": named("v1.NodeAddressType"), "address": STRING})
NODE_STATUS = Struct(
    "v1.NodeStatus",
    {
        "addresses": list_map(NODE_ADDRESS, "type"),
        "conditions": CONDITIONS,
        "capacity": MapOf(QUANTITY),
        "allocatable": MapOf(QUANTITY),
    },
    is_open=True,
)

HINTS = Struct(
    "v1.EndpointHints",
    {
        "forZones": ListOf(Struct("v1.ForZone", {"name": STRING})),
        "forNodes": ListOf(Struct("v1.ForNode", {"name": STRING})),
    },
)
ENDPOINT = Struct(
    "v1.Endpoint",
    {
        "addresses": STRINGS,
        "conditions": Struct("v1.EndpointConditions", {"ready": BOOL, "serving": BOOL, "terminating": BOOL}),
        "hostname": STRING,
        "targetRef": OBJECT_REFERENCE,
        "deprecatedTopology": STRING_MAP,
        "nodeName": STRING,
        "zone": STRING,
        "hints": HINTS,
    },
)
ENDPOINT_PORT = Struct(
    "v1.EndpointPort", {"name": STRING, "protocol": named("v1.Protocol"), "port": INT32, "appProtocol": STRING}
)
ENDPOINT_ADDRESS = Struct(
    "v1.EndpointAddress",
    {"ip": STRING, "hostname": STRING, "nodeName": STRING, "targetRef": OBJECT_REFERENCE},
    is_atomic=True,
)
ENDPOINT_SUBSET = Struct(
    "v1.EndpointSubset",
    {
        "addresses": ListOf(ENDPOINT_ADDRESS),
        "notReadyAddresses": ListOf(ENDPOINT_ADDRESS),
        "ports": ListOf(ENDPOINT_PORT),
    },
)
LEASE_SPEC = Struct(
    "v1.LeaseSpec",
    {
        "holderIdentity": STRING,
        "leaseDurationSeconds": INT32,
        "acquireTime": MICRO_TIME,
        "renewTime": MICRO_TIME,
        "leaseTransitions": INT32,
        "strategy": named("v1.CoordinatedLeaseStrategy"),
        "preferredHolder": STRING,
    },
)
EVENT_SERIES = Struct("v1.EventSeries", {"count": INT32, "lastObservedTime": TIME}, is_pointer=True)
EVENT_SOURCE = Struct("v1.EventSource", {"component": STRING, "host": STRING})

_TYPE_META: dict[str, Type] = {"kind": STRING, "apiVersion": STRING, "metadata": OBJECT_META}


def _kind(name: str, **fields: Type) -> Struct:
    return Struct(f"v1.{name}", {**_TYPE_META, **fields})


KINDS: dict[tuple[str, str], Struct] = {
    ("v1", "Namespace"): _kind(
        "Namespace",
        spec=Struct("v1.NamespaceSpec", {"finalizers": STRINGS}),
        status=Struct("v1.NamespaceStatus", {"phase": STRING, "conditions": CONDITIONS}),
    ),
    ("v1", "Node"): _kind("Node", spec=NODE_SPEC, status=NODE_STATUS),
    ("v1", "Pod"): _kind("Pod", spec=POD_SPEC, status=POD_STATUS),
    ("v1", "Service"): _kind("Service", spec=SERVICE_SPEC, status=SERVICE_STATUS),
    ("v1", "ReplicationController"): _kind(
        "ReplicationController",
        spec=Struct(
            "v1.ReplicationControllerSpec",
            {"replicas": INT32, "minReadySeconds": INT32, "selector": LABEL_SELECTOR, "template": POD_TEMPLATE},
        ),
        status=Struct("v1.ReplicationControllerStatus", {"replicas": INT32}, is_open=True),
    ),
    ("v1", "ConfigMap"): _kind("ConfigMap", data=STRING_MAP, binaryData=STRING_MAP, immutable=BOOL),
    ("v1", "Endpoints"): _kind("Endpoints", subsets=ListOf(ENDPOINT_SUBSET)),
    ("coordination.k8s.io/v1", "Lease"): _kind("Lease", spec=LEASE_SPEC),
    ("v1", "ServiceAccount"): Struct("v1.ServiceAccount", dict(_TYPE_META), is_open=True),
    ("v1", "Event"): _kind(
        "Event",
        involvedObject=OBJECT_REFERENCE,
        reason=STRING,
        message=STRING,
        source=EVENT_SOURCE,
        firstTimestamp=TIME,
        lastTimestamp=TIME,
        count=INT32,
        type=STRING,
        eventTime=MICRO_TIME,
        series=EVENT_SERIES,
        action=STRING,
        related=OBJECT_REFERENCE,
        reportingComponent=STRING,
        reportingInstance=STRING,
    ),
    ("events.k8s.io/v1", "Event"): _kind(
        "Event",
        eventTime=MICRO_TIME,
        series=EVENT_SERIES,
        reportingController=STRING,
        reportingInstance=STRING,
        action=STRING,
        reason=STRING,
        regarding=OBJECT_REFERENCE,
        related=OBJECT_REFERENCE,
        note=STRING,
        type=STRING,
        deprecatedSource=EVENT_SOURCE,
        deprecatedFirstTimestamp=TIME,
        deprecatedLastTimestamp=TIME,
        deprecatedCount=INT32,
    ),
    ("discovery.k8s.io/v1", "EndpointSlice"): _kind(
        "EndpointSlice",
        addressType=named("v1.AddressType"),
        endpoints=ListOf(ENDPOINT, is_required=True),
        ports=ListOf(ENDPOINT_PORT, is_required=True),
    ),
    ("networking.k8s.io/v1", "ServiceCIDR"): _kind(
        "ServiceCIDR",
        spec=Struct("v1.ServiceCIDRSpec", {"cidrs": STRINGS}),
        status=Struct("v1.ServiceCIDRStatus", {"conditions": CONDITIONS}),
    ),
    ("autoscaling/v1", "Scale"): _kind(
        "Scale",
        spec=Struct("v1.ScaleSpec", {"replicas": INT32}),
        status=Struct("v1.ScaleStatus", {"replicas": INT32, "selector": STRING}),
    ),
}
