"""The pod that runs a stage, and that of the driver. Its process finds the plan in PLAN_FOLDER, may write
to SCRATCH, CACHE and /tmp, and reads the variables of `docs/reference/environment.md`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from posixpath import normpath
from typing import Any
from urllib.parse import unquote, urlsplit

from mlpipe._core import environment
from mlpipe._core.errors import RenderError
from mlpipe.plan.cluster import ClusterPlan, Component, PodNetwork, SecretKey
from mlpipe.plan.plan import Plan
from mlpipe.plan.work import TrainPlan
from mlpipe.render.names import PLAN, gang_name

PLAN_FOLDER, SCRATCH, CACHE = "/mlpipe/plan", "/mlpipe/scratch", "/mlpipe/cache"
CA_FOLDER, IDENTITY_FOLDER, NETWORK_FOLDER = "/mlpipe/ca", "/mlpipe/identity", "/mlpipe/network"
TOKEN_SECONDS = 3600  # of a token for the store; the kubelet renews it after four fifths of that
CLAIM = "gpus"  # a pod's ResourceClaim
SHARING = ("mps", "time-slicing")  # as the nodes' label says it
CONTAINER = "worker"  # and the JobSet's job
TRAINJOBS_CONTAINER = "node"  # the same, as Kubeflow Trainer wants both called
METRICS_PORT = 9400  # the base port where the pipeline leaves it open: a PodMonitor must know it
RENDEZVOUS_PORT = 29500  # torchrun's own default
USER = 10001  # above the ids of people on a node (CKV_K8S_40)
GRACE_SECONDS = 30  # after torchrun's own deadline: the last log lines and the outcome
# Of a pod whose stage does not say: every node has the first, and none is filled beyond the second.
DISK_REQUEST_BYTES, DISK_LIMIT_BYTES = 2 * 2**30, 64 * 2**30
# The driver keeps a report and pieces of the store.
DRIVER_DISK_REQUEST_BYTES, DRIVER_DISK_LIMIT_BYTES = 256 * 2**20, 4 * 2**30
# A driver or coordinator holds no state: it is quicker to start another than to wait for its node.
NODE_LOST_SECONDS = 30
_LEAVES_LOST_NODES = [
    {
        "key": f"node.kubernetes.io/{state}",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": NODE_LOST_SECONDS,
    }
    for state in ("not-ready", "unreachable")
]
COORDINATOR_BYTES = 256 * 2**20
_NO_PROXY = ("localhost", "127.0.0.1", ".svc", ".cluster.local")
_DISK = "ephemeral-storage"
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_NODE = rf"{_LABEL}(\.{_LABEL})*"  # a DNS subdomain, as RFC 1123 has it
Json = dict[str, Any]


def escaped(text: str) -> str:
    """For commands, arguments and values of variables, where Kubernetes expands `$(X)` and halves `$$`."""
    return text.replace("$", "$$")


def worker_template(
    plan: Plan,
    cluster: ClusterPlan,
    labels: Json,
    config: str | None,
    rendezvous: str,
    module: str | None = None,
) -> Json:
    """The pod template of a stage. `config`: ConfigMap with the plan; None: the pods bring it along.
    `rendezvous`: host of the first pod. `module`: what runs there, if not the stage's own."""
    options = ["--plan", f"{PLAN_FOLDER}/plan.json", "--scratch", SCRATCH]
    container = _container(cluster, CONTAINER, ["-P", "-m", module or plan.kind.module, *options])
    container["env"] = _worker_env(plan, cluster, rendezvous)
    if cluster.env_from:
        keys = {"secret": "secretRef", "config_map": "configMapRef"}
        container["envFrom"] = [{keys[source.kind]: {"name": source.name}} for source in cluster.env_from]
    port = _metrics_port(plan)
    if port is not None:
        container["ports"] = [
            {"name": f"metrics-{i}" if i else "metrics", "containerPort": port + i}
            for i in range(plan.launch.nproc_per_node)
        ]
    container["resources"] = _amounts(plan, cluster)
    if cluster.rdma is not None and plan.launch.num_nodes > 1:
        container["securityContext"]["capabilities"]["add"] = ["IPC_LOCK"]  # pinned memory
    if cluster.network is not None and cluster.network.pinned_memory:
        container["securityContext"]["capabilities"]["add"] = ["IPC_LOCK"]
    account = cluster.service_account
    disk_bytes = cluster.disk_bytes or DISK_LIMIT_BYTES
    spec = _pod_spec(plan.store_url, cluster, container, account, disk_bytes, token=False)
    own_plan = {"path": "plan.json", "fieldRef": {"fieldPath": f"metadata.annotations['{PLAN}']"}}
    source = {"downwardAPI": {"items": [own_plan]}} if config is None else {"configMap": {"name": config}}
    _mount(spec, "plan", PLAN_FOLDER, source, read_only=True)
    own = _own_volume(cluster)
    _mount(spec, "scratch", SCRATCH, own or _empty(disk_bytes), "scratch" if own else None)
    shm = {"medium": "Memory", "sizeLimit": quantity(cluster.shm_bytes)}
    _mount(spec, "shm", "/dev/shm", {"emptyDir": shm})
    spec["restartPolicy"] = "Never"
    spec["terminationGracePeriodSeconds"] = int(plan.launch.shutdown_seconds) + GRACE_SECONDS
    if cluster.gpu_claims is not None:
        spec["resourceClaims"] = [{"name": CLAIM, "resourceClaimTemplateName": gang_name(plan)}]
    _place(spec, plan, cluster, labels)
    annotations = {
        "sidecar.istio.io/inject": "false",  # a sidecar keeps a Job from completing
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "karpenter.sh/do-not-disrupt": "true",
    }
    if cluster.network is not None:
        _network(spec, annotations, cluster.network)
    return {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec}


def _empty(num_bytes: int) -> Json:
    return {"emptyDir": {"sizeLimit": quantity(num_bytes)}}


def _own_volume(cluster: ClusterPlan) -> Json | None:
    """Which comes and ends with the pod."""
    scratch = cluster.scratch
    if scratch is None:
        return None
    claim: Json = {"accessModes": ["ReadWriteOnce"]}
    if scratch.storage_class is not None:
        claim["storageClassName"] = scratch.storage_class
    claim["resources"] = {"requests": {"storage": quantity(scratch.size_bytes)}}
    return {"ephemeral": {"volumeClaimTemplate": {"spec": claim}}}


def _mount_cache(spec: Json, cluster: ClusterPlan, disk_bytes: int) -> None:
    """In what outlives the pod, else in its own volume, else on its node."""
    if cluster.cache is not None:
        claim = {"persistentVolumeClaim": {"claimName": cluster.cache.claim}}
        _mount(spec, "cache", CACHE, claim, cluster.cache.sub_path)
    elif (own := _own_volume(cluster)) is not None:
        _mount(spec, "scratch", CACHE, own, "cache")
    else:
        _mount(spec, "cache", CACHE, _empty(disk_bytes))


def _network(spec: Json, annotations: Json, network: PodNetwork) -> None:
    annotations |= dict(sorted(network.annotations.items()))
    if network.hugepages_bytes:  # they count only for a container that mounts them
        _mount(spec, "hugepages", "/dev/hugepages", {"emptyDir": {"medium": "HugePages-2Mi"}})
    if network.topology is not None:
        items = [{"key": network.topology.key, "path": "topology.xml"}]
        source = {"configMap": {"name": network.topology.config_map, "items": items}}
        _mount(spec, "network", NETWORK_FOLDER, source, read_only=True)
        spec["containers"][0]["env"].append(
            {"name": "NCCL_TOPO_FILE", "value": f"{NETWORK_FOLDER}/topology.xml"}
        )


def coordinator_template(plan: Plan, cluster: ClusterPlan, labels: Json, config: str) -> Json:
    """The pod template of the process in which the replicas of an elastic training meet: no GPU, little of
    the rest. It goes to another node soon after its own was lost."""
    small = cluster.of_run()._replace(
        form="indexed-job",
        cpus=0.1,
        memory_bytes=COORDINATOR_BYTES,
        shm_bytes=2**20,
        disk_bytes=DRIVER_DISK_REQUEST_BYTES,
        gpus_per_node=0,
        gpu_claims=None,
        rdma=None,
        network=None,
    )
    template = worker_template(plan, small, labels, config, "", "mlpipe.train.coordinate")
    template["spec"]["containers"][0].pop("ports", None)
    others = template["spec"].get("tolerations", [])
    template["spec"]["tolerations"] = [*others, *map(dict, _LEAVES_LOST_NODES)]
    template["spec"].pop("topologySpreadConstraints")
    return template


def driver_template(
    run_id: str, store_url: str, cluster: ClusterPlan, labels: Json, stage: str | None, seal: str
) -> Json:
    """The pod template of the driver: no GPU, and the only pod with a token. `seal`: what it is to drive, in
    digests that stand where no worker can write."""
    args = ["-P", "-m", "mlpipe.cli", "resume", run_id, "--store", store_url, "--here", "--debug"]
    args += ["--seal", seal]
    container = _container(cluster, "driver", args + (["--stage", stage] if stage is not None else []))
    container["env"] = _env(_own(run_id, cluster)) + _by_reference(store_url, cluster, "driver")
    container["env"] += _secret_env(cluster.driver_secret_env)
    for name, path in ((environment.POD_NAME, "metadata.name"), (environment.POD_UID, "metadata.uid")):
        container["env"].append({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}})
    if cluster.proxy is not None:  # never to the API server, whose address the cluster fills in
        for variable in container["env"]:
            if variable["name"].upper() == "NO_PROXY":
                variable["value"] += ",$(KUBERNETES_SERVICE_HOST)"
    container["resources"] = {
        "requests": {"cpu": "100m", "memory": "256Mi", _DISK: quantity(DRIVER_DISK_REQUEST_BYTES)},
        "limits": {"memory": "1Gi", _DISK: quantity(DRIVER_DISK_LIMIT_BYTES)},
    }
    account = cluster.driver_service_account
    spec = _pod_spec(store_url, cluster, container, account, DRIVER_DISK_LIMIT_BYTES, token=True)
    spec["restartPolicy"] = "Never"  # one that failed stays, with its log; the Job makes another
    spec["terminationGracePeriodSeconds"] = GRACE_SECONDS
    spec["tolerations"] = [*_tolerations(cluster, gpus=0), *map(dict, _LEAVES_LOST_NODES)]
    annotations = {"sidecar.istio.io/inject": "false"}
    return {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec}


def quantity(num_bytes: int) -> str:
    """2147483648 -> '2Gi'."""
    for unit, size in (("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10)):
        if num_bytes % size == 0:
            return f"{num_bytes // size}{unit}"
    return str(num_bytes)


def _cores(cpus: float) -> str:
    return str(int(cpus)) if cpus == int(cpus) else f"{round(cpus * 1000)}m"


def _amounts(plan: Plan, cluster: ClusterPlan) -> Json:
    """Limits equal requests: memory and devices cannot be overcommitted, and the CPU manager gives cores near
    its GPUs only to a pod whose limits are its requests. Without GPUs no limit of CPU is set: it would
    throttle a gang to the share that it needs at least (0.25 cores made a start six times as long). Disk is
    reserved where the stage says how much; else a little is, and much is the limit."""
    amounts = {
        "cpu": _cores(cluster.cpus),
        "memory": quantity(cluster.memory_bytes),
        _DISK: quantity(cluster.disk_bytes or DISK_REQUEST_BYTES),
    }
    if cluster.gpus_per_node and cluster.gpu_claims is None:
        amounts[cluster.gpu_resource] = str(cluster.gpus_per_node)
    if cluster.rdma is not None and plan.launch.num_nodes > 1:
        amounts[cluster.rdma.resource] = str(cluster.rdma.count)
    if cluster.network is not None:
        devices = sorted(cluster.network.resources.items())
        amounts |= {name: str(count) for name, count in devices}
        if cluster.network.hugepages_bytes:
            amounts["hugepages-2Mi"] = quantity(cluster.network.hugepages_bytes)
    limits = {name: amount for name, amount in amounts.items() if name != "cpu" or cluster.gpus_per_node}
    limits[_DISK] = quantity(cluster.disk_bytes or DISK_LIMIT_BYTES)
    claims = {"claims": [{"name": CLAIM}]} if cluster.gpu_claims is not None else {}
    return {"requests": amounts, "limits": limits, **claims}


def _container(cluster: ClusterPlan, name: str, args: list[str]) -> Json:
    if cluster.image is None:
        raise RenderError(
            "the pipeline names no container image", hint="add 'image: registry.example.com/team/mlpipe:1.0'"
        )
    return {
        "name": name,
        "image": cluster.image,
        "imagePullPolicy": cluster.image_pull_policy,
        "command": ["python"],
        "args": [escaped(arg) for arg in args],
        "env": [],
        "resources": {},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _pod_spec(
    store_url: str, cluster: ClusterPlan, container: Json, account: str, disk_bytes: int, *, token: bool
) -> Json:
    """`disk_bytes`: that each folder on the node's disk may take; all together what the container may."""
    _check_store(store_url, cluster)
    spec: Json = {
        "serviceAccountName": account,
        "automountServiceAccountToken": token,
        "enableServiceLinks": False,
        "restartPolicy": "",
        "terminationGracePeriodSeconds": 0,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [],
    }
    if cluster.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in cluster.image_pull_secrets]
    if cluster.node_selector:
        spec["nodeSelector"] = dict(sorted(cluster.node_selector.items()))
    if cluster.prefer is not None:
        spec["affinity"] = {
            "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": _first(cluster)}
        }
    if cluster.priority_class is not None:
        spec["priorityClassName"] = cluster.priority_class
    if cluster.runtime_class is not None:
        spec["runtimeClassName"] = cluster.runtime_class
    _mount_cache(spec, cluster, disk_bytes)
    _mount(spec, "tmp", "/tmp", _empty(disk_bytes))
    claims = sorted({volume.claim for volume in cluster.volumes})
    for volume in cluster.volumes:
        number = claims.index(volume.claim)
        claim = {"persistentVolumeClaim": {"claimName": volume.claim}}
        _mount(spec, f"claim-{number}", volume.path, claim, volume.sub_path, read_only=volume.read_only)
    if cluster.ca_bundle is not None:
        items = [{"key": cluster.ca_bundle.key, "path": "ca.crt"}]
        source = {"configMap": {"name": cluster.ca_bundle.config_map, "items": items}}
        _mount(spec, "ca", CA_FOLDER, source, read_only=True)
    if cluster.store_web_identity is not None and store_url.startswith("s3://"):
        token_source = {
            "audience": cluster.store_web_identity.audience,
            "expirationSeconds": TOKEN_SECONDS,
            "path": "token",
        }
        sources = [{"serviceAccountToken": token_source}]
        _mount(spec, "identity", IDENTITY_FOLDER, {"projected": {"sources": sources}}, read_only=True)
    return spec


def _mount(
    spec: Json, name: str, path: str, source: Json, sub_path: str | None = None, *, read_only: bool = False
) -> None:
    if all(volume["name"] != name for volume in spec["volumes"]):
        spec["volumes"].append({"name": name, **source})
    mount: Json = {"name": name, "mountPath": path}
    if sub_path is not None:
        mount["subPath"] = sub_path
    if read_only:
        mount["readOnly"] = True
    spec["containers"][0]["volumeMounts"].append(mount)


def _place(spec: Json, plan: Plan, cluster: ClusterPlan, labels: Json) -> None:
    """On which nodes the pods may stand, and next to whom."""
    tolerations = _tolerations(cluster, cluster.gpus_per_node)
    if tolerations:
        spec["tolerations"] = tolerations
    terms: Json = {}
    expressions = list(_gpu_terms(cluster))
    if expressions:
        terms["matchExpressions"] = expressions
    # The API server takes one name in a term, and no pod that names what no node can be called.
    avoid = [node for node in plan.launch.avoid if re.fullmatch(_NODE, node)]
    if avoid:
        terms["matchFields"] = [
            {"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in avoid
        ]
    if terms:
        required = {"nodeSelectorTerms": [terms]}
        nodes = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
        nodes["requiredDuringSchedulingIgnoredDuringExecution"] = required
    if plan.launch.num_nodes > 1 or plan.launch.replicas is not None:  # softly: one node is a cluster
        spec["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {k: v for k, v in labels.items() if "mlpipe.dev/" in k}},
            }
        ]


def _first(cluster: ClusterPlan) -> list[Json]:
    labels = sorted((cluster.prefer or {}).items())
    expressions = [{"key": key, "operator": "In", "values": [value]} for key, value in labels]
    return [{"weight": 100, "preference": {"matchExpressions": expressions}}]


def _gpu_terms(cluster: ClusterPlan) -> Iterator[Json]:
    """What the nodes' labels must say of their GPUs. A claim chooses by the device itself."""
    if not cluster.gpus_per_node or cluster.gpu_claims is not None:
        return
    if cluster.gpu_product is not None:
        yield {"key": cluster.gpu_label, "operator": "In", "values": [cluster.gpu_product]}
    if cluster.sharing_label is not None:
        shared = {"operator": "In", "values": [cluster.gpu_sharing]}
        alone = {"operator": "NotIn", "values": list(SHARING)}
        yield {"key": cluster.sharing_label, **(shared if cluster.gpu_sharing else alone)}


def _tolerations(cluster: ClusterPlan, gpus: int) -> list[Json]:
    """A node selector may send all pods to the nodes with GPUs, also those without."""
    tolerations: list[Json] = []
    if gpus or cluster.node_selector:
        key = cluster.gpu_taint or cluster.gpu_resource
        tolerations.append({"key": key, "operator": "Exists", "effect": "NoSchedule"})
    for toleration in cluster.tolerations:
        fields = {
            "key": toleration.key,
            "operator": toleration.operator,
            "value": toleration.value,
            "effect": toleration.effect,
            "tolerationSeconds": toleration.toleration_seconds,
        }
        tolerations.append({key: value for key, value in fields.items() if value is not None})
    return tolerations


def _metrics_port(plan: Plan) -> int | None:
    if plan.launch.metrics_port is None:
        return None
    return plan.launch.metrics_port or METRICS_PORT


def _worker_env(plan: Plan, cluster: ClusterPlan, rendezvous: str) -> list[Json]:
    launch = plan.launch
    # in order: a plan that was read back must give the same objects, or its gang is not adopted
    variables = _compiled(cluster) | dict(sorted(launch.env.items())) | _own(plan.run_id, cluster)
    variables[environment.STAGE] = plan.stage
    if launch.num_nodes > 1:
        variables[environment.RENDEZVOUS] = f"{rendezvous}:{RENDEZVOUS_PORT}"
    if launch.num_spares:
        variables[environment.NUM_MACHINES] = str(launch.num_machines)
    port = _metrics_port(plan)
    if port is not None:
        variables |= {environment.METRICS_ADDRESS: "0.0.0.0", environment.METRICS_PORT: str(port)}
    if launch.device == "cuda":
        flight = {
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # a collective that hangs ends its process
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            "TORCH_FR_BUFFER_SIZE": "2000",
            "TORCH_FR_DUMP_TEMP_FILE": f"{SCRATCH}/flight-rank-",
        }
        variables = {**flight, **variables}
    env = _env(variables)
    for name, path in ((environment.POD_NAME, "metadata.name"), (environment.NODE_NAME, "spec.nodeName")):
        env.append({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}})
    if is_gang(plan) and cluster.form != "indexed-job":  # by JobSet, which a TrainJob becomes too
        path = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
        env.append({"name": environment.GANG_RESTART, "valueFrom": {"fieldRef": {"fieldPath": path}}})
    env += _by_reference(plan.store_url, cluster, "worker") + _secret_env(cluster.secret_env)
    return list({entry["name"]: entry for entry in env}.values())  # the last word on a name, said once


def _compiled(cluster: ClusterPlan) -> dict[str, str]:
    """Where compilers and tools keep what the next pod would make again, if anything outlives this one."""
    if cluster.cache is None:
        return {}
    folders = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "XDG_CACHE_HOME": "tools"}
    return {name: f"{CACHE}/{folder}" for name, folder in folders.items()}


def _secret_env(references: Mapping[str, SecretKey]) -> list[Json]:
    return [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": reference.secret, "key": reference.key}}}
        for name, reference in sorted(references.items())
    ]


def is_gang(plan: Plan) -> bool:
    """Whether the stage is of the form that the pipeline asks for; others are plain Jobs of one pod."""
    return plan.part(TrainPlan) is not None or plan.launch.num_nodes > 1


def _own(run_id: str, cluster: ClusterPlan) -> dict[str, str]:
    """No passwd file knows the user, and the root file system is read-only."""
    own = {environment.RUN_ID: run_id, environment.CACHE: CACHE, "HOME": "/tmp", "USER": "mlpipe"}
    if cluster.ca_bundle is not None:
        names = ("AWS_CA_BUNDLE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
        own |= dict.fromkeys(names, f"{CA_FOLDER}/ca.crt")
    return own | _proxy(cluster)


def _env(variables: dict[str, str]) -> list[Json]:
    return [{"name": name, "value": escaped(value)} for name, value in variables.items()]


def _proxy(cluster: ClusterPlan) -> dict[str, str]:
    """In capitals and not: programs differ. The store is spared the detour if its name is a Service's short
    one, `minio` or `minio.storage`."""
    proxy = cluster.proxy
    if proxy is None:
        return {}
    endpoint = urlsplit(cluster.store_endpoint or "").hostname or ".."
    hosts = [*_NO_PROXY, *([endpoint] if endpoint.count(".") < 2 else []), *proxy.no_proxy]
    variables = {"HTTP_PROXY": proxy.http, "HTTPS_PROXY": proxy.https, "NO_PROXY": ",".join(hosts)}
    variables |= {name.lower(): value for name, value in variables.items()}
    return {name: value for name, value in variables.items() if value is not None}


def _by_reference(store_url: str, cluster: ClusterPlan, who: Component) -> list[Json]:
    """How the store is reached. Credentials as variables: the S3 client reads them from there."""
    if not store_url.startswith("s3://"):
        return []
    env: list[Json] = []
    known = {"AWS_ENDPOINT_URL_S3": cluster.store_endpoint, "AWS_REGION": cluster.store_region}
    identity = cluster.store_web_identity
    if identity is None:
        secret = (
            cluster.store_secret if who == "worker" else cluster.store_driver_secret or cluster.store_secret
        )
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            key: Json = {"name": secret, "key": name}
            if name == "AWS_SESSION_TOKEN":
                key["optional"] = True
            env.append({"name": name, "valueFrom": {"secretKeyRef": key}})
    else:
        known |= {
            "AWS_WEB_IDENTITY_TOKEN_FILE": f"{IDENTITY_FOLDER}/token",
            "AWS_ROLE_ARN": identity.role if who == "worker" else identity.driver_role or identity.role,
            "AWS_ENDPOINT_URL_STS": identity.endpoint,
        }
    return env + _env({name: value for name, value in known.items() if value is not None})


def _check_store(url: str, cluster: ClusterPlan) -> None:
    """A folder is seen by all pods only if it lies in a volume of theirs."""
    if url.startswith("s3://"):
        return
    folder = PurePosixPath(normpath(unquote(urlsplit(url).path) if url.startswith("file://") else url))
    for volume in cluster.volumes:
        if folder.is_relative_to(volume.path):
            if volume.read_only:
                raise RenderError(
                    f"the store {folder} lies in a volume that is read-only", where=volume.claim
                )
            return
    raise RenderError(
        f"the store {folder} is a folder that the pods do not share",
        hint="use s3://bucket/prefix, or mount a claim there with 'kubernetes.volumes: [{claim: NAME, path: "
        f"{folder}}}]'",
    )
