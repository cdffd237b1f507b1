"""What `mlpipe tune` does: which changes may help (`changes.py`), what their trials say (`decide.py`), and
the trials themselves, which are short trainings (`trials.py`)."""
