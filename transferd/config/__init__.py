"""The whole configuration as one frozen, typed value, made once at the edge.

Four sources, later ones win: defaults, the TOML file, `TRANSFERD_SECTION__KEY` in the environment,
`--set section.key=value`. An unknown key, a wrong type or an impossible combination raises `ConfigError` with
one line that names the key and the value; nothing is guessed or clamped.

    size.py      numbers of bytes
    sections.py  every setting and its default
    rules.py     what several settings together must be, or mean
    environment.py  what FastDeploy's, Mooncake's and AttentionStore's variables fill in
    personal.py  where a normal user's daemon keeps its files
    loading.py   how the sources become one value
"""

from transferd.config.loading import PERSONAL, from_tree, load, origins, outdated, to_tree
from transferd.config.sections import (
    DEFAULT_ENGINE,
    CacheSection,
    Config,
    FileStorageSection,
    LevelSection,
    MooncakeStorageSection,
    ServerSection,
    StorageSection,
)
from transferd.config.size import Size

__all__ = [
    "DEFAULT_ENGINE",
    "PERSONAL",
    "CacheSection",
    "Config",
    "FileStorageSection",
    "LevelSection",
    "MooncakeStorageSection",
    "ServerSection",
    "Size",
    "StorageSection",
    "from_tree",
    "load",
    "origins",
    "outdated",
    "to_tree",
]
