"""One tick of a retraining: its stages, its lease and its gate."""
