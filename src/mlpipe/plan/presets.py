"""The presets' shapes, which `spec` checks files against and `plan` counts with: see `_core/presets.py`."""

from mlpipe._core.presets import PRESETS, LlamaConfig

__all__ = ["PRESETS", "LlamaConfig"]
