"""The weights that a training starts from, opened for it, and what the model calls them; without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlpipe._core.errors import DamagedError, StoreError, TrainError
from mlpipe._core.presets import MOE, OWN, MoeConfig, built_by
from mlpipe.plan.entry import Entry
from mlpipe.plan.model import InitPlan
from mlpipe.store import weights
from mlpipe.store.base import Store
from mlpipe.store.open import open_store
from mlpipe.store.weights import Weights
from mlpipe.train import expert_files

_FILE_NAMES = {"model.*": "*"}  # of mlpipe's own models in files, as `transformers` and our exports have them


def open_found(store: Store, init: InitPlan, model: Entry) -> Weights:
    """`store`: the run's own. `model`: what builds the model. Raises TrainError (input) when they are gone,
    or others than those that the run was asked for with."""
    wanted = init.found
    if wanted is None:
        raise TrainError("nobody looked for the weights to start from", where="train.init_from")
    own = store if wanted.store_url == store.url else open_store(wanted.store_url)
    read = weights.of_checkpoint if wanted.format == "checkpoint" else weights.of_files
    try:
        source = read(own, wanted.key)
    except DamagedError:
        raise
    except StoreError as error:
        if error.kind != "input":
            raise
        gone = "its run keeps the newest only: start from a model, which is kept (mlpipe models promote RUN)"
        raise TrainError(
            f"{wanted.words} is gone: {error.message}",
            where=error.where,
            hint=gone if wanted.format == "checkpoint" else error.hint or "put it back, or start a new run",
            kind="input",
        ) from None
    if wanted.digest not in (None, source.digest):
        odd = sorted({one.rpartition(" ")[0] for one in {*wanted.files} ^ {*source.files}})
        which = f": {', '.join(odd[:5])}" if odd and wanted.files else ""
        raise TrainError(
            f"{wanted.words} changed since the run was asked for{which}",
            where=source.where,
            hint="put back what was there, or start a new run",
            kind="input",
        )
    if init.config:
        _drop_derived(source, model.args)
    if wanted.format == "safetensors" and model.entry == MOE:
        sizes = built_by(model.entry, model.args)
        assert isinstance(sizes, MoeConfig)
        expert_files.stack(sizes, source.tensors, init.config.get("model_type", expert_files.GLM))
    return source


def _drop_derived(source: Weights, sizes: Mapping[str, Any]) -> None:
    """What some files of open weights have besides, and `transformers` leaves: a head that is the embedding,
    rotary frequencies."""
    for name in list(source.tensors):
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and sizes.get("tied")):
            del source.tensors[name]


def names_here(init: InitPlan, entry: str) -> Mapping[str, str]:
    """Patterns of names there, and what they are called in the model that `entry` builds."""
    assert init.found is not None
    if not init.map and init.found.format == "safetensors" and entry in OWN:
        return _FILE_NAMES
    return init.map
