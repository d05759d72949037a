"""Everything that touches reality: endpoints, load, measured runs, fitting, validation."""
