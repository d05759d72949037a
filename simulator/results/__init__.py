"""What came of a run, measured or simulated: its tables, percentiles and files."""
