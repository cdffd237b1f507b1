"""Which stages need which, by name, in the raw tree of a file."""

from __future__ import annotations

from collections.abc import Iterator

from mlpipe.spec.part import kind_of
from mlpipe.spec.problems import Problem, closest
from mlpipe.spec.tree import Node, get, items_of, text_of


class Graph:
    """Who needs whom, by name."""

    def __init__(self, stages: list[Node]) -> None:
        self.stages = {name: stage for stage in reversed(stages) if (name := text_of(get(stage, "name")))}
        self.needs = {
            name: [node for node in items_of(stage, "needs") if isinstance(node.value, str)]
            for name, stage in self.stages.items()
        }
        self._before: dict[str, set[str]] = {}

    def before(self, name: str) -> set[str]:
        """Everything that `name` needs, transitively. What an earlier stage needs is not walked again."""
        if name in self._before:
            return self._before[name]
        seen: set[str] = set()
        todo = [name]
        while todo:
            for node in self.needs.get(todo.pop(), []):
                if node.value in self._before:
                    seen |= {node.value} | self._before[node.value]
                elif node.value not in seen:
                    seen.add(node.value)
                    todo.append(node.value)
        self._before[name] = seen
        return seen

    def of_kind(self, kind: str, names: set[str]) -> list[str]:
        """Those of `names`, sorted."""
        return sorted(name for name in names if name in self.stages and self.kind_name(name) == kind)

    def kind_name(self, name: str) -> str | None:
        kind = kind_of(self.stages[name])
        return None if kind is None else kind.name

    def problems(self) -> Iterator[Problem]:
        """Needs that lead nowhere, twice to the same stage, or in a circle."""
        reported: set[str] = set()
        for name, needs in sorted(self.needs.items()):
            seen: set[str] = set()
            for node in needs:
                if node.value in seen:
                    yield Problem.at(node.place, f"{node.value!r} is needed twice", "remove one")
                elif node.value not in self.stages:
                    known = [other for other in self.stages if other != name]
                    yield Problem.at(
                        node.place, f"there is no stage {node.value!r}", closest(node.value, known)
                    )
                elif node.value == name:
                    yield Problem.at(node.place, f"stage {name!r} needs itself", "remove it")
                seen.add(node.value)
            if name not in reported and name not in seen and name in self.before(name):
                cycle = self.cycle(name)
                reported.update(cycle)
                yield Problem.at(
                    needs[0].place,
                    f"stages need each other in a circle: {' -> '.join([*cycle, cycle[0]])}",
                    "remove one of these needs",
                )

    def cycle(self, start: str) -> list[str]:
        """The shortest circle of needs through `start`."""
        previous: dict[str, str] = {}
        todo = [start]
        for name in todo:
            for node in self.needs.get(name, []):
                if node.value == start:
                    path = [name]
                    while path[-1] != start:
                        path.append(previous[path[-1]])
                    return path[::-1]
                if node.value not in previous:
                    previous[node.value] = name
                    todo.append(node.value)
        return [start]
