"""Ticks of a retraining: stages, lease and promotion gate."""
