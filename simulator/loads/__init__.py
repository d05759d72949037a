"""What is asked of a server: lengths, arrivals, sessions and traces, and the words and files that say them."""
