"""What concerns several values of the `slurm` section; reads the raw tree, like `spec/rules.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mlpipe.spec.problems import Problem, closest
from mlpipe.spec.tree import Node, get, groups_of, items_of, problem_of_key, text_of

# Options that mlpipe writes itself, by the key that says the same; "": it needs them as they are.
_SAID_BY = {
    "partition": "slurm.partition",
    "account": "slurm.account",
    "qos": "slurm.qos",
    "reservation": "slurm.reservation",
    "constraint": "slurm.constraint",
    "time": "slurm.time",
    "nodes": "resources.nodes",
    "cpus-per-task": "resources.cpus",
    "mem": "resources.memory",
    "mem-per-cpu": "resources.memory",
    "mem-per-gpu": "resources.memory",
    "gres": "resources.gpus_per_node",
    "gpus": "resources.gpus_per_node",
    "gpus-per-node": "resources.gpus_per_node",
    "gpus-per-task": "resources.gpus_per_node",
    "gpus-per-socket": "resources.gpus_per_node",
}
_NOT_YOURS = [
    "array",
    "batch",
    "begin",
    "chdir",
    "cluster-constraint",
    "clusters",
    "comment",
    "container",
    "dependency",
    "error",
    "export",
    "export-file",
    "get-user-env",
    "gid",
    "help",
    "hold",
    "input",
    "job-name",
    "kill-on-invalid-dep",
    "no-kill",
    "no-requeue",
    "ntasks",
    "ntasks-per-core",
    "ntasks-per-gpu",
    "ntasks-per-node",
    "ntasks-per-socket",
    "open-mode",
    "output",
    "overcommit",
    "parsable",
    "quiet",
    "requeue",
    "signal",
    "spread-job",
    "test-only",
    "uid",
    "usage",
    "use-min-nodes",
    "verbose",
    "version",
    "wait",
    "wrap",
]

_VALUE = r"""[!$-&(-\[\]-~]*"""  # else a second option could stand in it


def check(root: Node) -> list[Problem]:
    """Every violated rule of the section."""
    section = get(root, "slurm")
    if section is None or not isinstance(section.value, dict):
        return []
    stages = [stage for stage in items_of(root, "stages") if isinstance(stage.value, dict)]
    return [*_options(section), *_stages(section, stages), *_image(root, section)]


def _options(keys: Node) -> Iterator[Problem]:
    options = get(keys, "options")
    for name, node in (
        options.value.items() if options is not None and isinstance(options.value, dict) else ()
    ):
        if (key := _SAID_BY.get(name)) is not None:
            yield problem_of_key(node, f"--{name} follows from {key}", f"write {key} instead")
        elif name in _NOT_YOURS:
            yield problem_of_key(
                node, f"without its own --{name}, mlpipe does not find, stop or follow the job", "remove it"
            )
        elif whole := [one for one in (*_SAID_BY, *_NOT_YOURS) if one.startswith(name)]:
            words = f"sbatch takes --{name} for the beginning of --{whole[0]}"
            yield problem_of_key(node, words, "write the whole name of the option that you mean")
        elif (text := text_of(node)) is not None and re.fullmatch(_VALUE, text) is None:
            words = "in a line of a script nothing is quoted"
            yield Problem.at(node.place, words, "write printable ASCII without blanks, quotes, '\\' and '#'")


def _stages(section: Node, stages: list[Node]) -> Iterator[Problem]:
    single = get(section, "stages")
    if single is None or not isinstance(single.value, dict):
        return
    names = [name for stage in stages if (name := text_of(get(stage, "name"))) is not None]
    for name, node in single.value.items():
        if name not in names:
            yield problem_of_key(node, f"there is no stage {name!r}", closest(name, names))
        if isinstance(node.value, dict):
            yield from _options(node)
            yield from _groups(node, [stage for stage in stages if text_of(get(stage, "name")) == name])


def _groups(single: Node, stages: list[Node]) -> Iterator[Problem]:
    asked = get(single, "groups")
    if asked is None or not isinstance(asked.value, list) or not asked.value or len(stages) != 1:
        return
    number = len(groups_of(stages[0]))
    if not number:
        words = "the stage's resources list no groups of machines"
        yield problem_of_key(asked, words, "write these keys without groups, or a list in resources")
    elif len(asked.value) != number:
        words = f"{len(asked.value)} groups, and the stage's resources have {number}"
        yield problem_of_key(asked, words, "write one for each, in their order; {} where nothing differs")


def _image(root: Node, section: Node) -> Iterator[Problem]:
    container = get(section, "container")
    if container is None or not isinstance(container.value, dict) or "image" in container.value:
        return
    if get(root, "image") is None:
        yield problem_of_key(
            container, "the container has no image", "add 'image: ...' here or to the pipeline"
        )
