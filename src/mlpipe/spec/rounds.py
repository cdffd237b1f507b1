"""How often workers agree on the weights, of a training that says `update`: its settings, by name."""

from typing import Any, Literal

from pydantic import Field, create_model

from mlpipe._core.compression import CODES
from mlpipe.spec import fields as f
from mlpipe.spec.base import SpecModel

_STALENESS = (
    "So many steps a worker goes on while what it told travels, and may be ahead of the slowest. Default: it "
    "waits."
)


class LocalSgd(SpecModel):
    """Workers take the mean of their weights now and then (Stich, Local SGD, 2019)."""

    sync_every: f.Count = Field(20, description="Steps between two means.")
    staleness: f.FewOrZero = Field(0, description=_STALENESS)


class DiLoCo(SpecModel):
    """What workers have learnt since they agreed last is the gradient of an outer step with Nesterov momentum
    (Douillard et al., DiLoCo, 2023)."""

    sync_every: f.Count = Field(50, description="Steps between two outer steps.")
    outer_lr: f.Positive = Field(0.7, description="Learning rate of the outer step.")
    outer_momentum: f.BelowOne = Field(
        0.5, description="Its momentum. The paper's 0.9 is for runs of many hundred rounds."
    )
    compress: Literal[CODES] | None = Field(  # type: ignore[valid-type]
        None, description="How what was learnt is sent. Default: in fp32."
    )
    fragments: f.FewCount = Field(
        1,
        description="Parts of the model that take turns within `sync_every` steps, to spread the sending.",
    )
    staleness: f.FewOrZero = Field(0, description=_STALENESS)


class Async(DiLoCo):
    """diloco for workers that need not be at the same step (Liu et al., Asynchronous Local-SGD Training for
    Language Modeling, 2024; bounded as by Ho et al., Stale Synchronous Parallel, 2013)."""

    sync_every: f.Count = Field(20, description="Steps between two outer steps.")
    staleness: f.FewCount = Field(
        4,
        description="So many steps a worker goes on while what it told travels, and may be ahead of the "
        "slowest.",
    )


ROUNDS: dict[str, type[SpecModel]] = {"local_sgd": LocalSgd, "diloco": DiLoCo, "async": Async}


def _update(name: str, about: str) -> type[SpecModel]:
    """`{name: {...}}`."""
    settings = ROUNDS[name]
    inner: Any = {name: (settings, Field(description=about))}
    words = f"{name}, with settings."
    made: type[SpecModel] = create_model(
        f"{settings.__name__}Update", __base__=SpecModel, __doc__=words, **inner
    )
    return made


LocalSgdUpdate = _update("local_sgd", "How often.")
DiLoCoUpdate = _update("diloco", "How often, and the outer step.")
AsyncUpdate = _update("async", "How often, the outer step, and how far apart they may be.")
