"""Commands that set up: a first job file, shell completion, measurements of this machine."""
