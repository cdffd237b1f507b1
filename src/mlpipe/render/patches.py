"""The user's last word: strategic merges (Kubernetes' own rules for built-in types) and JSON patches
(RFC 6902). Every error names the patch by its place in the pipeline file, and the path that does not fit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from mlpipe._core.errors import RenderError
from mlpipe.plan.cluster import Component, Patch

# Lists that merge item by item: `patchMergeKey` in k8s.io/api/core/v1/types.go; every other list is replaced.
_MERGE_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "ephemeralContainers": ("name",),
    "volumes": ("name",),
    "imagePullSecrets": ("name",),
    "replicatedJobs": ("name",),  # x-kubernetes-list-map-keys of JobSet's CRD
    "runtimePatches": ("manager",),  # of TrainJob's
    "env": ("name",),
    "hostAliases": ("ip",),
    "resourceClaims": ("name",),
    "topologySpreadConstraints": ("topologyKey",),
    "volumeDevices": ("devicePath",),
    "volumeMounts": ("mountPath",),
    "ports": ("containerPort", "port"),  # of a container, of a Service
    "ownerReferences": ("uid",),
}
# Labels that anything selects by: mlpipe itself, NetworkPolicies, PodMonitors, admission policies, Kueue.
SELECTED = (
    r"mlpipe\.dev/.*|app\.kubernetes\.io/(name|instance|version|component|part-of|managed-by)"
    r"|kueue\.x-k8s\.io/(queue-name|priority-class)"
)
_ABSENT = object()
_POINTER = r"(/([^/~]|~[01])*)*"  # RFC 6901
_MAX_OBJECT_BYTES, _MAX_DEPTH = 3 * 2**20, 100  # of a request that an API server reads; of any sane object
Json = dict[str, Any]


class _Misfit(Exception):
    """`path`: a JSON pointer into the object."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(why)
        self.path = path


def patched(
    objects: Sequence[Json], patches: Sequence[Patch], stage: str | None, component: Component
) -> list[Json]:
    """Copies of `objects` after all patches that are meant for them. Raises RenderError."""
    patched_objects: list[Json] = json.loads(json.dumps(list(objects)))
    for number, patch in enumerate(patches):
        if patch.stage not in (None, stage) or patch.component not in (None, component):
            continue
        for i, target in enumerate(patched_objects):
            try:
                patched_objects[i] = _apply(patch, target)
            except _Misfit as error:
                kind = "strategic" if patch.strategic is not None else "json"
                where = f"kubernetes.patches[{number}].{kind}, {patch.kind} of stage {stage or 'driver'}"
                raise RenderError(
                    f"{error.path or '/'}: {error}", where=where, hint="compare it with `mlpipe render`"
                ) from None
    return patched_objects


def targets(patch: Patch, objects: Sequence[Json], stage: str | None, component: Component) -> bool:
    """Whether the patch is meant for one of `objects`."""
    fits = patch.stage in (None, stage) and patch.component in (None, component)
    kinds = {document["kind"] for document in objects}
    return fits and (patch.kind in kinds or (patch.kind == "Pod" and any(map(_has_pods, objects))))


def _apply(patch: Patch, target: Json) -> Json:
    if patch.kind == "Pod":
        for holder in pod_holders(target):
            holder["template"] = _known(patch, holder["template"])
    elif patch.kind == target["kind"]:
        target = _known(patch, target)
    return target


def _known(patch: Patch, target: Json) -> Json:
    """Changed, but it and all that will be made from it still to be found by names and labels."""
    before = _identity(target)
    target = _changed(patch, target)
    after = _identity(target)
    for path in sorted(before.keys() | after.keys()):
        if path not in before and path.rpartition("/")[2].startswith("kueue."):
            continue  # a queue for what has none is no way around anything
        if before.get(path, _ABSENT) != after.get(path, _ABSENT):
            raise _Misfit(
                path,
                "mlpipe finds its objects by kind, name, namespace and labels, and network policies, "
                "monitors and queues select by these: "
                + ("it is not set" if before.get(path) is None else f"it stays {before[path]!r}"),
            )
    return target


def _has_pods(document: Json) -> bool:
    """Of a TrainJob, the pod's own patches are in it already."""
    return document["kind"] == "TrainJob" or bool(pod_holders(document))


def pod_holders(document: Json) -> list[Json]:
    """What holds a pod template, as far as there are any."""
    try:
        jobs = [document]
        if document["kind"] == "JobSet":
            jobs = [job["template"] for job in document["spec"]["replicatedJobs"]]
        return [job["spec"] for job in jobs if isinstance(job["spec"]["template"], dict)]
    except (KeyError, TypeError):
        return []


def _identity(document: Json, at: str = "") -> dict[str, Any]:
    """JSON pointer -> value, of the object at `at` and of every template in it."""
    metadata = document.get("metadata", {} if at else None)
    if not isinstance(metadata, dict):
        raise _Misfit(f"{at}/metadata", "an object needs it")
    for key in ("labels", "annotations"):
        if not isinstance(metadata.get(key, {}), dict):
            raise _Misfit(f"{at}/metadata/{key}", f"a mapping stood there, not {_show(metadata[key])}")
    own = {f"{at}/{key}": document.get(key) for key in ("apiVersion", "kind")}
    own |= {f"{at}/metadata/{key}": metadata.get(key) for key in ("name", "namespace")}
    for key, value in metadata.get("labels", {}).items():
        if re.fullmatch(SELECTED, key):
            own[f"{at}/metadata/labels/{_token(key)}"] = value
    for path, template in _templates(document.get("spec")):
        own |= _identity(template, f"{at}/spec/{path}")
    return own


def _templates(spec: Any) -> Iterator[tuple[str, Json]]:
    """Of the jobs of a JobSet, of the pods of a Job; what a TrainJob says of either."""
    if not isinstance(spec, dict):
        return
    for key, inner in (("podTemplateOverrides", ()), ("runtimePatches", ("trainingRuntimeSpec", "template"))):
        found = spec.get(key)
        for i, one in enumerate(found if isinstance(found, list) else ()):
            for step in inner:
                one = one.get(step) if isinstance(one, dict) else None
            yield "/".join((key, str(i), *inner)), one if isinstance(one, dict) else {}
    jobs = spec.get("replicatedJobs")
    holders = [("", spec)]
    holders += [(f"replicatedJobs/{i}/", job) for i, job in enumerate(jobs if isinstance(jobs, list) else ())]
    for path, holder in holders:
        if isinstance(holder, dict) and isinstance(holder.get("template"), dict):
            yield f"{path}template", holder["template"]


def _changed(patch: Patch, target: Json) -> Json:
    if patch.strategic is not None:
        merged: Json = _merge(target, json.loads(json.dumps(patch.strategic)), "")
        return merged
    result: Any = target
    for operation in patch.json or ():
        result = _operate(result, operation)
    if not isinstance(result, dict):
        raise _Misfit("", "nothing is left of the object")
    return result


def _merge(old: Any, new: Any, path: str, key: str = "") -> Any:
    if isinstance(new, dict):
        if old is not None and not isinstance(old, dict):
            raise _Misfit(path, f"a mapping cannot be merged into {_show(old)}")
        directive = new.pop("$patch", None)
        if directive not in (None, "replace", "merge"):
            raise _Misfit(path, f"$patch: {directive!r} does not fit here; write replace or merge")
        merged = {} if old is None or directive == "replace" else dict(old)
        for name, value in new.items():
            if value is None:
                merged.pop(name, None)
            else:
                merged[name] = _merge(merged.get(name), value, f"{path}/{_token(name)}", name)
        return merged
    if isinstance(new, list):
        if old is not None and not isinstance(old, list):
            raise _Misfit(path, f"a list cannot be merged into {_show(old)}")
        return _merge_list(old or [], new, path, _MERGE_KEYS.get(key, ()))
    if isinstance(old, dict | list):
        raise _Misfit(path, f"{_show(new)} cannot stand for {_show(old)}")
    return new


def _merge_list(old: list[Any], new: list[Any], path: str, keys: tuple[str, ...]) -> list[Any]:
    """By the first of `keys` that the items have; without keys, or after `$patch: replace`, the new one."""
    if not keys or not all(isinstance(item, dict) for item in [*old, *new]):
        return [_merge(None, item, f"{path}/{i}") for i, item in enumerate(new)]
    if {"$patch": "replace"} in new:
        return [_merge(None, item, f"{path}/{i}") for i, item in enumerate(new) if "$patch" not in item]
    merged = list(old)
    for i, item in enumerate(new):
        key = next((key for key in keys if key in item), None)
        if key is None:
            raise _Misfit(f"{path}/{i}", f"an item of this list is known by its {' or '.join(keys)}")
        at = next((j for j, other in enumerate(merged) if other.get(key) == item[key]), None)
        if item.get("$patch") == "delete":
            if at is None:
                raise _Misfit(f"{path}/{i}", f"there is no item whose {key} is {item[key]!r}")
            del merged[at]
        elif at is None:
            merged.append(_merge(None, item, f"{path}/{i}"))
        else:
            merged[at] = _merge(merged[at], item, f"{path}/{i}")
    return merged


def _operate(document: Any, operation: Json) -> Any:
    """`document` after one operation of RFC 6902. jsonpatch does it; why it does not fit is said here, since
    jsonpatch's own words hold the whole document."""
    from jsonpatch import JsonPatch, JsonPatchException, JsonPointerException

    _check_form(operation)
    try:
        result = JsonPatch([operation]).apply(document)
        fits = len(json.dumps(result)) <= _MAX_OBJECT_BYTES and _depth(result) <= _MAX_DEPTH
    except (JsonPatchException, JsonPointerException, ValueError):
        raise _misfit(document, operation) from None
    except RecursionError:
        fits = False
    if not fits:  # copies of copies double it each time
        raise _Misfit(operation["path"], "the object becomes too large or too deep for an API server")
    return result


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0)


def _check_form(operation: Json) -> None:
    name, path = operation.get("op"), operation.get("path")
    if not isinstance(path, str) or not re.fullmatch(_POINTER, path):
        raise _Misfit("", f"an operation needs a path like /spec/containers/0, not {path!r}")
    if name not in ("add", "remove", "replace", "move", "copy", "test"):
        raise _Misfit(path, f"op is {name!r}; write add, remove, replace, move, copy or test")
    if name in ("add", "replace", "test") and "value" not in operation:
        raise _Misfit(path, f"op {name} needs a value")
    if name in ("move", "copy"):
        source = operation.get("from")
        if not isinstance(source, str) or not re.fullmatch(_POINTER, source):
            raise _Misfit(path, f"op {name} needs a 'from' like /spec/containers/0")
        if name == "move" and path.startswith(f"{source}/"):
            raise _Misfit(path, f"{source} cannot move into itself")


def _misfit(document: Any, operation: Json) -> _Misfit:
    """Why a well-formed operation was refused: the first token of its pointers that leads nowhere."""
    from jsonpointer import EndOfList, JsonPointer, JsonPointerException

    name, path = operation["op"], operation["path"]
    for pointer in [operation["from"], path] if name in ("move", "copy") else [path]:
        value, here = document, ""
        for token in JsonPointer(pointer).parts:
            holder, here = value, f"{here}/{_token(token)}"
            try:
                value = JsonPointer("").walk(holder, token)
            except (JsonPointerException, ValueError):
                value = EndOfList(holder)
            if isinstance(value, EndOfList):
                return _Misfit(here, _lack(holder, token))
    words = {"test": "it is not what the test says", "remove": "nothing is left of the object"}
    return _Misfit(path, words.get(name, f"op {name} does not fit here"))


def _lack(holder: Any, token: str) -> str:
    if isinstance(holder, dict):
        return f"there is no {token!r}; there is {', '.join(holder) or 'nothing'}"
    if isinstance(holder, list):
        return f"{token!r} is no index of a list; the list has {len(holder)} items"
    return f"{_show(holder)} has no {token!r}"


def _token(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _show(value: Any) -> str:
    return "a mapping" if isinstance(value, dict) else "a list" if isinstance(value, list) else repr(value)
