"""Retraining: a package is trained again on new data, on a schedule, by a machine."""
