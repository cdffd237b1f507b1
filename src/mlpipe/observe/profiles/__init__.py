"""Traces of torch.profiler: what they say of a step, and what to do about it."""
