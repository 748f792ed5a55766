"""`python -m transferd` is the same as `transferd`."""

from transferd.cli import main

if __name__ == "__main__":
    main()
