"""`places.yaml`: where a user's runs can go, for `mlpipe submit --to auto`. No key of it holds a secret: how
a place is reached stands where its own tools keep that (a kubeconfig, Slurm's configuration)."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from mlpipe._core.files import config_folder
from mlpipe.spec import fields as f
from mlpipe.spec.base import SpecModel
from mlpipe.spec.load import read_as
from mlpipe.spec.model import Resources
from mlpipe.spec.problems import Place, Problem, SpecErrors

Goal = Literal["first", "cheapest"]


class RunPlace(SpecModel):
    """A place that runs can go to, and what a pipeline has there."""

    name: f.Name = Field(description="What it is called here. Unique in the file.")
    backend: f.Text = Field(description="As for `mlpipe submit --to`: `local`, `kubernetes`, `slurm`, ...")
    options: dict[str, f.Text | Annotated[tuple[f.Text, ...], Field(strict=False)]] = Field(
        {}, description="Options that the backend adds to `mlpipe submit`, like `{context: prod}`."
    )
    resources: Resources | None = Field(
        None,
        description="Its hardware: replaces these keys in `resources` of each training. With `gpu` or "
        "`gpus_per_node` the file's `workers_per_node`, `device` and `hardware` do not count. "
        "Trainings on CPUs heed `gpu` only with `gpus_per_node`.",
    )
    usd_per_gpu_hour: f.NotNegative | None = Field(
        None, description="Of one GPU, or CPU worker. Default: the pipeline file's, else the catalogue's."
    )
    overrides: tuple[f.Text, ...] = Field(
        (), strict=False, description="`KEY=VALUE` as for `--set`, like `kubernetes.queue=team-a`."
    )


class Places(SpecModel):
    """The places, and what one of them is chosen for."""

    version: Literal[1] = Field(description="Of this format.")
    goal: Goal = Field(
        "first", description="Which place is chosen: the one that is done first, or the cheapest."
    )
    places: tuple[RunPlace, ...] = Field(strict=False, min_length=1, max_length=100)


def default_path() -> Path:
    """In the folder of the user's settings."""
    return config_folder() / "places.yaml"


def read_places(path: str | Path) -> Places:
    """Raises SpecErrors."""
    places = read_as(Places, path)
    names = [place.name for place in places.places]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        hint = "give each a name of its own"
        raise SpecErrors([Problem.at(Place(str(path)), f"two places are called {twice[0]!r}", hint)])
    return places
