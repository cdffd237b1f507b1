"""Models that are none of mlpipe's presets, for the trainings that have them."""

from typing import Literal

from pydantic import Field

from mlpipe.spec import fields as f
from mlpipe.spec.base import SpecModel


class PretrainedModel(SpecModel):
    """Open weights of the architectures `llama`, `mistral`, `qwen2`, `qwen3`, `mixtral` and `qwen3_moe`:
    config.json says the shape, and the training starts from the weights."""

    pretrained: f.WeightsPath = Field(
        description="Folder of Hugging Face's layout, a path, `s3://bucket/...` or below "
        "`{{stages.NAME.output}}`: config.json and "
        "*.safetensors, with an index where there are several; or a model in the layout of Hugging Face's "
        "cache, `models--ORG--NAME`."
    )
    revision: f.Revision | None = Field(
        None,
        description="Commit, branch or tag of the weights, which only that layout tells. Default: the commit "
        "that the path names, of `models--ORG--NAME` the branch `main`.",
    )
    seq_len: f.Count = Field(description="Tokens in a sample.")


class OwnModel(SpecModel):
    """A function of yours that returns a plain `nn.Module`."""

    entry: f.EntryPath = Field(description="`package.module:function`, importable where mlpipe runs.")
    args: dict[f.Text, f.Json] = Field({}, description="Keyword arguments of the function.")
    blocks: tuple[f.Text, ...] = Field(
        (),
        strict=False,
        description="Modules to shard, checkpoint and compile, such as `layers`. "
        "Default: the model's ModuleLists.",
    )
    seq_len: f.Count = Field(1, description="Tokens in a sample; 1 if samples are not text.")
    tensor: dict[f.Text, Literal["column", "row", "sum"]] = Field(
        {},
        description="How `mesh: {tp: ...}` splits it, by patterns of names of modules (`*`, `?`, `[ab]`): "
        "`column` of an nn.Linear its outputs; `row` of one its inputs, as a column left them, or of an "
        "nn.Embedding the vocabulary; `sum` what is whole between a column and its row. "
        "Default: the plan that classes of `transformers` bring.",
    )
