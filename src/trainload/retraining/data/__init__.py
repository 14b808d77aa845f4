"""Data of a tick: windows, snapshots, row selection and drift."""
