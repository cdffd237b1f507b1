"""Whether the machines of a gang can be trusted with ranks: checked by each before it starts torchrun."""
