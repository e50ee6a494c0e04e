"""Evaluation: the metrics registry, scores, predictions, baselines, held-out clients, history."""
