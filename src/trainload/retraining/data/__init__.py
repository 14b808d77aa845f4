"""The data of a tick."""
