"""`python -m transferd` is the same as `transferd`."""

from transferd.cli.main import main

if __name__ == "__main__":
    main()
