"""A table of flats: size, rooms, age, distance to the centre, and the price that they fetched, the more
uncertain the larger. Made here; a file would be read in `flats` in the same way."""

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Flats(Dataset[dict[str, Tensor]]):
    def __init__(self, columns: Tensor, price: Tensor) -> None:
        self.columns, self.price = columns, price

    def __len__(self) -> int:
        return len(self.price)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"columns": self.columns[index], "price": self.price[index]}


def flats(num_rows: int, split: str = "train") -> Flats:
    draw = torch.Generator().manual_seed(1 if split == "train" else 2)
    columns = torch.rand(num_rows if split == "train" else num_rows // 8, 4, generator=draw)
    size, rooms, age, distance = columns.unbind(dim=1)
    price = 2 * size + 0.5 * rooms * size - 0.6 * age + 0.4 * torch.exp(-3 * distance)
    return Flats(columns, price + 0.3 * size * torch.randn(len(price), generator=draw))
