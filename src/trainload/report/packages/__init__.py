"""The page of a package: its modules, and their operators beside source lines."""
