"""Programs and weights of a package for tools that do not know it."""
