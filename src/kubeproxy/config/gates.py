"""Feature gates that Kubernetes 1.36 knows, and the check of the ones that are set.

Clusters often give all components the same list, so every gate of the release is accepted, though only a few mean
anything to a proxy. A gate that has graduated is locked: it may be named, but only with its final value. KubeProxyIPVS
is of later releases (KEP-5495), for those who keep mode ipvs; here that mode needs no gate.
"""

from __future__ import annotations

from collections.abc import Mapping

from kubeproxy.config.messages import did_you_mean

LOGGING_ALPHA = "LoggingAlphaOptions"

PROXY_GATES = (
    ("AllAlpha", "ALPHA - default=false"),
    ("AllBeta", "BETA - default=false"),
    ("ComponentFlagz", "BETA - default=true"),
    ("ComponentStatusz", "BETA - default=true"),
    (LOGGING_ALPHA, "ALPHA - default=false"),
    ("LoggingBetaOptions", "BETA - default=true"),
    ("NativeHistograms", "ALPHA - default=false"),
    ("WatchListClient", "BETA - default=true"),
)
"""The gates that a proxy reads, as --help shows them."""

_FREE_NAMES = """
    AllAlpha AllBeta AllowDNSOnlyNodeCSR AllowInsecureKubeletCertificateSigningRequests
    AllowParsingUserUIDFromCertAuth AllowServiceExternalIPs AllowUnsafeMalformedObjectDeletion
    APIResponseCompression APIServerIdentity APIServingWithRoutine AuthorizePodWebsocketUpgradeCreatePermission
    CBORServingAndStorage ChangeContainerStatusOnKubeletRestart ClearingNominatedNodeNameAfterBinding
    CloudControllerManagerWatchBasedRoutesReconciliation CloudControllerManagerWebhook ClusterTrustBundle
    ClusterTrustBundleProjection ComponentFlagz ComponentStatusz ConcurrentWatchObjectDecode
    ConstrainedImpersonation ContainerCheckpoint ContainerRestartRules ContainerStopSignals
    ControllerManagerReleaseLeaderElectionLockOnExit CoordinatedLeaderElection CPUManagerPolicyAlphaOptions
    CPUManagerPolicyBetaOptions CRDObservedGenerationTracking CRIListStreaming CrossNamespaceVolumeDataSource
    CSIVolumeHealth CustomCPUCFSQuotaPeriod DeclarativeValidationBeta DeclarativeValidationTakeover
    DeploymentReplicaSetTerminatingReplicas DetectCacheInconsistency DisableCPUQuotaWithExclusiveCPUs
    DRAConsumableCapacity DRADeviceBindingConditions DRADeviceTaintRules DRADeviceTaints DRAExtendedResource
    DRAListTypeAttributes DRANodeAllocatableResources DRAPartitionableDevices DRAPrioritizedList
    DRAResourceClaimDeviceStatus DRAResourceClaimGranularStatusAuthorization DRAResourcePoolStatus
    DRASchedulerFilterTimeout DRAWorkloadResourceClaims EnvFiles EventedPLEG ExtendWebSocketsToKubelet
    GangScheduling GenericWorkload GracefulNodeShutdown GracefulNodeShutdownBasedOnPodPriority HostnameOverride
    HPAConfigurableTolerance HPAScaleToZero ImageVolumeWithDigest InformerResourceVersion
    InPlacePodLevelResourcesVerticalScaling InPlacePodVerticalScalingExclusiveCPUs
    InPlacePodVerticalScalingExclusiveMemory InPlacePodVerticalScalingInitContainers KMSv1
    KubeletCrashLoopBackOffMax KubeletEnsureSecretPulledImages KubeletInUserNamespace
    KubeletPodResourcesListUseActivePods KubeletRegistrationGetOnExistsOnly KubeletSeparateDiskGC
    KubeletServiceAccountTokenForCredentialProviders KubeProxyIPVS ListFromCacheSnapshot
    LocalStorageCapacityIsolationFSQuotaMonitoring LoggingAlphaOptions LoggingBetaOptions
    ManifestBasedAdmissionControlConfig MatchLabelKeysInPodTopologySpread
    MatchLabelKeysInPodTopologySpreadSelectorMerge MaxUnavailableStatefulSet MemoryQoS
    MutablePodResourcesForSuspendedJobs MutablePVNodeAffinity MutableSchedulingDirectivesForSuspendedJobs
    MutatingAdmissionPolicy NativeHistograms NodeDeclaredFeatures NominatedNodeNameForExpectation OpenAPIEnums
    OpportunisticBatching PersistentVolumeClaimUnusedSinceTime PLEGOnDemandRelist PodAndContainerStatsFromCRI
    PodCertificateRequest PodDeletionCost PodLevelResourceManagers PodLevelResources PodLogsQuerySplitStreams
    PodReadyToStartContainersCondition PodsAPI PodTopologyLabelsAdmission PortForwardWebsockets
    PreferAlignCpusByUncoreCache PreventStaticPodAPIReferences QOSReserved ReduceDefaultCrashLoopBackOffDecay
    RelaxedServiceNameValidation ReloadKubeletClientCAFile ReloadKubeletServerCertificateFile RemoteRequestHeaderUID
    ResourceHealthStatus ResourceHealthStatusMessage RestartAllContainersOnContainerExits
    RotateKubeletServerCertificate RuntimeClassInImageCriApi SchedulerAsyncAPICalls SchedulerAsyncPreemption
    SchedulerPopFromBackoffQ SELinuxMount ServiceAccountNodeAudienceRestriction ServiceCIDRStatusFieldWiping
    ShardedListAndWatch SizeBasedListCostEstimate StaleControllerConsistencyDaemonSet StaleControllerConsistencyJob
    StaleControllerConsistencyReplicaSet StaleControllerConsistencyStatefulSet StorageCapacityScoring
    StorageNamespaceIndex StorageVersionAPI StorageVersionHash StorageVersionMigrator StrictIPCIDRValidation
    StructuredAuthenticationConfigurationEgressSelector StructuredAuthenticationConfigurationJWKSMetrics
    TaintTolerationComparisonOperators TokenRequestServiceAccountUIDValidation TopologyAwareWorkloadScheduling
    TopologyManagerPolicyAlphaOptions TopologyManagerPolicyBetaOptions TranslateStreamCloseWebsocketRequests
    UnauthenticatedHTTP2DOSMitigation UnknownVersionInteroperabilityProxy UserNamespacesHostNetworkSupport
    VolumeLimitScaling WatchCacheInitializationPostStartHook WatchList WatchListClient WindowsCPUAndMemoryAffinity
    WindowsGracefulNodeShutdown WindowsHostNetwork WorkloadAwarePreemption WorkloadWithJob
"""

_LOCKED_ON_NAMES = """
    AggregatedDiscoveryRemoveBetaType AnonymousAuthConfigurableEndpoints AnyVolumeDataSource APIServerTracing
    AuthorizeNodeWithSelectors AuthorizeWithSelectors BtreeWatchCache ConsistentListFromCache ContextualLogging
    CPUManagerPolicyOptions CRDValidationRatcheting CSIServiceAccountTokenSecrets CustomResourceFieldSelectors
    DeclarativeValidation DisableAllocatorDualWrite DisableNodeKubeProxyVersion DRAAdminAccess
    DynamicResourceAllocation ExecProbeTimeout ExternalServiceAccountTokenSigner ImageMaximumGCAge ImageVolume
    InPlacePodVerticalScaling JobBackoffLimitPerIndex JobManagedBy JobPodReplacementPolicy JobSuccessPolicy
    KubeletCgroupDriverFromCRI KubeletFineGrainedAuthz KubeletPodResourcesDynamicResources KubeletPodResourcesGet
    KubeletPSI KubeletTracing LogarithmicScaleDown MatchLabelKeysInPodAffinity MultiCIDRServiceAllocator
    MutableCSINodeAllocatableCount NFTablesProxyMode NodeInclusionPolicyInPodTopologySpread NodeLogQuery NodeSwap
    OrderedNamespaceDeletion PodLifecycleSleepAction PodLifecycleSleepActionAllowZero PodObservedGenerationTracking
    PodSchedulingReadiness PreferSameTrafficDistribution ProcMountType RecoverVolumeExpansionFailure
    RecursiveReadOnlyMounts RelaxedDNSSearchValidation RelaxedEnvironmentVariableValidation
    ResilientWatchCacheInitialization RetryGenerateName SchedulerQueueingHints SELinuxChangePolicy
    SELinuxMountReadWriteOncePod SeparateTaintEvictionController ServiceAccountTokenJTI
    ServiceAccountTokenNodeBinding ServiceAccountTokenNodeBindingValidation ServiceAccountTokenPodNodeInfo
    SidecarContainers StreamingCollectionEncodingToJSON StreamingCollectionEncodingToProtobuf
    StructuredAuthenticationConfiguration SupplementalGroupsPolicy SystemdWatchdog TopologyManagerPolicyOptions
    UserNamespacesSupport VolumeAttributesClass WinDSR WinOverlay
"""

_LOCKED_OFF_NAMES = """
    AllowOverwriteTerminationGracePeriodSeconds GitRepoVolumeDriver SeparateCacheWatchRPC
"""

_LOCKED_ON = frozenset(_LOCKED_ON_NAMES.split())
_LOCKED_OFF = frozenset(_LOCKED_OFF_NAMES.split())
KNOWN_GATES = _LOCKED_ON | _LOCKED_OFF | frozenset(_FREE_NAMES.split())


def gate_problem(name: str, value: bool) -> str | None:
    """What is wrong with setting the gate to the value, or None."""
    if name not in KNOWN_GATES:
        return "unknown feature gate" + did_you_mean(name, KNOWN_GATES)
    locked = name in _LOCKED_ON
    if (locked or name in _LOCKED_OFF) and value is not locked:
        return f"cannot be set to {_word(value)}: the feature is locked to {_word(locked)} in Kubernetes 1.36"
    return None


def alpha_logging(gates: Mapping[str, bool]) -> bool:
    """Whether LoggingAlphaOptions is on: by name, or by AllAlpha."""
    return gates.get(LOGGING_ALPHA, gates.get("AllAlpha", False))


def _word(value: bool) -> str:
    return "true" if value else "false"
