"""``python -m capsim`` is the ``capsim`` command."""

from capsim.cli import main

main()
