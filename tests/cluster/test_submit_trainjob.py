"""Gangs as TrainJobs: Kubeflow Trainer's own controller makes JobSets of them and the shipped runtime."""

from __future__ import annotations

import os
import signal

import pytest
from kit.place import ROOT
from kit.servers import ServerMissingError
from kit.undisturbed import check_processes, ranks, workers_of

from mlpipe._core.records import Step
from mlpipe.observe.records import read_records

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
RUN = "trainjob"
FORM = {"form": "trainjob", "trainjob": {"runtime": "mlpipe", "overrides": "podTemplateOverrides"}}


@pytest.fixture(scope="module", autouse=True)
def trainer(place):
    try:
        place.cluster.add_trainer()
    except ServerMissingError as error:
        pytest.skip(str(error))
    place.cluster.kubectl("apply", "--server-side", "-k", ROOT / "k8s" / "overlays" / "trainer")


def left(place):
    """What is there of its stage, by kind."""
    found = place.objects("trainjobs,jobsets,jobs,pods", RUN, **{"mlpipe.dev/stage": "train"})
    return sorted(one["kind"] for one in found)


def test_what_trainer_would_not_take_is_refused_before_anything_runs(place, hold):
    for runtime, words in (
        ({**FORM["trainjob"], "runtime": "none"}, "must be created before the TrainJob"),
        ({"runtime": "mlpipe"}, 'unknown field "spec.runtimePatches"'),
    ):
        spec = place.spec("refused", model=hold.model, kubernetes={**FORM, "trainjob": runtime})
        assert words in place.submit(spec, "refused", code=2)


def test_a_trainjob_trains_restarts_and_is_cancelled_as_a_jobset_is(place, hold, undisturbed):
    """Rank processes are those of one machine; a rank is killed, the run cancelled and resumed, and losses
    and weights are those of a run that nothing befell."""
    spec = place.spec(RUN, model=hold.model, kubernetes=FORM)

    def restarted():
        with place.cluster.inside():
            records = read_records(place.store(), f"runs/{RUN}/stages/train/attempt-1", 0)
        return any(isinstance(record, Step) and record.restart == 1 for record in records)

    def message():
        return place.json("status", RUN)["stages"]["train"]["message"]

    with hold:
        place.submit(spec, RUN)
        check_processes(undisturbed.workers, workers_of(RUN, 2))
        place.until_step(RUN, 2)
        (jobset,) = place.objects("jobsets", RUN)
        assert [owner["kind"] for owner in jobset["metadata"]["ownerReferences"]] == ["TrainJob"]
        os.kill(ranks(RUN)[0][0], signal.SIGKILL)
        place.until("the gang, restarted", restarted)
        place.until("the word on it", lambda: "restarted once" in message(), 60)
        assert "train is saved at step" in place.mlpipe("cancel", RUN).stdout
        assert left(place) == []
    assert "memory probe" in place.mlpipe("logs", RUN, "--rank", "1").stdout
    place.mlpipe("resume", RUN)
    undisturbed.check(place, RUN)
    assert place.run_state(RUN).stages["train"].attempt == 2
    (trainjob,) = place.objects("trainjobs", RUN)
    assert [one["type"] for one in trainjob["status"]["conditions"]] == ["Complete"]
