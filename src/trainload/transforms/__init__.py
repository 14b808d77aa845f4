"""Passes over the graphs of a package."""
