"""Block layouts: one file per attention family, chosen by `cache.attention`."""

from transferd.layout.base import Arena, BlockLayout, Geometry, Plane, Segment
from transferd.layout.registry import build_layout

__all__ = ["Arena", "BlockLayout", "Geometry", "Plane", "Segment", "build_layout"]
