"""Trackers: what a training tells TensorBoard, MLflow or Weights & Biases, beside a training that waits for
none of them. Importable without any of their packages."""
