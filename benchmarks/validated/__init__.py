"""The same training with validation, tracker and checkpoints, as users of each tool write it."""
