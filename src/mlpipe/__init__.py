"""mlpipe: one YAML file trains a model on a laptop, through Jenkins and on a gang of GPU pods."""

__version__ = "0.1.0"
