"""Pages of runs, stores, packages and plans as self-contained HTML files. Rendering needs the extra
`report`.
"""
