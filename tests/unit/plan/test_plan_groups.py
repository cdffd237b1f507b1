"""Plans of trainings on machines that differ."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.rendered import pipeline_of

from mlpipe._core.errors import PlanError
from mlpipe.plan.build import stage_hardware
from mlpipe.plan.groups import parse_groups, plan_groups
from mlpipe.plan.scaling import scale_stage

pytestmark = pytest.mark.unit
PIPELINE = pipeline_of("llm")
SMALL = pipeline_of(
    "llm", "train.model.preset=llama-350m", "train.model.seq_len=2048", "train.data.batch_tokens=4194304"
)

OLD = pipeline_of("llm", "train.model.preset=llama-125m", "train.model.seq_len=1024", "train.precision=auto")


def mixed(pipeline, groups):
    return plan_groups(pipeline, "train", stage_hardware(pipeline, "train", cluster=True), groups)


@pytest.mark.parametrize(
    "text", ["", "2xH100-80GB", "2xH100-80GB,", "0xH100-80GB,1xT4", "H100-80GB,T4", "1xT4,2xH100"]
)
def test_what_names_no_groups_is_refused(text):
    with pytest.raises(PlanError) as refused:
        parse_groups(text)
    assert refused.value.where == "--groups"


def test_groups_of_one_class_are_one_gang_of_it():
    found = mixed(PIPELINE, "1xH100-80GB, 3xH100-80GB")
    hardware = stage_hardware(PIPELINE, "train", cluster=True)
    (row,) = scale_stage(PIPELINE, "train", hardware, "4")
    assert [one.share_ratio for one in found.groups] == [0.25, 0.75]
    assert found.step_seconds == found.even_seconds
    # of all strategies; here only of those whose workers may have unequal shares
    assert found.step_seconds == pytest.approx(row.best.step_seconds, rel=0.1)


@settings(max_examples=5, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from(["H200", "H100-80GB", "A100-80GB", "A100-40GB"])),
        min_size=2,
        max_size=3,
    )
)
def test_shares_follow_speed_and_no_worker_waits_longer_than_for_a_sample(groups):
    found = mixed(SMALL, ",".join(f"{number}x{gpu}" for number, gpu in groups))
    assert sum(one.share_ratio for one in found.groups) == pytest.approx(1)
    assert [(one.num_nodes, one.gpu) for one in found.groups] == groups
    assert found.step_seconds <= found.even_seconds * (1 + 1e-9)
    assert found.step_seconds == max(one.step_seconds for one in found.groups)
    fast = min(found.groups, key=lambda one: one.step_seconds / one.sequences)
    assert fast.sequences == max(one.sequences for one in found.groups)
    for one in found.groups:
        assert one.step_seconds * (one.sequences + 1) / one.sequences >= found.step_seconds * 0.99
        assert one.micro_batch <= one.sequences
        assert (
            one.memory_bytes
            < {"H200": 141, "H100-80GB": 80, "A100-80GB": 80, "A100-40GB": 40}[one.gpu] * 1e9 * 1.08
        )


def test_a_group_pays_for_the_time_in_which_it_has_less_to_do():
    found = mixed(SMALL, "2xH100-80GB,2xA100-80GB")
    for one in found.groups:
        tokens = one.share_ratio * found.tokens_per_second * 3600
        assert one.usd_per_million_tokens == pytest.approx(one.usd_per_hour / tokens * 1e6)


def test_a_card_without_bf16_sets_the_precision_of_all_and_what_fits_nowhere_says_so():
    assert mixed(OLD, "1xH100-80GB,1xV100").groups[0].share_ratio > 0.5
    with pytest.raises(PlanError, match="fits in the memory of each group"):
        mixed(PIPELINE, "1xH100-80GB,1xT4")
    with pytest.raises(PlanError, match="some would have no sample"):
        mixed(PIPELINE, "1xH100-80GB,900xA100-80GB")
