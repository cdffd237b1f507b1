"""Trains a model with torchrun."""
