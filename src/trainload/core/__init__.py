"""Shared mechanisms of all parts. They import no other part of trainload."""
