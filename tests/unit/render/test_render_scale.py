"""Rendering many stages costs each of them the same: calls are counted, so that any machine can tell."""

from __future__ import annotations

import cProfile
import json
import pstats

import pytest

from benchmarks.render_scale import pipeline
from mlpipe.cli.session import CliSession
from mlpipe.spec.load import load_pipeline
from mlpipe.submit.kubernetes.manifests import manifests
from mlpipe.submit.submission import Submission

pytestmark = pytest.mark.unit


def num_calls(folder, num_stages):
    path = folder / f"{num_stages}.yaml"
    path.write_text(json.dumps(pipeline(num_stages)))
    profile = cProfile.Profile()
    profile.enable()
    spec = load_pipeline(str(path), overrides=())
    manifests(Submission(str(path), "text", (), spec, spec.store, str(folder), run_id="run"), CliSession())
    profile.disable()
    return pstats.Stats(profile).total_calls


def test_a_stage_costs_the_same_however_many_there_are(tmp_path):
    num_calls(tmp_path, 10)  # imports and caches
    few, some, many = (num_calls(tmp_path, number) for number in (20, 40, 80))
    assert many - some <= 2.01 * (some - few)
