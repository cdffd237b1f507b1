"""A build is not a run: what befalls an agent or the controller does not start anything twice. The
repository's Jenkinsfile on Jenkins' CPS engine, the stand-in's queue, the real client, the local backend."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kit import groovy
from kit.builds import controller
from kit.command_runs import Cli, shell, until, write_spec
from kit.servers import ServerMissingError

pytestmark = pytest.mark.services


def test_a_killed_agent_and_a_restarted_controller_adopt_the_run(tmp_path: Path) -> None:
    try:
        groovy.build()
    except ServerMissingError as error:
        pytest.skip(str(error))
    cli = Cli(tmp_path)
    begun, go = tmp_path / "begun", tmp_path / "go"
    script = f"echo once >> {begun}; until [ -e {go} ]; do sleep 0.1; done"
    spec = write_spec(tmp_path, {"a": shell(script)})
    environment = {name: value for name, value in cli.env.items() if os.environ.get(name) != value}
    (tmp_path / "jenkins").mkdir()
    with controller(tmp_path / "jenkins", environment, "local") as jenkins:
        first = jenkins.submit(spec, "r")
        until(begun.exists, "the stage")
        jenkins.build(1).kill_agent()
        assert jenkins.ended(first) == 3  # as its build: a failure; the run goes on
        second = jenkins.submit(spec, "r")
        building = jenkins.build(2)
        before = set(until(building.agents, "the second agent"))  # it dies if it writes to the killed one
        building.kill_controller()
        until(lambda: {*building.agents()} - before, "the agent of the controller that started again")
        go.touch()
        assert jenkins.ended(second) == 0, building.log()
        assert building.ran is not None
        assert building.ran.stages[-1] == ("Report", "SUCCESS")
    run = cli.json("status", "r")
    assert (run["state"], run["stages"]["a"]["attempt"]) == ("done", 1)
    assert begun.read_text() == "once\n"
