"""A Pipeline to a Declarative Jenkinsfile, with one Jenkins stage for each of its own.

Groovy is glue. What the user wrote (the path of the file, overrides, the store) never stands in Groovy's code
or in a command: it is shell-quoted into a data file that the build writes and each step sources, byte for
byte. Names of stages have no character that Groovy or a shell could misread (`_core/ids.py`).
"""

from __future__ import annotations

import base64
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import PurePosixPath

from mlpipe._core.errors import RenderError
from mlpipe._core.meshes import STRATEGIES
from mlpipe._core.units import parse_seconds
from mlpipe.kinds.train.spec import Train
from mlpipe.spec.model import Pipeline, Stage
from mlpipe.spec.sweep import Sweep
from mlpipe.spec.trials import num_trials
from mlpipe.store.sweeps import trial_name

HEAD = "// Written by `mlpipe render --for jenkins`: change the pipeline file, not this one.\n"
MAX_STAGES = 20  # above it, a loop: Jenkins compiles a Declarative model into one method of at most 64 KB
MAX_DATA_BYTES = 32 * 2**10  # a literal of Java has at most 64 KB
LABEL = "mlpipe"  # of the agents
MAX_TRIAL_BRANCHES = 8  # each is a process on the agent; with more trials a branch follows several in turn
_UNCHANGED = "as in the file"  # the first choice of STRATEGY
_QUEUE_HOURS = 24  # added to a stage's own timeout, which does not count the time in a queue
_DEFAULT_HOURS = 7 * 24
_CANCEL_MINUTES = 12
_PLAIN = re.compile(r"[ -\[\]-~]*")  # printable ASCII without a backslash
_DATA_LINES = 7
_SOURCE = ". ./.mlpipe/arguments"

_STORE_PARAMETER = (  # of a sweep there is none: `submit --to jenkins` takes none
    "        string(name: 'STORE', defaultValue: '', trim: true,",
    "            description: 'Of `mlpipe submit --to jenkins`: where RUN_ID and its pipeline are')",
)

# Constant, so that a review of one Jenkinsfile is a review of all. POSIX: the agent's sh may be dash.
_ARGUMENTS = r"""# Sourced by each step: "$@" becomes what every verb is given, RUN_ID the run of this build.
. ./.mlpipe/data
if [ -n "${STORE:-}" ]; then
  MLPIPE_STORE=$STORE spec=.mlpipe/asked.yaml
  set --
fi
carriage_return=$(printf '\r')
while IFS= read -r override; do
  override=${override%"$carriage_return"}
  if [ -n "$override" ]; then set -- "$@" --set "$override"; fi
done <<END_OF_OVERRIDES
${OVERRIDES:-}
END_OF_OVERRIDES
if [ "${STRATEGY:-as in the file}" != 'as in the file' ]; then
  for name in $trains; do set -- "$@" --set "stages.$name.train.strategy=$STRATEGY"; done
fi
set -- "$@" -- "$spec"
if [ -z "${MLPIPE_STORE:-}" ]; then MLPIPE_STORE=$store; fi
if [ -z "${RUN_ID:-}" ]; then
  build=$(printf '%s\n' "${JENKINS_URL:-}" "$JOB_NAME" "$BUILD_NUMBER" "$BUILD_STARTED" "$digest" | sha256sum)
  RUN_ID=$pipeline-$BUILD_NUMBER-$(printf %.10s "$build")
fi
export MLPIPE_STORE RUN_ID

# What `mlpipe submit --to jenkins` left in the store. A Jenkinsfile has its stages, and so must the pipeline.
fetch_spec() {
  if [ -n "${STORE:-}" ]; then
    mlpipe spec --out "$spec" --digest "${SPEC_DIGEST:-none}" --stages "$stages" -- "$RUN_ID"
  fi
}

# Whoever triggered the build may say which pipeline was meant: what mlpipe calls its digest.
check_digest() {
  if [ -n "${SPEC_DIGEST:-}" ] && ! grep -qF '"spec_digest": "'"$SPEC_DIGEST"'"' .mlpipe/plan.json; then
    echo "the pipeline in this checkout, with these parameters, is not the one that was asked for" >&2
    exit 2
  fi
}

# submit_stage NAME ARGUMENT...: branches of `parallel` do this at once. The run has one driver, which walks
# what all of them ask for; the others follow, and one of them starts the next driver should it die.
submit_stage() {
  stage=$1
  shift
  mlpipe submit --to "${BACKEND:-local}" --run-id "$RUN_ID" --stage "$stage" --wait "$@"
}
"""


def jenkinsfile(
    pipeline: Pipeline, spec: str, overrides: Sequence[str], store: str, backends: Sequence[str]
) -> str:
    """`backends`: where a build may have it run, first where it does unless told otherwise. `spec`: its path
    in the repository, from the top, which is where a build runs. `store`: as the user wrote it; a relative
    folder lies in the build's workspace. Raises RenderError."""
    _refuse(pipeline, spec)
    levels = _levels(pipeline)
    if (sweep := pipeline.sweep) is not None:
        stages: Iterable[str] = _sweep(pipeline, sweep)
        lists = [f"writeFile file: '.mlpipe/trials', text: {_block(_trials(sweep))}"]
    elif len(pipeline.stages) > MAX_STAGES:
        stages = _loop(pipeline)
        names = "\n".join("".join(f"{stage.name}\n" for stage in level) for level in levels)
        lists = [f"writeFile file: '.mlpipe/stages', text: {_block(names)}"]
    else:
        stages, lists = _stages(levels), []
    files = [
        "sh 'rm -rf .mlpipe'",
        f"writeFile file: '.mlpipe/data', {_text(_data(pipeline, spec, overrides, store))}",
        *lists,
        f"writeFile file: '.mlpipe/arguments', text: {_block(_ARGUMENTS)}",
    ]
    return HEAD + "\n".join(
        [
            "pipeline {",
            f"    agent {{ label '{LABEL}' }}",
            "    options {",
            "        buildDiscarder(logRotator(numToKeepStr: '50'))",
            "        durabilityHint('MAX_SURVIVABILITY')",
            "    }",
            "    parameters {",
            "        text(name: 'OVERRIDES', defaultValue: '', description: 'KEY=VALUE, one on a line')",
            f"        choice(name: 'STRATEGY', choices: {_list([_UNCHANGED, 'auto', *STRATEGIES])},",
            "            description: 'How to split the training')",
            f"        choice(name: 'BACKEND', choices: {_list(backends)}, description: 'Where it runs')",
            "        booleanParam(name: 'DRY_RUN', defaultValue: false, description: 'Only plan')",
            "        string(name: 'RUN_ID', defaultValue: '', trim: true,",
            "            description: 'A run to go on with; empty: one of this build')",
            *(_STORE_PARAMETER if sweep is None else ()),
            "        string(name: 'SPEC_DIGEST', defaultValue: '', trim: true,",
            "            description: 'Refuse any other pipeline; empty: take the one of the checkout')",
            "    }",
            "    environment {",
            '        BUILD_STARTED = "${currentBuild.startTimeInMillis}"',
            "    }",
            "    stages {",
            "        stage('Validate') {",
            "            steps {",
            *(f"                {line}" for line in files),
            *_sh('fetch_spec; mlpipe validate "$@"', 16),
            "            }",
            "        }",
            "        stage('Plan') {",
            "            steps {",
            *_sh('mlpipe plan --output json "$@" > .mlpipe/plan.json', 16),
            *_sh('mlpipe plan "$@"; check_digest', 16),
            "            }",
            "        }",
            *stages,
            "    }",
            "    post {",
            "        aborted {",
            f"            timeout(time: {_CANCEL_MINUTES + 1}, unit: 'MINUTES') {{",
            # no such run: the build was aborted before it started one
            *_late(f'mlpipe cancel --ignore-not-found --timeout {_CANCEL_MINUTES}min -- "$RUN_ID"', 16),
            "            }",
            "        }",
            "        cleanup {",
            "            timeout(time: 5, unit: 'MINUTES') {",
            *_late('mlpipe report --out .mlpipe/report.html -- "$RUN_ID" || true', 16),
            "                archiveArtifacts artifacts: '.mlpipe/plan.json,.mlpipe/report.html',",
            "                    allowEmptyArchive: true, fingerprint: true",
            "            }",
            "        }",
            "    }",
            "}\n",
        ]
    )


def _refuse(pipeline: Pipeline, spec: str) -> None:
    path = PurePosixPath(spec)
    if path.is_absolute() or ".." in path.parts:
        raise RenderError(
            "a build reads the pipeline file from its checkout, by a path from the top of the repository",
            where=spec,
            hint="run mlpipe render at the top, with a relative path",
        )
    for one in pipeline.stages:
        if one.resources is not None and one.resources.replicas is not None:
            raise RenderError(
                "a build runs no elastic training",
                where=f"stage {one.name!r}",
                hint=f"use `mlpipe submit`, or write one number of nodes: {one.resources.replicas[1]}",
            )


def _levels(pipeline: Pipeline) -> list[list[Stage]]:
    """Stages that need only those of the levels before; in the order of the file within one."""
    order = {stage.name: number for number, stage in enumerate(pipeline.stages)}
    graph = TopologicalSorter({stage.name: stage.needs for stage in pipeline.stages})
    graph.prepare()
    levels = []
    while graph.is_active():
        names = sorted(graph.get_ready(), key=order.__getitem__)
        levels.append([pipeline.stages[order[name]] for name in names])
        graph.done(*names)
    return levels


def _stages(levels: list[list[Stage]]) -> Iterator[str]:
    for number, level in enumerate(levels, start=1):
        if len(level) == 1:
            yield from _stage(level[0], 8)
            continue
        yield f"        stage('Level {number}') {{"  # stages' own names have no capitals
        yield "            parallel {"
        for stage in level:
            yield from _stage(stage, 16)
        yield "            }"
        yield "        }"


def _stage(stage: Stage, indent: int) -> Iterator[str]:
    lines = [
        f"stage('{stage.name}') {{",
        "    when { not { expression { params.DRY_RUN } } }",
        f"    options {{ timeout(time: {_hours(stage)}, unit: 'HOURS') }}",
        "    steps {",
        *_sh(f'submit_stage {stage.name} "$@"', 8),
        "    }",
        "}",
    ]
    return (" " * indent + line for line in lines)


def _loop(pipeline: Pipeline) -> list[str]:
    """The same in Groovy of one size, over `.mlpipe/stages`: a name a line, an empty line between levels."""
    hours = max(_hours(stage) for stage in pipeline.stages)
    lines = [
        "stage('Stages') {",
        "    when { not { expression { params.DRY_RUN } } }",
        "    steps {",
        "        script {",
        "            for (level in readFile('.mlpipe/stages').trim().split('\\n\\n')) {",
        "                def branches = [:]",
        "                for (line in level.split('\\n')) {",
        "                    def name = line",
        "                    branches[name] = {",
        "                        stage(name) {",
        f"                            timeout(time: {hours}, unit: 'HOURS') {{",
        "                                withEnv(['PIPELINE_STAGE=' + name]) {",
        *_sh('submit_stage "$PIPELINE_STAGE" "$@"', 36),
        "                                }",
        "                            }",
        "                        }",
        "                    }",
        "                }",
        "                parallel branches",
        "            }",
        "        }",
        "    }",
        "}",
    ]
    return [" " * 8 + line for line in lines]


def _trials(sweep: Sweep) -> str:
    """A name a line, an empty line between branches."""
    names = [trial_name(number) for number in range(num_trials(sweep))]
    branches = [names[first::MAX_TRIAL_BRANCHES] for first in range(min(MAX_TRIAL_BRANCHES, len(names)))]
    return "\n".join("".join(f"{name}\n" for name in branch) for branch in branches)


def _sweep(pipeline: Pipeline, sweep: Sweep) -> list[str]:
    """One branch drives the sweep, which says how many trials run at once; the others follow its trials. One
    that fails is red, and fails neither the others nor the build, which ends as the sweep does."""
    rounds = math.ceil(num_trials(sweep) / sweep.max_parallel)
    hours = sum(map(_hours, pipeline.stages)) * rounds
    lines = [
        "stage('Sweep') {",
        "    when { not { expression { params.DRY_RUN } } }",
        f"    options {{ timeout(time: {hours}, unit: 'HOURS') }}",
        "    steps {",
        "        script {",
        "            def branches = [:]",
        "            def over = ''",
        "            branches['sweep'] = {",
        "                try {",
        *_sh('mlpipe sweep --to "${BACKEND:-local}" --sweep-id "$RUN_ID" "$@"', 20),
        "                } finally {",
        "                    over = '--driver-ended'",
        "                }",
        "            }",
        "            for (group in readFile('.mlpipe/trials').trim().split('\\n\\n')) {",
        "                def names = group.split('\\n')",
        "                branches[names[0]] = {",
        "                    for (line in names) {",
        "                        def name = line",
        "                        stage(name) {",
        "                            catchError(buildResult: 'SUCCESS', stageResult: 'FAILURE',",
        "                                       catchInterruptions: false) {",
        "                                withEnv(['TRIAL=' + name, 'OVER=' + over]) {",
        *_sh('mlpipe sweep --sweep-id "$RUN_ID" --follow "$TRIAL" $OVER', 36),
        "                                }",
        "                            }",
        "                        }",
        "                    }",
        "                }",
        "            }",
        "            parallel branches",
        "        }",
        "    }",
        "}",
    ]
    return [" " * 8 + line for line in lines]


def _hours(stage: Stage) -> int:
    """A backstop above the timeout that mlpipe itself keeps."""
    return (
        _DEFAULT_HOURS
        if stage.timeout is None
        else math.ceil(parse_seconds(stage.timeout) / 3600) + _QUEUE_HOURS
    )


def _data(pipeline: Pipeline, spec: str, overrides: Sequence[str], store: str) -> str:
    values = [part for override in overrides for part in ("--set", override)]
    trains = [stage.name for stage in pipeline.stages if stage.part(Train) is not None]
    lines = {
        "spec": spec,
        "store": store,
        "pipeline": pipeline.name[:30],
        "digest": pipeline.digest,
        "stages": ",".join(stage.name for stage in pipeline.stages),
        "trains": " ".join(trains),
    }
    if "\0" in spec + store + "".join(values):
        raise RenderError("a NUL cannot enter an argument", where=spec)
    text = "".join(
        [" ".join(["set --", *map(shlex.quote, values)]) + "\n"]
        + [f"{name}={shlex.quote(value)}\n" for name, value in lines.items()]
    )
    size = len(text.encode(errors="surrogateescape"))
    if size > MAX_DATA_BYTES:
        raise RenderError(
            f"what the build must know has {size} bytes, a Jenkinsfile takes {MAX_DATA_BYTES}",
            where=spec[:200],
            hint="write the overrides into the pipeline file",
        )
    return text


def _sh(command: str, indent: int) -> list[str]:
    """`command` is ours, and has neither an apostrophe nor a backslash."""
    return [f"{' ' * indent}sh '{_SOURCE}; {command}'"]


def _late(command: str, indent: int) -> list[str]:
    """In `post`: the build may have ended before it wrote the file."""
    return [f"{' ' * indent}sh 'if [ -e .mlpipe/arguments ]; then {_SOURCE}; {command}; fi'"]


def _text(text: str) -> str:
    """Arguments of `writeFile`: to be read where it is plain, else in base64, which Groovy cannot misread
    (it expands `\\uXXXX` before it reads anything)."""
    lines = text.removesuffix("\n").split("\n")
    if all(map(_PLAIN.fullmatch, lines)) and len(lines) == _DATA_LINES:
        literals = ["'" + line.replace("'", "\\'") + "\\n'" for line in lines]
        return "text: " + (" +\n" + " " * 20).join(literals)
    return f"encoding: 'Base64', text: '{base64.b64encode(text.encode(errors='surrogateescape')).decode()}'"


def _block(text: str) -> str:
    """A constant of ours as a literal of several lines."""
    return "'''" + text.replace("\\", "\\\\") + "'''"


def _list(values: Sequence[str]) -> str:
    return "[" + ", ".join(f"'{value}'" for value in values) + "]"
