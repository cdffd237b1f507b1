"""The `profile` of a training, for those that have one."""

from pydantic import Field

from mlpipe.spec import fields as f
from mlpipe.spec.base import SpecModel


class Profile(SpecModel):
    """Steps that torch's profiler traces, unasked."""

    at: f.Count = Field(description="The first of them; not the very first ones, which are slower.")
    steps: f.HundredAtMost = Field(
        5, description="How many: a trace of more is larger than any viewer likes."
    )
    memory: bool = Field(False, description="Trace memory, too: on a GPU a snapshot of the allocator.")
