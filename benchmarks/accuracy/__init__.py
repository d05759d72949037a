"""How close predictions come to measurements: each module measures or reads, and prints a table of signed errors."""
