"""The commands of ``capsim``, one module each."""
