"""Settings of trackers, for the trainings that have some."""

from typing import Literal

from pydantic import Field

from mlpipe.spec import fields as f
from mlpipe.spec.base import SpecModel


class Mlflow(SpecModel):
    """Credentials come from the environment: MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and
    MLFLOW_TRACKING_PASSWORD."""

    uri: f.HttpUrl | None = Field(None, description="Of the server. Default: MLFLOW_TRACKING_URI.")
    experiment: f.Text | None = Field(None, description="Default: the pipeline's name.")


class Wandb(SpecModel):
    """The key comes from the environment: WANDB_API_KEY. Needs the package: `pip install 'mlpipe[wandb]'`."""

    project: f.Text | None = Field(None, description="Default: the pipeline's name.")
    entity: f.Text | None = Field(None, description="User or team. Default: the key's.")
    mode: Literal["online", "offline"] = Field(
        "online", description="`offline` writes files for `wandb sync`."
    )


class MlflowTracker(SpecModel):
    """MLflow, with settings."""

    mlflow: Mlflow = Field(description="Where its server is, and under what name runs stand there.")


class WandbTracker(SpecModel):
    """Weights & Biases, with settings."""

    wandb: Wandb = Field(description="Whose project it is.")
