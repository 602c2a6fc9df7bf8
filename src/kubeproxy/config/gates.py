"""The feature gates of Kubernetes 1.36: stage, default, lock, and the effects of their settings. Source:
test/compatibility_lifecycle/reference of Kubernetes, with the gates of client-go and component-base.

Clusters often pass the same list to all components, so every gate of the release is accepted, although a proxy reads
only a few; NOT_SWITCHED explains why the other gates of the Go kube-proxy have no effect here. A locked gate can only
be set to its default. Gates of later releases of the proxy (LATER) are accepted, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple

from kubeproxy.config.messages import bool_text, did_you_mean


class Stage(StrEnum):
    """The stage of a feature, with the value of the label `stage` in the metric kubernetes_feature_enabled."""

    ALPHA = "ALPHA"
    BETA = "BETA"
    GA = ""
    DEPRECATED = "DEPRECATED"


class Gate(NamedTuple):
    """A gate's stage and default, and whether it is locked to the default."""

    stage: Stage
    default: bool
    locked: bool


_TABLE = {
    Gate(Stage.ALPHA, default=False, locked=False): """
    AllAlpha AllowUnsafeMalformedObjectDeletion APIServingWithRoutine CBORServingAndStorage ClientsAllowCBOR
    ClientsPreferCBOR CloudControllerManagerWatchBasedRoutesReconciliation CloudControllerManagerWebhook
    ContainerStopSignals ControllerManagerReleaseLeaderElectionLockOnExit CPUManagerPolicyAlphaOptions
    CRIListStreaming CrossNamespaceVolumeDataSource CSIVolumeHealth DRAListTypeAttributes
    DRANodeAllocatableResources DRAResourcePoolStatus DRAWorkloadResourceClaims EventedPLEG GangScheduling
    GenericWorkload HPAScaleToZero ImageVolumeWithDigest InPlacePodVerticalScalingExclusiveCPUs
    InPlacePodVerticalScalingExclusiveMemory KubeletInUserNamespace LoggingAlphaOptions
    ManifestBasedAdmissionControlConfig MemoryQoS MutablePVNodeAffinity NativeHistograms
    PersistentVolumeClaimUnusedSinceTime PodAndContainerStatsFromCRI PodLevelResourceManagers
    PodLogsQuerySplitStreams PodsAPI QOSReserved ReduceDefaultCrashLoopBackOffDecay RuntimeClassInImageCriApi
    ShardedListAndWatch StorageCapacityScoring StorageVersionAPI TaintTolerationComparisonOperators
    TopologyAwareWorkloadScheduling TopologyManagerPolicyAlphaOptions UserNamespacesHostNetworkSupport
    VolumeLimitScaling WindowsCPUAndMemoryAffinity WorkloadAwarePreemption WorkloadWithJob
    """,
    Gate(Stage.BETA, default=True, locked=False): """
    AllowParsingUserUIDFromCertAuth APIResponseCompression APIServerIdentity AtomicFIFO
    AuthorizePodWebsocketUpgradeCreatePermission ClearingNominatedNodeNameAfterBinding ClientsAllowCARotation
    ClientsAllowTLSCacheGC ComponentFlagz ComponentStatusz ConstrainedImpersonation ContainerCheckpoint
    ContainerRestartRules ContextualLogging CPUManagerPolicyBetaOptions CRDObservedGenerationTracking
    DeclarativeValidationBeta DeploymentReplicaSetTerminatingReplicas DetectCacheInconsistency DRAConsumableCapacity
    DRADeviceBindingConditions DRADeviceTaints DRAExtendedResource DRAPartitionableDevices
    DRAResourceClaimDeviceStatus DRAResourceClaimGranularStatusAuthorization DRASchedulerFilterTimeout EnvFiles
    ExtendWebSocketsToKubelet GracefulNodeShutdown GracefulNodeShutdownBasedOnPodPriority HostnameOverride
    HPAConfigurableTolerance InOrderInformersBatchProcess InPlacePodLevelResourcesVerticalScaling
    InPlacePodVerticalScalingInitContainers KubeletCrashLoopBackOffMax KubeletEnsureSecretPulledImages
    KubeletSeparateDiskGC KubeletServiceAccountTokenForCredentialProviders ListFromCacheSnapshot LoggingBetaOptions
    MatchLabelKeysInPodTopologySpread MatchLabelKeysInPodTopologySpreadSelectorMerge
    MutablePodResourcesForSuspendedJobs MutableSchedulingDirectivesForSuspendedJobs NodeDeclaredFeatures
    NominatedNodeNameForExpectation OpenAPIEnums OpportunisticBatching PLEGOnDemandRelist PodDeletionCost
    PodLevelResources PodReadyToStartContainersCondition PodTopologyLabelsAdmission PortForwardWebsockets
    PreferAlignCpusByUncoreCache PreventStaticPodAPIReferences RelaxedServiceNameValidation
    ReloadKubeletClientCAFile ReloadKubeletServerCertificateFile RemoteRequestHeaderUID ResourceHealthStatus
    ResourceHealthStatusMessage RestartAllContainersOnContainerExits RotateKubeletServerCertificate
    SchedulerAsyncPreemption SchedulerPopFromBackoffQ ServiceAccountNodeAudienceRestriction
    SizeBasedListCostEstimate StaleControllerConsistencyDaemonSet StaleControllerConsistencyJob
    StaleControllerConsistencyReplicaSet StaleControllerConsistencyStatefulSet StatefulSetSemanticRevisionComparison
    StorageVersionHash StrictIPCIDRValidation StructuredAuthenticationConfigurationEgressSelector
    StructuredAuthenticationConfigurationJWKSMetrics TokenRequestServiceAccountUIDValidation
    TopologyManagerPolicyBetaOptions TranslateStreamCloseWebsocketRequests UnauthenticatedHTTP2DOSMitigation
    UnknownVersionInteroperabilityProxy UnlockWhileProcessingFIFO WatchCacheInitializationPostStartHook WatchList
    WatchListClient WindowsGracefulNodeShutdown
    """,
    Gate(Stage.BETA, default=False, locked=False): """
    AllBeta ClusterTrustBundle ClusterTrustBundleProjection ConcurrentWatchObjectDecode CoordinatedLeaderElection
    DRADeviceTaintRules LocalStorageCapacityIsolationFSQuotaMonitoring MaxUnavailableStatefulSet
    PodCertificateRequest SchedulerAsyncAPICalls SELinuxMount StorageVersionMigrator
    """,
    Gate(Stage.GA, default=True, locked=False): """
    AllowServiceExternalIPs CustomCPUCFSQuotaPeriod DRAPrioritizedList MutatingAdmissionPolicy
    """,
    Gate(Stage.GA, default=True, locked=True): """
    AnonymousAuthConfigurableEndpoints AnyVolumeDataSource APIServerTracing AuthorizeNodeWithSelectors
    AuthorizeWithSelectors BtreeWatchCache ConsistentListFromCache CPUManagerPolicyOptions CRDValidationRatcheting
    CSIServiceAccountTokenSecrets CustomResourceFieldSelectors DeclarativeValidation DisableAllocatorDualWrite
    DRAAdminAccess DynamicResourceAllocation ExecProbeTimeout ExternalServiceAccountTokenSigner ImageMaximumGCAge
    ImageVolume InOrderInformers InPlacePodVerticalScaling JobBackoffLimitPerIndex JobManagedBy
    JobPodReplacementPolicy JobSuccessPolicy KubeletCgroupDriverFromCRI KubeletFineGrainedAuthz
    KubeletPodResourcesDynamicResources KubeletPodResourcesGet KubeletPSI KubeletTracing LogarithmicScaleDown
    MatchLabelKeysInPodAffinity MultiCIDRServiceAllocator MutableCSINodeAllocatableCount NFTablesProxyMode
    NodeInclusionPolicyInPodTopologySpread NodeLogQuery NodeSwap OrderedNamespaceDeletion PodLifecycleSleepAction
    PodLifecycleSleepActionAllowZero PodObservedGenerationTracking PodSchedulingReadiness
    PreferSameTrafficDistribution ProcMountType RecoverVolumeExpansionFailure RecursiveReadOnlyMounts
    RelaxedDNSSearchValidation RelaxedEnvironmentVariableValidation ResilientWatchCacheInitialization
    RetryGenerateName SchedulerQueueingHints SELinuxChangePolicy SELinuxMountReadWriteOncePod
    SeparateTaintEvictionController ServiceAccountTokenJTI ServiceAccountTokenNodeBinding
    ServiceAccountTokenNodeBindingValidation ServiceAccountTokenPodNodeInfo SidecarContainers
    StreamingCollectionEncodingToJSON StreamingCollectionEncodingToProtobuf StructuredAuthenticationConfiguration
    SupplementalGroupsPolicy SystemdWatchdog TopologyManagerPolicyOptions UserNamespacesSupport
    VolumeAttributesClass WinDSR WinOverlay
    """,
    Gate(Stage.DEPRECATED, default=True, locked=False): """
    DisableCPUQuotaWithExclusiveCPUs InformerResourceVersion KubeletPodResourcesListUseActivePods
    ServiceCIDRStatusFieldWiping StorageNamespaceIndex
    """,
    Gate(Stage.DEPRECATED, default=False, locked=False): """
    AllowDNSOnlyNodeCSR AllowInsecureKubeletCertificateSigningRequests ChangeContainerStatusOnKubeletRestart
    DeclarativeValidationTakeover KMSv1 KubeletRegistrationGetOnExistsOnly WindowsHostNetwork
    """,
    Gate(Stage.DEPRECATED, default=True, locked=True): """
    AggregatedDiscoveryRemoveBetaType DisableNodeKubeProxyVersion
    """,
    Gate(Stage.DEPRECATED, default=False, locked=True): """
    AllowOverwriteTerminationGracePeriodSeconds GitRepoVolumeDriver SeparateCacheWatchRPC
    """,
}
LATER: dict[str, Gate] = {
    # KEP-5495: deprecated from 1.37 on, off in 1.40, removed with ipvs mode in 1.43.
    "KubeProxyIPVS": Gate(Stage.DEPRECATED, default=True, locked=False),
    # 1.37 (kubernetes pull request 137536).
    "NFTablesNetlink": Gate(Stage.BETA, default=True, locked=False),
    # KEP-6032: alpha in 1.37, beta and on in 1.38.
    "KubeProxyNFTablesLocalhostNodePorts": Gate(Stage.ALPHA, default=False, locked=False),
}
"""Gates of later releases of the proxy that 1.36 does not have."""

GATES: Mapping[str, Gate] = {name: gate for gate, names in _TABLE.items() for name in names.split()} | LATER
"""Every gate by its name."""

_READ_HERE = """
    AllAlpha AllBeta AllowServiceExternalIPs ComponentFlagz ComponentStatusz KubeProxyIPVS
    KubeProxyNFTablesLocalhostNodePorts LoggingAlphaOptions LoggingBetaOptions WatchListClient
"""
_QUEUES = "the queues of Kubernetes' client library are not used"
_CBOR = "requests to the API server use JSON"
NOT_SWITCHED: Mapping[str, tuple[bool, str]] = {
    "AtomicFIFO": (True, _QUEUES),
    "ClientsAllowCARotation": (True, "a changed file of certificate authorities is used from the next connection on"),
    "ClientsAllowCBOR": (False, _CBOR),
    "ClientsAllowTLSCacheGC": (True, "this proxy has no cache of TLS settings"),
    "ClientsPreferCBOR": (False, _CBOR),
    "ContextualLogging": (True, "log lines always name their objects"),
    "InformerResourceVersion": (True, _QUEUES),
    "InOrderInformersBatchProcess": (True, _QUEUES),
    "NativeHistograms": (False, "metrics are served as text, which cannot contain native histograms"),
    "NFTablesNetlink": (True, "rules are always read over netlink"),
    "UnlockWhileProcessingFIFO": (True, _QUEUES),
}
"""Gates that change the Go kube-proxy but not this proxy: the setting that corresponds to this proxy, and the
reason."""

_ALL_OF = {Stage.ALPHA: "AllAlpha", Stage.BETA: "AllBeta"}


def gate_problem(name: str, value: bool) -> str | None:
    """Return the error of setting a gate to a value, as in other Kubernetes components; None for a valid value."""
    gate = GATES.get(name)
    if gate is None:
        return f"unrecognized feature gate: {name}" + did_you_mean(name, GATES.keys())
    if gate.locked and value is not gate.default:
        return f"cannot set feature gate {name} to {bool_text(value)}, feature is locked to {bool_text(gate.default)}"
    return None


def gate_warnings(gates: Mapping[str, bool]) -> Iterator[str]:
    """Yield warnings about valid gates that a later release will remove, or that have no effect here."""
    for name, value in sorted(gates.items()):
        stage = GATES[name].stage
        if stage in (Stage.GA, Stage.DEPRECATED):
            kind = stage.lower() or "GA"
            yield f"Setting {kind} feature gate {name}={bool_text(value)}. It will be removed in a future release."
    for name, (ours, why) in NOT_SWITCHED.items():
        asked = gates.keys() & {name, _ALL_OF.get(GATES[name].stage)}
        if asked and gate_enabled(gates, name) is not ours:
            yield f"Feature gate {name}={bool_text(not ours)} has no effect here: {why}."


def gate_enabled(gates: Mapping[str, bool], name: str) -> bool:
    """Return whether a gate is on. `gates` must be valid; AllAlpha and AllBeta set the gates that `gates` lacks."""
    gate = GATES[name]
    together = _ALL_OF.get(gate.stage)
    usual = gate.default if together is None or gate.locked or name == together else gates.get(together, gate.default)
    return gates.get(name, usual)


def gate_states(gates: Mapping[str, bool]) -> Iterator[tuple[str, Stage, bool]]:
    """Yield the name and stage of every gate, and whether the gate is on; `gates` must be valid."""
    return ((name, gate.stage, gate_enabled(gates, name)) for name, gate in GATES.items())


def proxy_gates() -> Iterator[tuple[str, str]]:
    """Yield the gates that a proxy reads, each with its stage and default in the form of --help."""
    for name in _READ_HERE.split():
        gate = GATES[name]
        stage = f"{gate.stage} - " if gate.stage else ""
        yield name, f"{stage}default={bool_text(gate.default)}"
