"""Export of a package's graphs and weights to other tools."""
