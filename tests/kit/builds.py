"""As much of a Jenkins as can be had here: the stand-in's HTTP and queue (`kit/jenkins.py`), and for each
build the repository's own Jenkinsfile on Jenkins' CPS engine (`kit/groovy`), whose `sh` steps really run. The
agent is a folder on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from kit import groovy
from kit.command_runs import until
from kit.jenkins import TOKEN, USER, FakeBuild, FakeJenkins, FakeJob, fake_jenkins
from kit.run_ids import claim_named
from kit.servers import die_with_parent

ROOT = Path(__file__).parents[2]
JOB = "team/train"
_LOOK_SECONDS = 0.05
_CLIENT_SECONDS = 600


class Building:
    """One build. If the controller is killed, it goes on in the next one with the same parameters."""

    def __init__(self, controller: Controller, build: FakeBuild) -> None:
        self.began = time.time()
        self.folder = controller.folder / f"build-{build.number}"
        self.workspace = self.folder / "workspace"
        self.workspace.mkdir(parents=True)
        self.ran: groovy.Ran | None = None
        self._controller, self._build = controller, build
        self._killed = False
        self._thread = threading.Thread(target=self._work, name="build", daemon=True)
        self._thread.start()

    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def abort(self) -> None:
        (self.folder / "abort").touch()

    def kill_controller(self) -> None:
        self._killed = True
        self._controller.jvm.process.kill()

    def agents(self) -> list[int]:
        """Process groups of `sh` steps in which `mlpipe submit --phase train` runs for this build."""
        found = set()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                argv = (path / "cmdline").read_text().split("\0")
                folder = os.readlink(path / "cwd")
                if "submit" in argv and "--phase" in argv and folder.startswith(str(self.workspace)):
                    found.add(os.getpgid(int(path.name)))
            except OSError:
                continue  # gone meanwhile
        return sorted(found)

    def kill_agent(self) -> None:
        for group in self.agents():
            os.killpg(group, signal.SIGKILL)

    def _work(self) -> None:
        result = "FAILURE"
        try:
            while self.ran is None:
                try:
                    self.ran = self._execute()
                    result = self.ran.result
                except AssertionError:
                    if not self._killed:
                        raise
                    self._killed = False
                    self._controller.restart()
        finally:
            with self._controller.jenkins.lock:
                self._build.log = (self.log() + "\n").encode()
                self._build.result, self._build.complete = result, True

    def _execute(self) -> groovy.Ran:
        return groovy.executed(
            self._controller.repository / "Jenkinsfile",
            self.workspace,
            {**self._controller.environment, "BUILD_NUMBER": str(self._build.number)},
            dict(self._build.parameters),
            jvm=self._controller.jvm,
            repository=str(self._controller.repository),
            input="approve",
        )


class Controller:
    """Its JVM runs one build at a time."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str], backend: str, jenkins: FakeJenkins
    ) -> None:
        self.folder, self.jenkins = folder, jenkins
        self.repository = folder / "repository"
        (self.repository / "k8s/jenkins").mkdir(parents=True)
        for name in ("Jenkinsfile", "k8s/jenkins/build.sh"):
            shutil.copy(ROOT / name, self.repository / name)
        names = ("RUN_ID", "STORE", "SPEC_DIGEST")
        jenkins.jobs[JOB] = FakeJob({**dict.fromkeys(names, ""), "BACKEND": backend})
        self.environment = {
            **environment,
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "JENKINS_URL": jenkins.url,
            "JOB_NAME": JOB,
        }
        self.builds: list[Building] = []
        self.queued: list[float] = []  # when each was seen in the queue, Unix seconds
        self.jvm = groovy.Jvm()

    def restart(self) -> None:
        self.jvm.close()
        self.jvm = groovy.Jvm()

    def submit(self, spec: Path, run_id: str) -> subprocess.Popen[bytes]:
        """`mlpipe submit --to jenkins --wait`, left running."""
        access = {"JENKINS_URL": self.jenkins.url, "JENKINS_USER_ID": USER, "JENKINS_API_TOKEN": TOKEN}
        argv = ["submit", spec, "--to", "jenkins", "--job", JOB, "--run-id", run_id, "--wait"]
        claim_named(argv)
        with (self.folder / f"client-{run_id}.log").open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "mlpipe.cli", *map(str, argv)],
                env={**os.environ, **self.environment, **access},
                cwd=self.folder,
                preexec_fn=die_with_parent,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def ended(self, client: subprocess.Popen[bytes]) -> int:
        return client.wait(_CLIENT_SECONDS)

    def build(self, number: int) -> Building:
        return until(lambda: self.builds[number - 1 : number], f"build {number}")[0]

    def look(self) -> None:
        """Items leave the queue, and logs grow."""
        with self.jenkins.lock:
            for item in self.jenkins.items:
                if item.build is None and not item.cancelled:
                    self.queued.append(time.time())
                    self.builds.append(Building(self, self.jenkins.start(item)))
            for building, build in zip(self.builds, self.jenkins.jobs[JOB].builds, strict=True):
                if not build.complete:
                    build.log = building.log().encode()


@contextlib.contextmanager
def controller(folder: Path, environment: Mapping[str, str], backend: str) -> Iterator[Controller]:
    """`environment`: of the agent and of the client, with the store. All of it is in the network of the
    calling thread."""
    done = threading.Event()
    with fake_jenkins() as jenkins:
        one = Controller(folder, environment, backend, jenkins)

        def work() -> None:
            while not done.wait(_LOOK_SECONDS):
                one.look()

        thread = threading.Thread(target=work, name="queue", daemon=True)
        thread.start()
        try:
            yield one
        finally:
            done.set()
            one.jvm.close()
            thread.join(300)
            assert not thread.is_alive(), "the queue did not stop within 10 s"
