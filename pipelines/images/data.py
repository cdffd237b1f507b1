"""Grey images of 16 x 16 with a disc, a square, a cross or stripes somewhere, under noise: made here, so that
there is nothing to download. The images of a folder would be read in `__getitem__` in the same way."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

SIZE = 16


class Shapes(Dataset[dict[str, Tensor]]):
    def __init__(self, num_images: int, seed: int) -> None:
        self.num_images = num_images
        self.seed = seed

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(
            self.seed * 1_000_003 + index
        )  # the same whenever it is asked for
        kind = index % 4
        centre_y, centre_x = (torch.rand(2, generator=draw) * 6 + 5).tolist()
        radius = 2.5 + 2 * torch.rand((), generator=draw).item()
        rows, columns = torch.arange(SIZE)[:, None] - centre_y, torch.arange(SIZE)[None, :] - centre_x
        inside = torch.maximum(rows.abs(), columns.abs()) <= radius
        shape = (
            rows.square() + columns.square() <= radius**2,
            inside,
            inside & (torch.minimum(rows.abs(), columns.abs()) <= 0.8),
            inside & (rows.round().long() % 2 == 0),
        )[kind]
        image = shape.float() + 0.3 * torch.randn(SIZE, SIZE, generator=draw)
        return {"inputs": image[None], "targets": torch.tensor(kind)}


def shapes(num_images: int, split: str = "train") -> Shapes:
    return Shapes(num_images, seed=1) if split == "train" else Shapes(num_images // 8, seed=2)
