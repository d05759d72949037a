"""A run as a page that convinces: the conclusion first, then figures, tables, facts, definitions and trust."""
