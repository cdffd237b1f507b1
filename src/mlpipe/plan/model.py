"""What is trained (`TrainPlan.model`), the weights it begins with, and what is added to it."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from mlpipe._core.quantized import Base
from mlpipe._core.serial import Sparse
from mlpipe.plan.entry import Entry


class ModelPlan(NamedTuple):
    """`build(**args)` returns the plain module. For a preset, `build` is mlpipe's own Llama.

    `blocks` names the modules to shard, checkpoint and compile ("layers", or "encoder.layers"); empty:
    the model's ModuleLists. `seq_len`: tokens a sample. `preset`: name, of open weights that of
    their folder, or None for a user's own. `tensor`: how the axis `tp` splits a user's own, `column`, `row`
    or `sum` by patterns of modules; empty: by the plan that the model brings.
    """

    build: Entry
    preset: str | None
    seq_len: int
    blocks: tuple[str, ...]
    tensor: Mapping[str, str] = {}


class AdapterPlan(NamedTuple):
    """Low-rank adapters, see `_core/adapters.py`. `targets`: patterns of layers; empty: all linear layers
    of the blocks. `dropout`: of what goes into an adapter. `dora`: how long the rows are is trained apart.
    `base`: how the weights of these layers are kept, see `_core/quantized.py`; None: as they are."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False
    base: Sparse[Base | None] = None


class FoundWeights(NamedTuple):
    """What `init_from` led to when it was looked up first, which is what every attempt starts from. `words`:
    for people. `format`, `store_url`, `key`: a checkpoint's prefix there, or a file or folder of safetensors.
    `step`: of a checkpoint. `digest`: of the manifest, or of names, sizes, times and headers of files; None
    for what another stage made, which has a digest of its own. `files`: each with its digest. `revision`: the
    commit of open weights that lie in the layout of Hugging Face's cache."""

    words: str
    format: Literal["checkpoint", "safetensors"]
    store_url: str
    key: str
    step: int | None
    digest: str | None
    files: Sparse[tuple[str, ...]] = ()
    revision: Sparse[str | None] = None


class InitPlan(NamedTuple):
    """`asked`: as in the file, one of `path`, `model`, or `run` and `stage`. `path`: that one with its
    placeholders filled. `map`: patterns of names there and what they are here. `strict`: every tensor here is
    there, none besides. `found`: None before somebody looked. `config`, `revision`: of open weights their
    config.json, and their commit where the folder's layout tells it."""

    asked: dict[str, Any]
    path: str | None
    map: dict[str, str]
    strict: bool
    found: FoundWeights | None = None
    config: Mapping[str, Any] = {}
    revision: Sparse[str | None] = None
