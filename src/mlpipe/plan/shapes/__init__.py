"""What the planner knows of a model's shape: `shape.py` says what it asks, and each other file answers for
one kind of model."""
