"""Sweeps: several runs of one pipeline with other values, and the best of them."""
