"""Conversations, for the trainings that read some; rules between their keys: `spec/uneven_data.py`."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from mlpipe.spec import fields as f
from mlpipe.spec.base import SpecModel


class ChatFile(SpecModel):
    """A file of conversations, in a mixture."""

    weight: f.Weight = Field(1.0, description=f.WEIGHT)
    path: f.Text = Field(description="The file, as of `chat`.")


def _one_or_several(value: Any) -> str:
    return "several" if isinstance(value, list | tuple) else "one"


class ChatData(SpecModel):
    """JSON lines of conversations, of which the assistant's part is learnt."""

    chat: Annotated[
        Annotated[f.Text, Tag("one")]
        | Annotated[tuple[ChatFile, ...], Field(strict=False, min_length=1), Tag("several")],
        Discriminator(_one_or_several),
    ] = Field(
        description="A file of JSON lines: `messages`, each with `role` and `content`; `prompt` and "
        "`completion`; or `text`. Or several with a `weight` each, which are mixed."
    )
    validation: f.Text | None = Field(
        None, description="The held-out file, in the same way; without it nothing is validated with."
    )
    tokenizer: f.Text | None = Field(
        None,
        description="A model's folder as Hugging Face has it, with `tokenizer.json` and its chat template; "
        "or a `tokenizer.json` alone, as in `{{stages.NAME.output}}` of `mlpipe-corpus`. "
        "Default: the folder of `model.pretrained`.",
    )
    packing: Literal["auto", "off", "best_fit", "balanced"] = Field(
        "auto",
        description="`balanced`: several samples in a row, so that workers have equal work; `best_fit`: as "
        "few rows as it takes; `off`: a sample a row, padded. `auto`: `off` for your own "
        "models, else `balanced`.",
    )
    template: f.Text | None = Field(
        None, description="Of conversations: a Jinja file, or `chatml`. Default: the tokenizer's folder's."
    )
    batch_size: f.Count = Field(description="Samples in a step, over all workers.")
    micro_batch: f.CountOrAuto = Field(
        "auto", description="Samples in one forward pass of one worker; `auto`: the fastest that fits."
    )

    @property
    def files(self) -> tuple[ChatFile, ...]:
        """One, or those that are mixed."""
        return (ChatFile(path=self.chat, weight=1.0),) if isinstance(self.chat, str) else self.chat
