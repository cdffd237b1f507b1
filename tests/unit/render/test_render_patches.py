"""The user's patches: Kubernetes' strategic merge and RFC 6902, and words for those that do not fit."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.rendered import pipeline_of, plan_of

from mlpipe._core.errors import RenderError
from mlpipe.plan.cluster import Patch
from mlpipe.plan.plan import Plan
from mlpipe.render.kubernetes import stage_objects
from mlpipe.render.patches import patched

pytestmark = pytest.mark.unit


def job() -> dict[str, Any]:
    container = {
        "name": "worker",
        "args": ["a", "b"],
        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
        "ports": [{"name": "metrics", "containerPort": 9400}],
    }
    template = {
        "metadata": {"labels": {"a": "b", "mlpipe.dev/run": "r"}},
        "spec": {"containers": [container], "tolerations": [{"key": "a"}]},
    }
    metadata = {"name": "j", "labels": {"x/y": "1", "mlpipe.dev/run": "r"}}
    spec = {"suspend": True, "template": template}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def jobset() -> dict[str, Any]:
    template = {"metadata": {}, "spec": {"containers": [{"name": "worker"}]}}
    inner = {"name": "worker", "template": {"spec": {"template": template}}}
    head = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "j"}}
    return {**head, "spec": {"replicatedJobs": [inner]}}


def strategic(kind: Any, body: dict[str, Any], target: dict[str, Any] | None = None) -> dict[str, Any]:
    return patched([target or job()], [Patch(kind, None, None, body, None)], "train", "worker")[0]


def operate(*operations: dict[str, Any], kind: Any = "Job") -> dict[str, Any]:
    return patched([job()], [Patch(kind, None, None, None, operations)], "train", "worker")[0]


def container(found: dict[str, Any]) -> dict[str, Any]:
    first: dict[str, Any] = found["spec"]["template"]["spec"]["containers"][0]
    return first


def test_strategic_merges_named_things_by_name_and_replaces_other_lists() -> None:
    body = {
        "spec": {
            "containers": [
                {
                    "name": "worker",
                    "args": ["c"],
                    "env": [{"name": "B", "value": "3"}, {"name": "C", "value": "4"}],
                },
                {"name": "sidecar", "image": "x"},
            ],
            "tolerations": [{"key": "b"}],
            "hostNetwork": True,
        }
    }
    found = strategic("Pod", body)
    assert container(found)["env"] == [
        {"name": "A", "value": "1"}, {"name": "B", "value": "3"}, {"name": "C", "value": "4"},
    ]  # fmt: skip
    assert container(found)["args"] == ["c"]
    assert container(found)["ports"] == [{"name": "metrics", "containerPort": 9400}]
    spec = found["spec"]["template"]["spec"]
    assert [one["name"] for one in spec["containers"]] == ["worker", "sidecar"]
    assert spec["tolerations"] == [{"key": "b"}]
    assert spec["hostNetwork"] is True
    assert found["spec"]["suspend"] is True


def test_strategic_removes_by_null_and_by_directive() -> None:
    assert "suspend" not in strategic("Job", {"spec": {"suspend": None}})["spec"]
    assert "absent" not in strategic("Job", {"spec": {"absent": None, "new": {"inner": None}}})["spec"]
    gone = {"spec": {"containers": [{"name": "worker", "env": [{"name": "A", "$patch": "delete"}]}]}}
    assert container(strategic("Pod", gone))["env"] == [{"name": "B", "value": "2"}]
    fresh = {
        "spec": {
            "containers": [{"name": "worker", "env": [{"$patch": "replace"}, {"name": "Z", "value": "9"}]}]
        }
    }
    assert container(strategic("Pod", fresh))["env"] == [{"name": "Z", "value": "9"}]
    for directive in ("replace", "merge"):
        body = {"spec": {"template": {"spec": {"nodeSelector": {"$patch": directive, "b": "c"}}}}}
        target = strategic("Pod", {"spec": {"nodeSelector": {"a": "b"}}})
        found = strategic("Job", body, target)["spec"]["template"]["spec"]["nodeSelector"]
        assert found == ({"b": "c"} if directive == "replace" else {"a": "b", "b": "c"})


def test_a_pod_is_found_inside_a_jobset_too() -> None:
    found = strategic("Pod", {"spec": {"hostNetwork": True}}, jobset())
    assert found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["hostNetwork"] is True
    body = {"spec": {"replicatedJobs": [{"name": "worker", "template": {"spec": {"backoffLimit": 1}}}]}}
    again = strategic("JobSet", body, jobset())["spec"]["replicatedJobs"]
    assert len(again) == 1
    assert again[0]["template"]["spec"].keys() == {"template", "backoffLimit"}


def test_json_operations() -> None:
    found = operate(
        {"op": "test", "path": "/metadata/labels/x~1y", "value": "1"},
        {"op": "add", "path": "/metadata/labels/a~0b", "value": "2"},
        {"op": "add", "path": "/spec/template/spec/containers/0/args/-", "value": "c"},
        {"op": "add", "path": "/spec/template/spec/containers/0/args/0", "value": "0"},
        {"op": "remove", "path": "/spec/suspend"},
        {"op": "replace", "path": "/spec/template/spec/containers/0/env/0/value", "value": "$(X)"},
        {"op": "copy", "from": "/metadata/labels", "path": "/spec/template/metadata/labels"},
        {"op": "move", "from": "/spec/template/spec/tolerations", "path": "/spec/template/spec/moved"},
    )
    assert found["metadata"]["labels"] == {"x/y": "1", "mlpipe.dev/run": "r", "a~b": "2"}
    assert container(found)["args"] == ["0", "a", "b", "c"]
    assert container(found)["env"][0]["value"] == "$(X)"
    assert found["spec"].keys() == {"template"}
    assert found["spec"]["template"]["metadata"]["labels"] == found["metadata"]["labels"]
    assert found["spec"]["template"]["spec"]["moved"] == [{"key": "a"}]
    pod = operate({"op": "add", "path": "/spec/nodeName", "value": "n"}, kind="Pod")
    assert pod["spec"]["template"]["spec"]["nodeName"] == "n"


def test_only_what_a_patch_is_meant_for_changes() -> None:
    body: dict[str, Any] = {"metadata": {"labels": {"hit": "1"}}}
    for patch, hit in (
        (Patch("Job", None, None, body, None), True),
        (Patch("Job", "train", "worker", body, None), True),
        (Patch("Job", "other", None, body, None), False),
        (Patch("Job", None, "driver", body, None), False),
        (Patch("JobSet", None, None, body, None), False),
    ):
        before = job()
        assert ("hit" in patched([before], [patch], "train", "worker")[0]["metadata"]["labels"]) == hit
        assert before == job()
    driver = patched([job()], [Patch("Job", "train", None, body, None)], None, "driver")[0]
    assert "hit" not in driver["metadata"]["labels"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            {"spec": {"containers": {"name": "worker"}}},
            "/spec/containers: a mapping cannot be merged into a list",
        ),
        ({"spec": ["a"]}, "/spec: a list cannot be merged into a mapping"),
        ({"spec": "a"}, "/spec: 'a' cannot stand for a mapping"),
        (
            {"spec": {"containers": [{"image": "x"}]}},
            "/spec/containers/0: an item of this list is known by its name",
        ),
        (
            {"spec": {"containers": [{"name": "no", "$patch": "delete"}]}},
            "/spec/containers/0: there is no item whose name is 'no'",
        ),
        ({"spec": {"$patch": "delete"}}, r"/spec: \$patch: 'delete' does not fit here"),
        (
            {
                "spec": {
                    "containers": [{"$patch": "replace"}, {"name": "a", "resources": {"$patch": "delete"}}]
                }
            },
            r"/spec/containers/1/resources: \$patch: 'delete' does not fit here",
        ),
        (
            {"spec": {"tolerations": [{"a": {"$patch": "delete"}}]}},
            r"/spec/tolerations/0/a: \$patch: 'delete'",
        ),
        (
            {"spec": {"containers": [{"name": "new", "resources": {"$patch": "delete"}}]}},
            r"/spec/containers/0/resources: \$patch: 'delete'",
        ),
        (
            {"spec": {"containers": [{"name": "worker", "args": "a"}]}},
            "/spec/containers/0/args: 'a' cannot stand for a list",
        ),
        (
            {"spec": {"containers": [{"name": "worker", "env": [{"name": "A", "value": {"b": "c"}}]}]}},
            "/spec/containers/0/env/0/value: a mapping cannot be merged into '1'",
        ),
    ],
)
def test_a_strategic_patch_that_does_not_fit_is_named(body: dict[str, Any], words: str) -> None:
    with pytest.raises(RenderError, match=f"of stage train: {words}") as caught:
        strategic("Pod", body)
    assert caught.value.where == "kubernetes.patches[0].strategic, Pod of stage train"
    assert caught.value.kind == "input"


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        ({}, "/: an operation needs a path"),
        ({"op": "add", "path": "spec", "value": 1}, "/: an operation needs a path"),
        ({"op": "set", "path": "/spec", "value": 1}, "/spec: op is 'set'"),
        ({"op": "add", "path": "/spec/a"}, "/spec/a: op add needs a value"),
        ({"op": "replace", "path": "/spec/suspend"}, "/spec/suspend: op replace needs a value"),
        ({"op": "test", "path": "/spec/suspend"}, "/spec/suspend: op test needs a value"),
        ({"op": "move", "path": "/spec/a", "from": "/spec/b/c"}, "/spec/b: there is no 'b'"),
        ({"op": "move", "path": "/spec/a"}, "/spec/a: op move needs a 'from'"),
        ({"op": "move", "path": "/spec/a", "from": "/spec"}, "/spec/a: /spec cannot move into itself"),
        (
            {"op": "remove", "path": "/spec/nope"},
            "/spec/nope: there is no 'nope'; there is suspend, template",
        ),
        ({"op": "add", "path": "/nope/a", "value": 1}, "/nope: there is no 'nope'"),
        ({"op": "add", "path": "/spec/a~0b/c", "value": 1}, "/spec/a~0b: there is no 'a~b'"),
        ({"op": "replace", "path": "/spec/template/spec/containers/1", "value": 1}, "the list has 1 items"),
        (
            {"op": "replace", "path": "/spec/template/spec/containers/-", "value": 1},
            "'-' is no index of a list",
        ),
        (
            {"op": "add", "path": "/spec/template/spec/containers/01", "value": 1},
            "'01' is no index of a list",
        ),
        ({"op": "add", "path": "/spec/suspend/a", "value": 1}, "/spec/suspend/a: True has no 'a'"),
        ({"op": "test", "path": "/spec/suspend", "value": 1}, "/spec/suspend: it is not what the test says"),
        ({"op": "replace", "path": "", "value": []}, "/: nothing is left of the object"),
        ({"op": "remove", "path": ""}, "/: nothing is left of the object"),
        *(
            ({"op": "add", "path": path, "value": "x"}, f": {path}: mlpipe finds its objects by kind, name")
            for path in ("/metadata/name", "/metadata/namespace", "/kind", "/apiVersion")
        ),
        (
            {"op": "replace", "path": "/spec/template/metadata/labels/mlpipe.dev~1run", "value": "x"},
            ": /spec/template/metadata/labels/mlpipe.dev~1run: mlpipe finds its objects .* it stays 'r'",
        ),
        (
            {"op": "remove", "path": "/metadata/labels/mlpipe.dev~1run"},
            "mlpipe finds its objects by kind, name",
        ),
        (
            {"op": "replace", "path": "/metadata/labels", "value": 1},
            "/metadata/labels: a mapping stood there, not 1",
        ),
        (
            {"op": "add", "path": "/metadata/annotations", "value": 1},
            "/metadata/annotations: a mapping stood there, not 1",
        ),
        ({"op": "remove", "path": "/metadata"}, "/metadata: an object needs it"),
        ({"op": "add", "path": "/spec/a~2", "value": 1}, "an operation needs a path"),
        ({"op": "copy", "path": "/spec/a", "from": "spec"}, "/spec/a: op copy needs a 'from'"),
        ({"op": "copy", "path": "/spec/a", "from": "/spec/b/c"}, "/spec/b: there is no 'b'"),
        ({"op": "add", "path": "/spec/template/spec/containers/2", "value": 1}, "the list has 1 items"),
        (
            {"op": "move", "from": "/spec/template/spec/containers/0/args/0", "path": "/spec/b/c"},
            "/spec/b: there is no 'b'",
        ),
        ({"op": "test", "path": "/spec/nope", "value": None}, "/spec/nope: there is no 'nope'"),
    ],
)
def test_an_operation_that_does_not_fit_is_named(operation: dict[str, Any], words: str) -> None:
    with pytest.raises(RenderError, match=f"of stage train: {words}" if words[0] == "/" else words) as caught:
        operate(operation)
    assert caught.value.where == "kubernetes.patches[0].json, Job of stage train"
    assert "`mlpipe render`" in str(caught.value.hint)


def test_copies_of_copies_end_before_they_fill_the_memory() -> None:
    """Each doubles the object, or its depth."""
    wide = [{"op": "copy", "from": "/spec", "path": f"/spec/copy-{number}"} for number in range(60)]
    deep = [{"op": "copy", "from": "/spec", "path": "/spec" + "/x" * (2**number)} for number in range(12)]
    operate(*deep[:6])  # 63 levels more
    for operations in (wide, deep[:7]):
        with pytest.raises(RenderError, match=r": /spec/\S+: the object becomes too large or too deep"):
            operate(*operations)
    for depth in (98, 5000):  # one level too many, and more than Python itself goes down
        lists: list[Any] = []
        for _ in range(depth):
            lists = [lists]
        with pytest.raises(RenderError, match=": /spec/lists: the object becomes too large or too deep"):
            operate({"op": "add", "path": "/spec/lists", "value": lists})


def test_a_refusal_does_not_repeat_the_object() -> None:
    """Values may be secrets of another tool; they stand in no message."""
    secret = {"op": "add", "path": "/spec/secret", "value": "hunter2"}
    for operation in (
        {"op": "remove", "path": "/spec/secret/a"},
        {"op": "test", "path": "/spec/template", "value": 1},
        {"op": "replace", "path": "/spec/nope/x", "value": "hunter2"},
    ):
        with pytest.raises(RenderError) as caught:
            operate(
                secret if operation["op"] != "remove" else {**secret, "value": {"b": "hunter2"}}, operation
            )
        assert "hunter2" not in str(caught.value)


OWN = "app.kubernetes.io/managed-by"
OWN_POINTER = f"/metadata/labels/{OWN.replace('/', '~1')}"


@cache
def shipped_plan(form: str) -> Plan:
    return plan_of(pipeline_of("llm", f"kubernetes.form={form}", "kubernetes.queue=q"), "train")


def shipped(kind: str) -> list[dict[str, Any]]:
    """A stage as it is rendered; its gang is a Job or a JobSet."""
    return stage_objects(shipped_plan("jobset" if kind == "JobSet" else "indexed-job"))


@pytest.mark.parametrize("kind", ["Job", "JobSet"])
@pytest.mark.parametrize(
    "body",
    [
        {"metadata": {"labels": {OWN: None}}},
        {"metadata": {"labels": {OWN: "Helm"}}},
        {"metadata": {"labels": None}},
        {"metadata": {"labels": {"$patch": "replace", "mlpipe.dev/run": "r"}}},
        {"metadata": {"$patch": "replace", "labels": {OWN: "mlpipe"}}},
        {"metadata": {"labels": {"app.kubernetes.io/component": "driver"}}},
        {"metadata": {"labels": {"mlpipe.dev/stage": "other"}}},
        {"metadata": {"labels": {"mlpipe.dev/new": "x"}}},
        [{"op": "remove", "path": OWN_POINTER}],
        [{"op": "remove", "path": "/metadata/labels"}],
        [{"op": "replace", "path": OWN_POINTER, "value": "Helm"}],
        [{"op": "add", "path": "/metadata", "value": {"labels": {}}}],
        [{"op": "move", "from": OWN_POINTER, "path": f"{OWN_POINTER}d"}],
        [{"op": "copy", "from": "/metadata/labels/mlpipe.dev~1run", "path": OWN_POINTER}],
    ],
)
def test_no_patch_takes_away_a_label_that_anything_selects_by(kind: Any, body: Any) -> None:
    """Neither from the pods' template, nor through the object that holds it, nor from the object itself."""
    holder = ("spec", "replicatedJobs", 0, "template", "spec", "template")
    inner = "/spec/template" if kind == "Job" else "/".join(["", *map(str, holder)])
    cases: list[tuple[Any, Any]] = [("Pod", body), (kind, body)]
    if isinstance(body, dict):
        jobs = {"replicatedJobs": [{"name": "worker", "template": {"spec": {"template": body}}}]}
        cases.append((kind, {"spec": {"template": body} if kind == "Job" else jobs}))
    else:
        at = [{key: inner + v if key in ("path", "from") else v for key, v in one.items()} for one in body]
        cases.append((kind, at))
    for target, what in cases:
        patch = (
            Patch(target, None, None, what, None)
            if isinstance(what, dict)
            else Patch(target, None, None, None, tuple(what))
        )
        with pytest.raises(
            RenderError, match=r"/metadata/\S+: mlpipe finds its objects by .*: it "
        ) as caught:
            patched(shipped(kind), [patch], "train", "worker")
        assert caught.value.kind == "input"


def test_a_gang_stays_in_its_queue_and_is_the_only_one() -> None:
    queue = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": None}}}
    second = {
        "spec": {"replicatedJobs": [{"name": "more", "replicas": 1, "template": {"spec": {"template": {}}}}]}
    }
    for body, where in ((queue, "kueue.x-k8s.io~1queue-name"), (second, "/spec/replicatedJobs/1/template/")):
        with pytest.raises(RenderError, match=where):
            patched(shipped("JobSet"), [Patch("JobSet", None, None, body, None)], "train", "worker")
    named = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "q"}, "name": "other"}}
    with pytest.raises(RenderError, match="/metadata/name: mlpipe finds"):
        strategic("Job", named)
    # what mlpipe did not ask for may be asked for: a queue for the driver, labels of others
    labels = {"kueue.x-k8s.io/queue-name": "q", "app.kubernetes.io/created-by": "me", "team": "a"}
    found = strategic("Job", {"metadata": {"labels": labels}})
    assert labels.items() <= found["metadata"]["labels"].items()


KEYS = ["", "metadata", "labels", "spec", "template", "containers", "0", "-", "env", "a~0", "replicatedJobs"]
PATHS = st.lists(st.sampled_from(KEYS), max_size=6).map(lambda keys: "".join(f"/{key}" for key in keys))
LEAVES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                ["metadata", "labels", "spec", "template", "containers", "name", "$patch", "env"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
OPERATIONS = st.fixed_dictionaries(
    {"op": st.sampled_from(["add", "remove", "replace", "move", "copy", "test", 3]), "path": PATHS},
    optional={"value": LEAVES, "from": PATHS},
)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["Pod", "Job", "JobSet"]),
            st.lists(OPERATIONS, max_size=3) | st.dictionaries(st.sampled_from(["metadata", "spec"]), LEAVES),
        ),
        max_size=4,
    )
)
def test_any_patch_fits_or_is_refused_in_words(bodies: list[tuple[Any, Any]]) -> None:
    patches = [
        Patch(kind, None, None, body, None)
        if isinstance(body, dict)
        else Patch(kind, None, None, None, tuple(body))
        for kind, body in bodies
    ]
    try:
        found = patched([job(), jobset()], patches, "train", "worker")
    except RenderError as error:
        refusal = error
    else:
        assert [one["metadata"]["name"] for one in found] == ["j", "j"]
        return
    assert (refusal.where or "").startswith("kubernetes.patches[")
