"""What a program may call: `mlpipe` exports it (`mlpipe/__init__.py`), and the command line stands on it.
Nothing here prints results, ends the process or knows of click: what goes wrong is an MlpipeError."""
