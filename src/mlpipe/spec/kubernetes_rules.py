"""What concerns several values of the `kubernetes` section; reads the raw tree, like `spec/rules.py`."""

from __future__ import annotations

from collections.abc import Iterator

from mlpipe._core.gpus import DEFAULT_RESOURCE, vendor_of
from mlpipe.spec.fields import is_range
from mlpipe.spec.gpu_rules import ALONE, num_ranks
from mlpipe.spec.kubernetes import Kubernetes
from mlpipe.spec.problems import Problem, closest
from mlpipe.spec.rules import is_taken
from mlpipe.spec.tree import Node, get, groups_of, items_of, problem_of_key, text_of

OWN_PATHS = ("/mlpipe", "/tmp", "/dev")  # of every pod: plan, scratch, cache, /tmp, /dev/shm


def check(root: Node) -> list[Problem]:
    """Every violated rule of the section."""
    section = get(root, "kubernetes")
    if section is None or not isinstance(section.value, dict):
        return []
    placed = [section, *_mappings(get(section, "stages")), *filter(None, [get(section, "gpu_pods")])]
    return [
        *_queues(section),
        *_volumes(_items(section, "volumes")),
        *(problem for holder in placed for problem in _tolerations(_items(holder, "tolerations"))),
        *_stages(root, section),
        *_claims(section),
        *_shared(root, section),
        *_rdma(root, section),
        *_choices(section),
        *_trainjob(section),
        *_spares(root, section),
        *_unlike(root, section),
        *_prepull(section),
        *_secret_env(section),
        *_store(section),
    ]


def _items(node: Node, key: str) -> list[Node]:
    return [item for item in items_of(node, key) if isinstance(item.value, dict)]


def _mappings(node: Node | None) -> list[Node]:
    held = node.value.values() if node is not None and isinstance(node.value, dict) else ()
    return [one for one in held if isinstance(one.value, dict)]


def _stages(root: Node, section: Node) -> Iterator[Problem]:
    single = get(section, "stages")
    if single is None or not isinstance(single.value, dict):
        return
    stages = [stage for stage in items_of(root, "stages") if isinstance(stage.value, dict)]
    names = [name for stage in stages if (name := text_of(get(stage, "name"))) is not None]
    for name, node in single.value.items():
        if name not in names:
            yield problem_of_key(node, f"there is no stage {name!r}", closest(name, names))


def _claims(section: Node) -> Iterator[Problem]:
    for key in ("gpu_resource", "gpu_product"):
        node = get(section, key)
        if get(section, "gpu_claims") and node is not None and node.value != DEFAULT_RESOURCE:
            yield problem_of_key(
                node, f"claims ask for devices, and {key} is of a device plugin's", "keep one of the two"
            )


def _shared(root: Node, section: Node) -> Iterator[Problem]:
    """By the names that a vendor's plugin gives GPUs that several pods use."""
    resource, product = get(section, "gpu_resource"), get(section, "gpu_product")
    vendor = vendor_of(None, text_of(resource) or DEFAULT_RESOURCE)
    if vendor is None or not vendor.shared_suffix:
        return
    ends = ((resource, vendor.shared_resource_suffix), (product, vendor.shared_suffix))
    shared = [node for node, end in ends if node is not None and (text_of(node) or "").endswith(end)]
    for node in shared:
        for stage in items_of(root, "stages"):
            resources, groups = get(stage, "resources"), groups_of(stage)
            asked = groups[0] if groups else resources
            if asked is None or get(asked, "gpus_per_node") is None:
                continue
            if num_ranks(asked) < 2 and not groups:
                continue
            name = text_of(get(stage, "name"))
            words = f"{node.value} are GPUs that others use, too, and stage {name!r} has several"
            yield Problem.at(node.place, words, ALONE)
            break


def _rdma(root: Node, section: Node) -> Iterator[Problem]:
    rdma = get(section, "rdma")
    if rdma is not None and get(root, "network") is not None:
        yield problem_of_key(rdma, "the network says what rdma does", "write network.resources instead")


def _queues(section: Node) -> Iterator[Problem]:
    queue, volcano = get(section, "queue"), get(section, "volcano_queue")
    if queue is not None and volcano is not None:
        yield problem_of_key(
            volcano, "Kueue ('queue') and Volcano cannot both place a gang", "keep one of them"
        )
    for key in ("queue_priority", "topology"):
        node = get(section, key)
        if node is not None and queue is None:
            yield problem_of_key(node, f"{key!r} is read by Kueue, for pods in a queue", "add 'queue: NAME'")


def _volumes(volumes: list[Node]) -> Iterator[Problem]:
    seen: set[str] = set()
    for volume in volumes:
        node = get(volume, "path")
        path = text_of(node)
        if node is None or path is None:
            continue
        if any(path == own or path.startswith(own + "/") for own in OWN_PATHS):
            yield Problem.at(
                node.place,
                f"{path!r} is mlpipe's own in every pod",
                f"mount outside of {', '.join(OWN_PATHS)}",
            )
        elif path in seen:
            yield Problem.at(node.place, f"a second volume at {path!r}", "mount it elsewhere")
        seen.add(path)


def _tolerations(tolerations: list[Node]) -> Iterator[Problem]:
    for toleration in tolerations:
        equal = text_of(get(toleration, "operator")) == "Equal"
        value, seconds = get(toleration, "value"), get(toleration, "toleration_seconds")
        if value is not None and not equal:
            yield problem_of_key(value, "a value is compared by operator Equal only", "add 'operator: Equal'")
        if equal and get(toleration, "key") is None:
            yield problem_of_key(toleration, "operator Equal needs a key", "add 'key: ...'")
        if seconds is not None and text_of(get(toleration, "effect")) != "NoExecute":
            yield problem_of_key(seconds, "only effect NoExecute has toleration_seconds", "remove it")


def _choices(section: Node) -> Iterator[Problem]:
    topology = get(section, "topology")
    choices = [] if topology is None else [(topology, ("required", "preferred"))]
    choices += [(item, ("secret", "config_map")) for item in _items(section, "env_from")]
    choices += [(item, ("strategic", "json")) for item in _items(section, "patches")]
    for node, keys in choices:
        if not isinstance(node.value, dict):
            continue
        there = [key for key in keys if key in node.value]
        if not there:
            yield problem_of_key(node, f"neither {keys[0]!r} nor {keys[1]!r}", "write one of them")
        elif len(there) > 1:
            yield problem_of_key(node.value[keys[1]], f"both {keys[0]!r} and {keys[1]!r}", "keep one of them")


# What a TrainJob cannot say, and what its runtime says instead.
_RUNTIMES = {
    "volcano_queue": "podGroupPolicy of the runtime gives its gangs to Volcano",
    "prepull": "only the runtime knows on which nodes its pods stand: have the platform fetch the image",
    "image_pull_policy": "write imagePullPolicy into the runtime's container",
    "priority_class": "write priorityClassName into the runtime's pod",
    "runtime_class": "write runtimeClassName into the runtime's pod",
    "env_from": "write envFrom into the runtime's container, or name the keys: secret_env",
    "gpu_claims": "take the resource of a device plugin, or another form",
    "rdma": "write IPC_LOCK into the runtime's container, and add the devices by a patch of the TrainJob",
    "max_gang_restarts": "write failurePolicy.maxRestarts into the runtime's JobSet",
}


def _trainjob(section: Node) -> Iterator[Problem]:
    own, form = get(section, "trainjob"), get(section, "form")
    if text_of(form) != "trainjob":
        if own is not None and own.value is not None:
            yield problem_of_key(own, "a runtime is read by the form 'trainjob' only", "add 'form: trainjob'")
        return
    assert form is not None
    if own is None or own.value is None:
        yield Problem.at(
            form.place, "a TrainJob names the runtime that it is made from", "add 'trainjob: {runtime: NAME}'"
        )
    for key, hint in _RUNTIMES.items():
        node, default = get(section, key), Kubernetes.model_fields[key].default
        if node is not None and node.plain() not in (None, list(default) if default == () else default):
            yield problem_of_key(node, f"a TrainJob cannot say {key!r}: that is its runtime's", hint)
    queue, overrides = get(section, "queue"), get(section, "trainjob", "overrides")
    if queue is not None and queue.value is not None and text_of(overrides) == "podTemplateOverrides":
        words = "Kueue changes a TrainJob by its runtimePatches, which Trainer 2.1 does not have"
        yield problem_of_key(queue, words, "remove it, or use Trainer 2.2 without 'overrides'")


def _spares(root: Node, section: Node) -> Iterator[Problem]:
    """Of a gang that the preflight deals ranks to."""
    form, inner = get(section, "form"), get(section, "topology", "inner")
    for stage in items_of(root, "stages"):
        spares = get(stage, "resources", "spares")
        if spares is None:
            continue
        if text_of(form) == "indexed-job":
            words = "a spare leaves when its gang is started anew, and an indexed-job's pods start one by one"
            hint = "write 'kubernetes: {form: jobset}', or remove resources.spares"
            yield problem_of_key(spares, words, hint)
        if text_of(inner) is not None:
            words = "the preflight chooses whose ranks are neighbours, and topology.inner does, too"
            yield problem_of_key(spares, words, "remove kubernetes.topology.inner, or resources.spares")


def _unlike(root: Node, section: Node) -> Iterator[Problem]:
    """Of stages whose pods are not all of one kind, or come and go."""
    form, claims, volcano = (get(section, key) for key in ("form", "gpu_claims", "volcano_queue"))
    for stage in items_of(root, "stages"):
        name, nodes = text_of(get(stage, "name")), get(stage, "resources", "nodes")
        if groups := groups_of(stage):
            listed = f"and resources of stage {name!r} list {len(groups)} groups of machines"
            if form is not None and text_of(form) in ("indexed-job", "trainjob"):
                words = f"pods of the form {form.value} are all alike, {listed}"
                yield Problem.at(form.place, words, "write jobset, or one mapping in resources")
            if claims is not None and claims.value is not None:
                words = f"gpu_claims ask for one class of GPUs, {listed}"
                yield problem_of_key(claims, words, "remove gpu_claims, or write one mapping in resources")
        if volcano is not None and volcano.value is not None and nodes is not None and is_range(nodes.value):
            words = f"Volcano places gangs, and the nodes of stage {name!r} come and go"
            yield problem_of_key(volcano, words, "remove volcano_queue, or write one number of nodes")


def _prepull(section: Node) -> Iterator[Problem]:
    asked, policy = get(section, "prepull"), get(section, "image_pull_policy")
    if asked is not None and asked.value is True and text_of(policy) == "Never":
        yield problem_of_key(
            asked, "nothing is fetched with image_pull_policy Never", "remove one of the two"
        )


def _secret_env(section: Node) -> Iterator[Problem]:
    names = get(section, "secret_env")
    for name, node in names.value.items() if names is not None and isinstance(names.value, dict) else ():
        if is_taken(name):
            yield problem_of_key(node, f"{name} is set by torchrun and mlpipe", "remove it")
    names = get(section, "driver_secret_env")
    for name, node in names.value.items() if names is not None and isinstance(names.value, dict) else ():
        if not name.startswith("MLFLOW_TRACKING_"):
            words = f"the driver has nothing to do with {name}: it only tells MLflow's registry"
            yield problem_of_key(node, words, "remove it, or give it to the workers: secret_env")


def _store(section: Node) -> Iterator[Problem]:
    store = get(section, "store")
    identity = None if store is None else get(store, "web_identity")
    if store is None or identity is None or identity.value is None:
        return
    for key in ("secret", "driver_secret"):
        node = get(store, key)
        if node is not None and node.value is not None:
            yield problem_of_key(
                node, f"with 'web_identity' no Secret is read, {key!r} says one", "keep one of them"
            )
