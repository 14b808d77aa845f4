"""Application of passes to the graphs of a package, and listings of graphs and operators."""
