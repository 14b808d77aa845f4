"""Scheduled retraining of a package on new data."""
