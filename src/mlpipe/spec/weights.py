"""Mappings of `train.init_from` and `train.adapter`, for the files that have them."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from mlpipe._core.quantized import Base
from mlpipe.spec import fields as f
from mlpipe.spec.base import SpecModel


class _Weights(SpecModel):
    map: dict[f.Text, f.Text] = Field(
        {},
        description="Names of tensors there, and what they are called here; `*` stands for any text, and is "
        'the same on both sides, as in `{"encoder.*": "backbone.*"}`. Of several the longest counts.',
    )
    strict: bool = Field(
        True,
        description="Refuse tensors that are missing, left over or of another shape. Else what fits is "
        "loaded, and the rest is listed in the report.",
    )


class FileWeights(_Weights):
    """Weights out of safetensors."""

    path: f.WeightsPath = Field(
        description="A file `*.safetensors`, an index `*.safetensors.index.json`, or the folder that has "
        "one: a path, `s3://bucket/...` or below `{{stages.NAME.output}}`."
    )


class RunWeights(_Weights):
    """Weights out of a checkpoint, without its optimizer."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["run"]}, {"required": ["stage"]}]})

    run: f.Name | None = Field(None, description="Of which run. Default: this one.")
    stage: f.Name | None = Field(
        None,
        description="Training stage, in this run one that is needed. Default: the only one with checkpoints.",
    )
    step: f.Count | Literal["best"] | None = Field(
        None,
        description="Of the checkpoint; `best`: that of the training's `validate.best`. Default: the newest.",
    )
    store: f.StoreUrl | None = Field(None, description="Where that run is. Default: this run's own store.")


class ModelWeights(_Weights):
    """Weights of a promoted model."""

    model: f.ModelVersion = Field(description="`name@alias` or `name/version`.")
    store: f.StoreUrl | None = Field(
        None, description="Where it is registered. Default: this run's own store."
    )


class Lora(SpecModel):
    """Low-rank adapters (LoRA) beside linear layers."""

    rank: f.Count = Field(16, description="Columns between the two matrices of an adapter.")
    alpha: f.Positive | None = Field(
        None, description="The adapters' sum is multiplied by alpha / rank. Default: the rank."
    )
    targets: Literal["auto"] | Annotated[tuple[f.Text, ...], Field(min_length=1, strict=False)] = Field(
        "auto",
        description="Which layers have one: patterns of whole names, or of what follows the last dot, like "
        "`[q_proj, v_proj]`; `auto`: all linear layers of the blocks.",
    )
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.0, description="Share of what goes into an adapter that is left out while it is trained."
    )
    rslora: bool = Field(False, description="Multiply by alpha / sqrt(rank) instead.")
    dora: bool = Field(
        False, description="Train the lengths of the weight's rows apart from their directions (DoRA)."
    )


class Adapter(SpecModel):
    """What is trained beside the model."""

    lora: Lora = Field(description="Low-rank adapters.")
    base: Base | None = Field(
        None,
        description="Keep the weights of the blocks' linear layers, which are not trained, in few bits "
        "(QLoRA): `nf4`, 4.25 bits a weight, or `int8`, 8.25. Default: in fp32.",
    )
