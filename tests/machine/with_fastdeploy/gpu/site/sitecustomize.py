"""Python imports this at the start of every process that has this directory on its path; see machine.py."""

from tests.machine.with_fastdeploy.gpu import machine

machine.install()
