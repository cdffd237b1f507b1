"""From a `sweep` to its trials: which there are, and that each is what `--set` would make of the file."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlpipe.spec.load import load_pipeline_text
from mlpipe.spec.model import Pipeline
from mlpipe.spec.problems import SpecErrors
from mlpipe.spec.sweep import Interval, Sweep, candidates
from mlpipe.spec.trials import num_trials, overrides_of, planned
from mlpipe.store.sweeps import short_names

pytestmark = pytest.mark.unit

BASE: dict[str, Any] = {
    "version": 1,
    "name": "swept",
    "stages": [
        {
            "name": "fit",
            "train": {
                "model": {"entry": "my_pkg.models:build", "args": {"width": 8}},
                "data": {"entry": "my_pkg.data:points", "batch_size": 8},
                "steps": 10,
            },
        }
    ],
}


def text(over: dict[str, Any], **more: Any) -> str:
    return json.dumps({**BASE, "sweep": {"over": over, "metric": {"name": "loss"}, **more}})


def load(over: dict[str, Any], **more: Any) -> Pipeline:
    return load_pipeline_text(text(over, **more), "pipeline.yaml")


def trials(pipeline: Pipeline) -> list[dict[str, Any]]:
    assert pipeline.sweep is not None
    return planned(pipeline.sweep)


def test_a_grid_is_all_combinations_the_last_key_fastest():
    pipeline = load({"optimizer.lr": [0.1, 0.2], "seed": "0..2"})
    lr, seed = "stages.fit.train.optimizer.lr", "stages.fit.train.seed"
    expected = [{lr: rate, seed: number} for rate in (0.1, 0.2) for number in (0, 1, 2)]
    assert trials(pipeline) == expected
    assert pipeline.sweep is not None
    assert num_trials(pipeline.sweep) == 6


@pytest.mark.parametrize(
    "written",
    ["seed", "train.seed", "fit.seed", "fit.train.seed", "stages.fit.seed", "stages.fit.train.seed"],
)
def test_a_key_of_the_only_training_is_found_by_any_of_its_names(written):
    assert [*trials(load({written: [1]}))[0]] == ["stages.fit.train.seed"]


def test_a_range_may_hold_one_value():
    assert trials(load({"seed": "2..2"})) == [{"stages.fit.train.seed": 2}]


def test_of_several_trainings_the_stage_is_named():
    other = {**BASE["stages"][0], "name": "again"}
    spec = {**BASE, "stages": [*BASE["stages"], other], "sweep": {"over": {"seed": [1, 2]}}}
    with pytest.raises(SpecErrors, match="several trainings"):
        load_pipeline_text(json.dumps(spec), "pipeline.yaml")


VALUES = st.one_of(
    st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True),
    st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda pair: f"{min(pair)}..{max(pair)}"),
    st.tuples(st.integers(1, 10**6), st.integers(1, 10**6), st.booleans())
    .filter(lambda drawn: drawn[0] != drawn[1])
    .map(lambda drawn: {"min": min(drawn[:2]), "max": max(drawn[:2]), "log": drawn[2]}),
    st.tuples(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3), st.booleans())
    .filter(lambda drawn: drawn[0] != drawn[1])
    .map(lambda drawn: {"min": min(drawn[:2]), "max": max(drawn[:2]), "log": drawn[2]}),
)


@settings(max_examples=100, deadline=None)
@given(VALUES, st.integers(0, 5), st.integers(1, 6))
def test_what_is_drawn_lies_within_is_the_same_again_and_goes_on_with_more_trials(written, seed, number):
    over = {"model.args.x": written, "model.args.y": {"min": 0.0, "max": 1.0}}
    asked = {"over": over, "method": "random", "seed": seed}
    made = planned(Sweep.model_validate({**asked, "trials": number}))
    assert planned(Sweep.model_validate({**asked, "trials": number})) == made
    assert planned(Sweep.model_validate({**asked, "trials": number + 1}))[:number] == made
    spread = candidates(written)
    for values in made:
        value = values["model.args.x"]
        if isinstance(spread, Interval):
            assert spread.low <= value <= spread.high
            assert isinstance(value, int) == spread.is_whole
        else:
            assert value in spread.values
    assert len({json.dumps(values) for values in made}) == number


@pytest.mark.parametrize(
    "written", [[1, 2, 3], "1..3", {"min": 1, "max": 3}, {"min": 1, "max": 3, "log": True}]
)
def test_nothing_is_drawn_twice_while_there_is_something_else_both_ends_included(written):
    made = trials(load({"seed": written}, method="random", trials=3))
    assert sorted(values["stages.fit.train.seed"] for values in made) == [1, 2, 3]


def test_another_seed_draws_otherwise_and_a_logarithm_spreads_over_magnitudes():
    over = {"optimizer.lr": {"min": 1e-6, "max": 1.0, "log": True}}
    drawn = [
        [
            values["stages.fit.train.optimizer.lr"]
            for values in trials(load(over, method="random", trials=60, seed=seed))
        ]
        for seed in (0, 1)
    ]
    assert drawn[0] != drawn[1]
    for values in drawn:
        assert 10 < sum(value < 1e-3 for value in values) < 50  # half of the magnitudes


@settings(max_examples=10, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["a", "b"]),
        st.lists(
            st.one_of(
                st.booleans(), st.integers(), st.floats(-1e9, 1e9),
                st.text("ab 'é:#{}", max_size=5).filter(lambda text: "{{" not in text),
                st.lists(st.integers(), max_size=2), st.dictionaries(st.sampled_from("xy"), st.integers()),
            ),
            min_size=1, max_size=3, unique_by=json.dumps,
        ),
        min_size=1,
    )
)  # fmt: skip
@example({"a": [[0], {"x": 1}, "0..3", "é: # {"]})
def test_each_trial_is_what_its_overrides_make_of_the_file_without_the_sweep(over):
    asked = text({f"model.args.{name}": values for name, values in over.items()})
    pipeline = load_pipeline_text(asked, "pipeline.yaml")
    for values in trials(pipeline):
        trial = load_pipeline_text(asked, "pipeline.yaml", overrides=overrides_of(values))
        assert trial.sweep is None
        args = trial.stage("fit").work.model.args
        assert args == {"width": 8, **{key.rpartition(".")[2]: value for key, value in values.items()}}


def test_a_mistake_has_the_line_of_its_value():
    lines = [
        "version: 1", "name: swept", "stages:", f"  - {json.dumps(BASE['stages'][0])}", "sweep:",
        "  metric: {name: loss}", "  over:", "    optimizer.lr:", "      - 0.1", "      - -3",
        "    seed: [1]",
    ]  # fmt: skip
    with pytest.raises(SpecErrors) as caught:
        load_pipeline_text("\n".join(lines), "pipeline.yaml")
    assert str(caught.value).startswith("pipeline.yaml:10:9: -3 is out of bounds")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("optimizer.lr=null", {"seed": [1, 2]}),
        ("optimizer.lr=[0.3]", {"optimizer.lr": [0.3], "seed": [1, 2]}),
        ("model.args.width=[4, 8]", {"optimizer.lr": [0.1], "seed": [1, 2], "model.args.width": [4, 8]}),
        ("nope=null", "over has no 'nope'; write one of optimizer.lr, seed"),
        ("optimizer.lrr=null", "over has no 'optimizer.lrr'; did you mean 'optimizer.lr'?"),
        ("seed.x=null", "over has no 'seed.x'; did you mean 'seed'?"),
        ("optimizer.lr.min=1", "'optimizer.lr' is a list, it has no keys; set optimizer.lr as a whole"),
    ],
)
def test_an_override_means_a_key_of_over_with_its_dots(override, says):
    asked, over = f"sweep.over.{override}", {"optimizer.lr": [0.1], "seed": [1, 2]}
    if isinstance(says, str):
        with pytest.raises(SpecErrors) as caught:
            load_pipeline_text(text(over), "p.yaml", overrides=[asked])
        assert str(caught.value) == f"--set {asked}: {says}"
        return
    assert load_pipeline_text(text(over), "p.yaml", overrides=[asked]) == load(says)


def test_a_digest_without_a_sweep_is_what_it_was():
    plain = load_pipeline_text(json.dumps(BASE), "pipeline.yaml")
    assert "sweep" not in plain.resolved_yaml()
    assert load_pipeline_text(text({"seed": [1]}), "p.yaml", overrides=["sweep=null"]).digest == plain.digest


@given(st.lists(st.sampled_from(["a.b", "b", "a.c.b", "c.b", "x"]), min_size=1, unique=True))
def test_short_names_tell_keys_apart_and_end_as_they_do(keys):
    named = short_names(keys)
    assert len(set(named.values())) == len(keys)
    assert all(key == name or key.endswith(f".{name}") for key, name in named.items())
