"""What passes between the verbs and a backend: what is asked for, and what the backend answers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

from mlpipe._core.errors import MlpipeError, SubmitError
from mlpipe._core.ids import spec_seal

if TYPE_CHECKING:
    from mlpipe.plan.lasting import Lasting
    from mlpipe.spec.model import Pipeline

T = TypeVar("T")


class Console(Protocol):
    """Where a backend speaks to whoever called it. `quiet`: nobody watches."""

    quiet: bool

    def note(self, text: str) -> None:
        """A line for a person who watches."""

    def complain(self, text: str) -> None:
        """A line that also a quiet call shows."""


class Option(NamedTuple):
    """An option that a backend adds to a verb. `repeated`: it takes several values, and is a tuple.
    `required`: the backend cannot do without."""

    flag: str
    metavar: str
    help: str
    repeated: bool = False
    required: bool = False

    @property
    def name(self) -> str:
        """`--queue-name` -> `queue_name`."""
        return self.flag.removeprefix("--").replace("-", "_")


@dataclass(frozen=True)
class Submission:
    """What is asked for. `spec`: the pipeline's file, or where it lies in the store; `text`: what it says,
    before `overrides`, which have what stands in a file of this machine alone, too. `stage`: only that one.
    `folder`: where commands run, and a user's modules are."""

    spec: str
    text: str
    overrides: tuple[str, ...]
    pipeline: "Pipeline"
    store_url: str
    folder: str
    stage: str | None = None
    run_id: str | None = None

    def __post_init__(self) -> None:
        """A run goes on where the user's own file of networks is not."""
        if self.pipeline.network is None:
            return
        from mlpipe.spec.network import written_out  # of few files

        object.__setattr__(self, "overrides", written_out(self.pipeline.network, self.overrides))

    def digests(self) -> str:
        """What a driver elsewhere is sealed with (`seal.py`)."""
        return spec_seal(self.text, self.overrides)


def refuse_sweep(submission: Submission, what: str) -> None:
    """By who renders `what`, which is of one run. Raises SubmitError (input)."""
    if submission.pipeline.sweep is not None:
        raise SubmitError(
            f"a sweep is several runs, each with {what} of its own",
            where=submission.spec,
            hint="what one of them is: --set sweep=null",
            kind="input",
        )


class Preview(NamedTuple):
    """What would be sent: for machines, and the same for people."""

    document: Any
    text: str


class Rendered(NamedTuple):
    """Files to review and commit: `files` by name below `--out`; named "", the one is `--out` itself.
    `about`: what the JSON document says besides. `preview`: without `--out`. `head`: how a file begins that
    an earlier call wrote; what is there of them and is not in `files` goes."""

    files: Mapping[str, str]
    preview: Preview
    about: Mapping[str, Any] = {}
    head: str = ""


class Finding(NamedTuple):
    """Of `mlpipe doctor`. `fail` keeps mlpipe from training there; `warn` takes something away."""

    name: str
    level: Literal["ok", "warn", "fail"]
    detail: str
    remedy: str | None = None


class Availability(NamedTuple):
    """Of a place, for a run that would be submitted now. `wait_seconds`: until its stages could begin; None:
    nobody knows. `words`: why. `lasting`: of a place that itself knows what the run takes and costs there."""

    wait_seconds: float | None = None
    words: str = ""
    lasting: "Lasting | None" = None


def attempt(name: str, action: Callable[[], T]) -> T | Finding:
    """What `action` returns, or what kept it from that."""
    try:
        return action()
    except MlpipeError as error:
        return Finding(name, "fail", error.told, error.hint)
