"""What the lines of a benchmark share: sizes, timing in turns, profiles, records and the page."""
