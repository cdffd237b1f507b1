"""Gives a checkpoint a version in the registry of models."""
