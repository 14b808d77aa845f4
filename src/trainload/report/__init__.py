"""Reports of runs and stores as self-contained HTML files. Rendering needs the extra `report`."""
