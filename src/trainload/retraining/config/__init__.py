"""The file of a retraining, and its checks."""
