"""Tables and lines that the command line prints."""
