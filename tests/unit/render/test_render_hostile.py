"""No text of a pipeline changes the structure of what is sent, or becomes other text in the pod."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kit.rendered import QUICKSTART, RUN_ID, pipeline_of, plan_of

from mlpipe.plan.cluster import Patch
from mlpipe.plan.plan import Plan
from mlpipe.render.kubernetes import driver_objects, stage_objects, to_yaml
from mlpipe.render.pod import escaped
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
RELAXED = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
TRAIN = plan_of(pipeline_of("quickstart", *QUICKSTART), "train")


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
    assert TRAIN.train is not None
    assert TRAIN.cluster is not None
    patch = Patch("Pod", None, None, {"metadata": {"annotations": {"own": text}}}, None)
    train = dataclasses.replace(
        TRAIN.train,
        reason=text,
        data=dataclasses.replace(TRAIN.train.data, tokens=text),
        model=dataclasses.replace(
            TRAIN.train.model, build=dataclasses.replace(TRAIN.train.model.build, args={"a": text})
        ),
    )
    return dataclasses.replace(
        TRAIN,
        train=train,
        store_url=f"s3://bucket/{text}",
        launch=dataclasses.replace(TRAIN.launch, env={"OWN": text}),
        cluster=dataclasses.replace(
            TRAIN.cluster,
            image=text,
            node_selector={"pool": text},
            store_endpoint=text,
            store_region=text,
            patches=(patch,),
        ),
    )


def rendered(plan: Plan) -> list[dict[str, Any]]:
    assert plan.cluster is not None
    driver = driver_objects(RUN_ID, plan.store_url, plan.cluster, stage=None, spec_digest=plan.spec_digest)
    return [*stage_objects(plan), *driver]


PLAIN = rendered(hostile("plain"))


@RELAXED
@given(HOSTILE)
@example("http://[")
def test_hostile_text_stays_text(text: str) -> None:
    objects = rendered(hostile(text))
    assert [skeleton(found) for found in objects] == [skeleton(found) for found in PLAIN]
    written = to_yaml(objects)
    assert list(yaml.safe_load_all(written)) == objects
    for found in objects:
        root, problems = parse(to_yaml([found]).removeprefix("---\n"), "x")
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
