"""Gangs as TrainJobs, in a queue of Kueue: Kubeflow Trainer's own controller makes JobSets of them and the
shipped runtime, once Kueue has admitted them."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest
from kit.place import ROOT, add_queue
from kit.servers import ServerMissingError
from kit.undisturbed import check_processes, ranks, workers_of

from mlpipe._core.records import Step
from mlpipe.observe.records import read_records
from mlpipe.train.launcher import RESTARTS_OF_A_GANG

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
RUN = "trainjob"
FORM = {"form": "trainjob", "trainjob": {"runtime": "mlpipe"}}
QUOTA = {"cpu": "600m", "memory": "6Gi", "ephemeral-storage": "100Gi"}  # of one gang


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
        (
            {**FORM["trainjob"], "runtime": "none"},
            "not found|must be created before",
        ),  # Kueue's, Trainer's word
        (
            {**FORM["trainjob"], "overrides": "podTemplateOverrides"},
            'unknown field "spec.podTemplateOverrides"',
        ),
    ):
        spec = place.spec("refused", model=hold.model, kubernetes={**FORM, "trainjob": runtime})
        assert re.search(words, place.submit(spec, "refused", code=2))


def test_a_trainjob_trains_restarts_and_is_cancelled_as_a_jobset_is(place, hold, undisturbed):
    """Rank processes are those of one machine; a rank is killed, the run cancelled and resumed, and losses
    and weights are those of a run that nothing befell. Its queue is held at first."""
    queue = add_queue(place, "trainjobs", quota=QUOTA)
    spec = place.spec(RUN, model=hold.model, kubernetes={**FORM, "queue": queue})

    def hold_queue(how):
        body = json.dumps({"spec": {"stopPolicy": how}})
        place.cluster.kubectl("patch", "clusterqueue", queue, "--type=merge", "-p", body)

    def restarted():
        with place.cluster.inside():
            records = read_records(place.store(), f"runs/{RUN}/stages/train/attempt-1", 0)
        return any(isinstance(record, Step) and record.restart == RESTARTS_OF_A_GANG for record in records)

    def message():
        return place.json("status", RUN)["stages"]["train"]["message"]

    hold_queue("Hold")
    with hold:
        place.submit(spec, RUN)
        place.until("its reason to wait", lambda: "have the queue repaired" in message(), 120)
        hold_queue("None")
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
    conditions = trainjob["status"]["conditions"]
    assert [one["type"] for one in conditions if one["status"] == "True"] == ["Complete"]
