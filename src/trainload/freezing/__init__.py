"""Freezing a job: capture, proof and the written package."""
