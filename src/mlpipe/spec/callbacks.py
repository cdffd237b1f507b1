"""The `callbacks` of a training: objects of the user's own that hear how it goes."""

from typing import Literal

from pydantic import Field

from mlpipe.spec import fields as f
from mlpipe.spec.base import SpecModel


class Callback(SpecModel):
    """An object of yours that hears how the training goes. An error in it never ends the training."""

    entry: f.EntryPath = Field(
        description="`package.module:Class`, or a function that returns the object; it may have `on_start`, "
        "`on_step`, `on_validation`, `on_checkpoint`, `on_end`."
    )
    args: dict[f.Text, f.Json] = Field({}, description="Keyword arguments of the class.")
    ranks: Literal["first", "all"] = Field("first", description="Which ranks have one.")
