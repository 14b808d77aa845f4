"""Mechanisms that every part uses. They import no part of trainload."""
