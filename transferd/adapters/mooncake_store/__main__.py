"""Print the directory that PYTHONPATH needs, so that `mooncake.store` is this package."""

from pathlib import Path

print(Path(__file__).parent / "as_mooncake")
