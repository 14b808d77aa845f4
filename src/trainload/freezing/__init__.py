"""Freezing of jobs: capture, proof and the written package."""
