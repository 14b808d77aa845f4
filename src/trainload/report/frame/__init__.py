"""The parts that all pages share: the frame, its style, charts and wording."""
