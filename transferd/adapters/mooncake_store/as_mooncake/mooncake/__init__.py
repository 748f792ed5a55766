"""`mooncake.store` is transferd's; the other modules are those of the Mooncake that is installed, if there is one."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
