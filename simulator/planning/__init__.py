"""Questions about what was never measured: other flags, capacity, and the cheapest fleet that meets its targets."""
