"""A small CNN with batch norm. Nothing here knows of mlpipe: logits out of `inputs`, and the loss is mlpipe's
cross-entropy with `targets`."""

from torch import nn


def block(channels_in: int, channels_out: int) -> nn.Module:
    convolution = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels_out), nn.ReLU(), nn.MaxPool2d(2))


def cnn(num_classes: int, width: int) -> nn.Module:
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, num_classes))
    return nn.Sequential(block(1, width), block(width, 2 * width), head)
