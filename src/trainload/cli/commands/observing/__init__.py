"""Commands that look into runs: reports, dashboards, bad values."""
