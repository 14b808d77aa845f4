"""The commands, by topic. Importing one imports neither torch nor Ray."""
