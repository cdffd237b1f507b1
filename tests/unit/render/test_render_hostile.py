"""No text of a pipeline changes the structure of what is sent, or becomes other text in the pod."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit import manifests
from kit.rendered import QUICKSTART, RUN_ID, pipeline_of, plan_of

from mlpipe._core.yaml import documents
from mlpipe.plan.cluster import Patch
from mlpipe.plan.plan import Plan
from mlpipe.render.kubernetes import driver_objects, stage_objects
from mlpipe.render.pod import escaped
from mlpipe.spec.load import load_pipeline_text
from mlpipe.spec.problems import SpecErrors
from mlpipe.spec.tree import parse

pytestmark = pytest.mark.unit
HOSTILE = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30),
    st.lists(
        st.sampled_from(["$", "$$", "(", ")", "A", "$(HOME)", "{{", "\n", ": ", "- ", "#", '"', "'"]),
        max_size=8,
    ).map("".join),
    st.sampled_from(
        [
            "a\n---\nkind: Secret",
            '"}]',
            "'; rm -rf /",
            "$(A",
            "$$(A)",
            "a$$b",
            "{{ .Values.x }}",
            "\u2028",
            "null",
        ]
    ),
)
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
RELAXED = settings(max_examples=40)
TRAIN = plan_of(pipeline_of("quickstart", *QUICKSTART), "train")
TRAINING = TRAIN.work.training


def expand(text: str, values: dict[str, str]) -> str:
    """As the kubelet does it: k8s.io/kubernetes/third_party/forked/golang/expansion. `$$` is a dollar;
    `$(X)` is the variable X, or stays when there is none; any other `$` is itself."""

    def replace(match: re.Match[str]) -> str:
        if match.group() == "$$":
            return "$"
        return values.get(match.group(1), match.group())

    return re.sub(r"\$\$|\$\(([^)]*)\)", replace, text)


def test_the_kubelet_of_the_tests_knows_its_rules() -> None:
    values = {"A": "x"}
    for text, found in (
        ("$(A)", "x"),
        ("$$(A)", "$(A)"),
        ("$(B)", "$(B)"),
        ("a$$b", "a$b"),
        ("$", "$"),
        ("$(A", "$(A"),
    ):
        assert expand(text, values) == found


@RELAXED
@given(HOSTILE, st.dictionaries(HOSTILE, HOSTILE, max_size=3))
def test_text_is_the_same_after_the_kubelet(text: str, values: dict[str, str]) -> None:
    assert expand(escaped(text), {"A": "x", "HOME": "y"} | values) == text


def skeleton(value: Any) -> Any:
    """Keys and types, without text."""
    if isinstance(value, dict):
        return {key: skeleton(item) for key, item in value.items()}
    if isinstance(value, list):
        return [skeleton(item) for item in value]
    return type(value).__name__


def hostile(text: str) -> Plan:
    """A user's text wherever a pipeline may have any."""
    assert TRAIN.cluster is not None
    patch = Patch("Pod", None, None, {"metadata": {"annotations": {"own": text}}}, None)
    train = TRAINING._replace(
        reason=text,
        data=TRAINING.data._replace(tokens=text),
        model=TRAINING.model._replace(build=TRAINING.model.build._replace(args={"a": text})),
    )
    return replace(
        TRAIN,
        work=train,
        store_url=f"s3://bucket/{text}",
        launch=TRAIN.launch._replace(env={"OWN": text}),
        cluster=TRAIN.cluster._replace(
            image=text,
            node_selector={"pool": text},
            store_endpoint=text,
            store_region=text,
            patches=(patch,),
        ),
    )


# Wherever the section has text, with a value that it takes.
SECTION: dict[str, Any] = {
    "namespace": "a",
    "queue": "a",
    "queue_priority": "a",
    "topology": {"required": "a"},
    "image_pull_secrets": ["a"],
    "node_selector": {"a": "b"},
    "tolerations": [{"key": "a", "operator": "Equal", "value": "b"}],
    "priority_class": "a",
    "runtime_class": "a",
    "volumes": [{"claim": "a", "path": "/a", "sub_path": "b"}],
    "env_from": [{"secret": "a"}, {"config_map": "a"}],
    "secret_env": {"A": {"secret": "a", "key": "b"}},
    "store": {"secret": "a", "endpoint": "http://a", "region": "b"},
    "ca_bundle": {"config_map": "a", "key": "b"},
    "proxy": {"http": "http://a", "no_proxy": ["a"]},
    "service_account": "a",
    "driver_service_account": "a",
    "rdma": {"resource": "a/b"},
    "gpu_resource": "a/b",
    "gpu_product": "a",
    "gpu_pods": {
        "prefer": {"a": "b"},
        "node_selector": {"a": "b"},
        "tolerations": [{"key": "a"}],
        "runtime_class": "a",
    },
    "stages": {"a": {"priority_class": "a"}},
    "patches": [{"target": {"kind": "Pod"}, "strategic": {"metadata": {"annotations": {"a": "b"}}}}],
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of all text in it: keys that are data (a mapping's own choice) count as text too."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))
    if isinstance(value, str) and path[-1] not in ("operator", "kind"):
        yield path


def with_text(path: tuple[Any, ...], text: str) -> list[dict[str, Any]]:
    """The objects of a pipeline whose section says `text` there. Raises SpecErrors."""
    section: Any = copy.deepcopy(SECTION)
    holder = section
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = text
    document = {
        "version": 1, "name": "a", "image": "a", "store": "s3://bucket/a", "kubernetes": section,
        "stages": [{"name": "a", "command": ["a"]}],
    }  # fmt: skip
    return rendered(plan_of(load_pipeline_text(json.dumps(document), "a.yaml"), "a"))


PLACES = sorted(places(SECTION), key=str)


@RELAXED
@given(st.sampled_from(PLACES), HOSTILE | st.from_regex(r"[a-z0-9./:-]{1,70}", fullmatch=True))
def test_hostile_text_in_the_section_is_refused_or_stays_text(path: tuple[Any, ...], text: str) -> None:
    try:
        objects = with_text(path, text)
    except SpecErrors:
        return
    assert [skeleton(found) for found in objects] == [skeleton(found) for found in with_text(PLACES[0], "b")]
    assert list(manifests.load(documents(objects))) == objects
    for found in objects:
        assert all(LABEL_VALUE.fullmatch(value) for value in found["metadata"]["labels"].values())


def rendered(plan: Plan) -> list[dict[str, Any]]:
    assert plan.cluster is not None
    driver = driver_objects(
        RUN_ID, plan.store_url, plan.cluster, stage=None, spec_digest=plan.spec_digest, seal="TEXT:SET"
    )
    return [*stage_objects(plan), *driver]


PLAIN = rendered(hostile("plain"))


@RELAXED
@given(HOSTILE)
@example("http://[")
def test_hostile_text_stays_text(text: str) -> None:
    objects = rendered(hostile(text))
    assert [skeleton(found) for found in objects] == [skeleton(found) for found in PLAIN]
    written = documents(objects)
    assert list(manifests.load(written)) == objects
    for found in objects:
        root, problems = parse(documents([found]).removeprefix("---\n"), "x")
        assert root is not None
        assert not problems
        assert root.plain() == found
    config, jobset, driver = objects
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    env = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
    assert expand(env["OWN"], {"HOME": "/tmp"}) == text
    args = driver["spec"]["template"]["spec"]["containers"][0]["args"]
    assert expand(args[args.index("--store") + 1], {"HOME": "/tmp"}) == f"s3://bucket/{text}"
    assert Plan.from_json(config["data"]["plan.json"]) == hostile(text)
