"""Whether the model is as sure as it says. Nothing here knows of mlpipe: what `update` adds up is added up
over the workers, too, so that each row counts once."""

from torch import Tensor


class Coverage:
    """The share of prices between the first and the last quantile."""

    def __init__(self) -> None:
        self.inside = self.total = 0

    def update(self, outputs: Tensor, batch: dict[str, Tensor]) -> None:
        price = batch["price"]
        self.inside += int(((outputs[:, 0] <= price) & (price <= outputs[:, -1])).sum())
        self.total += len(price)

    def compute(self) -> float:
        return self.inside / self.total
