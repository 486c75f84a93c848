"""Sends the metrics of runs to trackers: TensorBoard, W&B, MLflow, and those that packages add."""
