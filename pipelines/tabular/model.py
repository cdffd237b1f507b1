"""An MLP over the columns of a table that says how sure it is: three quantiles instead of one number. Nothing
here knows of mlpipe; `loss` makes the loss its own."""

import torch
from torch import Tensor, nn

QUANTILES = (0.1, 0.5, 0.9)


class Mlp(nn.Sequential):
    def __init__(self, num_columns: int, width: int) -> None:
        super().__init__(nn.Linear(num_columns, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.append(nn.Linear(width, len(QUANTILES)))

    def loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        errors = batch["price"][:, None] - self(batch["columns"])
        quantiles = errors.new_tensor(QUANTILES)
        return torch.maximum(quantiles * errors, (quantiles - 1) * errors).mean(dim=1).sum(), len(errors)
