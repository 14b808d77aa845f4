"""The configuration file of a retraining, and its checks."""
