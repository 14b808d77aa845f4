"""Packages that leave this machine: stores, registries and signatures."""
