"""Block layouts: planes by attention family, chosen by `cache.attention`."""

from transferd.blocks.layout.base import Arena, BlockLayout, Geometry, Plane, Segment
from transferd.blocks.layout.families import build_layout

__all__ = ["Arena", "BlockLayout", "Geometry", "Plane", "Segment", "build_layout"]
