"""The page of a run: its folder as one HTML file. Needs the extra `report`, for drawing and laying out; reading needs neither."""
